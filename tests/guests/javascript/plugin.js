// A plugin in JavaScript, by componentize-js: tests/guests/build.sh. It does what that in Go does: it answers with a ConfigMap of
// what it can see of the world outside, which has to be nothing.
import { write } from "pilothouse:plugin/log@0.1.0";

const description = {
  parent: { apiVersion: "t.example/v1", kind: "Widget" },
  children: [{ apiVersion: "v1", kind: "ConfigMap" }],
};

function act(what) {
  switch (what) {
    case "panic":
      throw new Error("as it was told");
    case "spin":
      for (;;);
    case "grow":
      for (const held = []; ; ) held.push(new Uint8Array(1 << 20).fill(1));
    case "print":
      for (let line = 0; line < 100_000; line++) console.log("line", line, "x".repeat(100));
      break;
    case "fail":
      throw { payload: { tag: "terminal", val: "as it was told" } };
  }
}

export const reconciler = {
  describe: () => JSON.stringify(description),
  reconcile(request) {
    const parent = JSON.parse(request.parent);
    act(parent.spec?.do);
    const { name } = parent.metadata;
    const child = {
      apiVersion: "v1",
      kind: "ConfigMap",
      metadata: { name },
      data: {
        now: new Date().toISOString().replace(".000Z", "Z"),
        children: String(request.children.length),
      },
    };
    Math.random();
    console.log("reconciled", name);
    write("debug", "reconciled", [["name", name]]);
    const children = [{ object: JSON.stringify(child), options: "{}" }];
    return { children, status: undefined, conditions: [], events: [], next: { tag: "on-change" }, extra: "{}" };
  },
};
