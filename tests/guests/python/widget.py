"""A plugin in Python, by componentize-py: tests/guests/build.sh. It does what that in Go does: it answers with a ConfigMap of what it
can see of the world outside, which has to be nothing."""

import json
import os
import random
import sys
import time
from datetime import datetime, timezone

from componentize_py_types import Err
from wit_world.imports import log
from wit_world.imports.types import Child, Desired, Failure_Terminal, Next_OnChange

DESCRIPTION = {
    "parent": {"apiVersion": "t.example/v1", "kind": "Widget"},
    "children": [{"apiVersion": "v1", "kind": "ConfigMap"}],
}


def refusal(look):
    try:
        return str(look())
    except OSError as error:
        return f"error: {error.strerror}"


class Reconciler:
    def describe(self):
        return json.dumps(DESCRIPTION)

    def reconcile(self, request):
        parent = json.loads(request.parent)
        match parent.get("spec", {}).get("do", ""):
            case "sleep":
                time.sleep(3600)
            case "panic":
                raise RuntimeError("as it was told")
            case "exit":
                os._exit(3)
            case "grow":
                held = []
                while True:
                    held.append(bytearray(1 << 20))
            case "print":
                for line in range(100_000):
                    print("line", line, "x" * 100)
            case "fail":
                raise Err(Failure_Terminal("as it was told"))
        name = parent["metadata"]["name"]
        child = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": name},
            "data": {
                "now": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
                "arguments": str(len([argument for argument in sys.argv if argument])),
                "environment": str(len(os.environ)),
                "file": refusal(lambda: open("/etc/hostname").read()),
                "folder": refusal(lambda: os.listdir("/")),
                "children": str(len(request.children)),
            },
        }
        random.random()
        print("reconciled", name, flush=True)
        log.write(log.Level.DEBUG, "reconciled", [("name", name)])
        return Desired([Child(json.dumps(child), "{}")], None, [], [], Next_OnChange(), "{}")
