#!/usr/bin/env bash
# Builds the S3 server that tests talk to (go.mod says which and pins it) into a cache outside the checkout,
# once per change of go.mod, go.sum or this file. The last line on stdout is the folder it is in.
#   build.sh            build it if it is missing, then print the folder
#   build.sh --where    only print the folder
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

cache="${PILOTHOUSE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/pilothouse}/s3"
built="$cache/$(cat go.mod go.sum build.sh | sha256sum | cut -c1-16)"

if [[ ${1:-} == --where || -x $built/versitygw ]]; then
  echo "$built"
  exit
fi

export PATH="$PATH:/usr/local/go/bin" # where Go's own archive goes; login shells have it, CI's often do not
if ! command -v go >/dev/null; then
  echo "s3: building the S3 server needs Go, and there is no \`go\` on PATH: install Go (https://go.dev/doc/install) and run this again" >&2
  exit 1
fi
unset GOOS GOARCH
export CGO_ENABLED=0 GOFLAGS= GOWORK=off

mkdir -p "$cache"
exec 9>"$cache/build.lock"
flock 9
if [[ ! -x $built/versitygw ]]; then
  new="$cache/.building"
  rm -rf "$new"
  mkdir "$new"
  trap 'rm -rf "$new"' EXIT
  go build -trimpath -buildvcs=false -ldflags "-s -w" -o "$new/" tool >&2
  rm -rf "$built"
  mv "$new" "$built" # moved whole, so it is there only when it is complete
fi
echo "$built"
