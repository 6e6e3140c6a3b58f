#!/usr/bin/env bash
# Builds the servers of the control plane that the tests run on (go.mod says which and pins them) into a cache outside the
# checkout, once per change of go.mod, go.sum or this file. The last line on stdout is the folder they are in.
#   build.sh            build what is missing, then print the folder
#   build.sh --where    only print the folder
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

kubernetes=1.36.3 # what clients are told; go.mod pins the same
packages=(
  go.etcd.io/etcd/server/v3
  k8s.io/kubernetes/cmd/kube-apiserver
  k8s.io/kubernetes/cmd/kube-controller-manager
  k8s.io/kubernetes/cmd/kube-scheduler
  k8s.io/kubernetes/cmd/kubectl
  sigs.k8s.io/kwok/cmd/kwok
)
binaries=(etcd kube-apiserver kube-controller-manager kube-scheduler kubectl kwok)

cache="${PILOTHOUSE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/pilothouse}/control-plane"
key=$(cat go.mod go.sum build.sh | sha256sum | cut -c1-16)
built="$cache/$key"

fail() {
  printf 'control-plane: %s\n' "$1" >&2
  exit 1
}

# The folder is moved into place whole, so it is there only when it is complete; a binary may have been deleted since.
is_built() {
  local name
  [[ -d $built/kwok ]] || return 1
  for name in "${binaries[@]}"; do
    [[ -x $built/bin/$name ]] || return 1
  done
}

if [[ ${1:-} == --where ]] || is_built; then
  echo "$built/bin"
  exit
fi

export PATH="$PATH:/usr/local/go/bin" # where Go's own archive goes; login shells have it, CI's often do not
needed=$(awk '$1 == "go" { print $2; exit }' go.mod)
command -v go >/dev/null ||
  fail "building the test servers needs Go $needed or newer, and there is no \`go\` on PATH: install Go (https://go.dev/doc/install) and run this again"
version=$(GOTOOLCHAIN=local go env GOVERSION)
unset GOOS GOARCH
export CGO_ENABLED=0 GOFLAGS= GOWORK=off
# Asks Go itself, because a newer toolchain may be one that the go command fetches.
go list -m >/dev/null 2>&1 ||
  fail "building the test servers needs Go $needed or newer, and $(command -v go) is ${version:-unknown}: install a newer Go (https://go.dev/doc/install) and run this again"

mkdir -p "$cache"
exec 9>"$cache/build.lock"
if ! flock --nonblock 9; then
  echo "control-plane: another build is running, waiting for it" >&2
  flock 9
fi
if is_built; then
  echo "$built/bin"
  exit
fi

rm -rf "$cache"/.building "$built"
new="$cache/.building"
mkdir -p "$new/bin" "$new/kwok"
go_pid=
trap '[[ -z $go_pid ]] || kill "$go_pid" 2>/dev/null || true; rm -rf "$new"' EXIT

echo "control-plane: building the servers of Kubernetes $kubernetes with $(go env GOVERSION), once per machine: 10 to 20 minutes on two cores" >&2
SECONDS=0
stamps=
for stamp in k8s.io/component-base/version k8s.io/client-go/pkg/version; do # what servers say, what clients say
  stamps+=" -X $stamp.gitVersion=v$kubernetes -X $stamp.gitMajor=1 -X $stamp.gitMinor=${kubernetes:2:2}"
done
# One call, so that what the servers have in common is compiled once and linking fills idle cores.
go build -trimpath -buildvcs=false -ldflags "-s -w$stamps" -o "$new/bin/" "${packages[@]}" >"$new/log" 2>&1 &
go_pid=$!

# One line per server, with the time from the start until it was there.
reported=()
report() {
  local name
  for name in server "${binaries[@]}"; do
    [[ -e $new/bin/$name && " ${reported[*]-} " != *" $name "* ]] || continue
    printf '  %-24s %dm%02ds\n' "${name/#server/etcd}" $((SECONDS / 60)) $((SECONDS % 60)) >&2
    reported+=("$name")
  done
}
while kill -0 "$go_pid" 2>/dev/null; do
  report
  sleep 1
done
if ! wait "$go_pid"; then
  go_pid=
  grep -v '^go: downloading' "$new/log" | tail -n 30 >&2 || true
  fail "go build failed, see above"
fi
go_pid=
report
mv "$new/bin/server" "$new/bin/etcd" # Go calls a binary by its import path, .../etcd/server/v3

# What a fake kubelet does to nodes and pods: kwok reads it from files.
stages="$(go list -m -f '{{.Dir}}' sigs.k8s.io/kwok)/kustomize/stage"
for file in "$stages"/{node,pod}/fast/*.yaml; do
  [[ $(basename "$file") == kustomization.yaml ]] || install -m 644 "$file" "$new/kwok/"
done
rm "$new/log"
mv "$new" "$built"
is_built || fail "the build ended without one of ${binaries[*]} in $built/bin"
echo "$built/bin"
