#!/usr/bin/env bash
# Builds the operators in Go and Python that Pilothouse is measured against (go.mod and requirements.txt say of what, and pin it) into a
# cache outside the checkout, once per change of them. The last line on stdout is the folder they are in: `controller-runtime`, `webhook`,
# and `kopf`, an environment of Python.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

cache="${PILOTHOUSE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/pilothouse}/bench"
built="$cache/$(cat build.sh controller-runtime/go.* controller-runtime/*.go controller-runtime/webhook/*.go kopf/requirements.txt | sha256sum | cut -c1-16)"

export PATH="$PATH:/usr/local/go/bin" # where Go's own archive goes; login shells have it, others often do not
for tool in go python3; do
  if [[ ! -d $built ]] && ! command -v "$tool" >/dev/null; then
    echo "bench: building the operators needs Go and Python 3, and there is no \`$tool\` on PATH: install it and run this again" >&2
    exit 1
  fi
done
unset GOOS GOARCH
export CGO_ENABLED=0 GOFLAGS= GOWORK=off

mkdir -p "$cache"
exec 9>"$cache/build.lock"
flock 9
if [[ ! -d $built ]]; then
  new="$cache/.building"
  rm -rf "$new"
  mkdir "$new"
  trap 'rm -rf "$new"' EXIT
  (cd controller-runtime && go build -trimpath -buildvcs=false -ldflags "-s -w" -o "$new/controller-runtime" . &&
    go build -trimpath -buildvcs=false -ldflags "-s -w" -o "$new/webhook" ./webhook) >&2
  python3 -m venv "$new/kopf"
  "$new/kopf/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --requirement kopf/requirements.txt >&2
  rm -rf "$built"
  mv "$new" "$built" # moved whole, so it is there only when it is complete
fi
echo "$built"
