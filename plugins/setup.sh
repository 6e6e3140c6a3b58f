#!/bin/sh
# Makes sure that this machine can build Rust plugins; does nothing, and says nothing, when it already can.
#
# The usual way is a WebAssembly target of rustup. Where rustup cannot download one (no route to its server), Debian's
# compiler comes with the source of the standard library, and `pilothouse build` compiles that along with the plugin.
set -eu

target=wasm32-unknown-unknown
# Given to rustup and apt, which otherwise try a server that does not answer for minutes.
patience=20

started=$(date +%s)

have_target() {
    for candidate in "$target" wasm32-wasip2; do
        libraries=$(rustc --print target-libdir --target "$candidate" 2>/dev/null) && [ -d "$libraries" ] && return
    done
    return 1
}

have_debian() {
    [ -x /usr/bin/cargo ] && [ -x /usr/bin/rustc ] && [ -d /usr/lib/rustlib/src/rust/library/std ] || return
    for linker in "$(rustc --print sysroot)"/lib/rustlib/*/bin/rust-lld /usr/bin/rust-lld /usr/bin/wasm-ld /usr/bin/wasm-ld-19; do
        [ -e "$linker" ] && return
    done
    return 1
}

finish() {
    echo "$1 ($(($(date +%s) - started)) s)"
    exit
}

have_target || have_debian && exit

if command -v rustup >/dev/null && timeout "$patience" rustup target add "$target" >/dev/null 2>&1 && have_target; then
    finish "installed the Rust target $target"
fi

packages="rustc-web cargo-web rust-web-src lld-19"
if ! command -v apt-get >/dev/null; then
    echo "cannot install a WebAssembly target for Rust: run \`rustup target add $target\` with access to the internet" >&2
    exit 1
fi
root=
if [ "$(id -u)" != 0 ]; then
    root="sudo -n"
    if ! $root true 2>/dev/null; then
        echo "a WebAssembly target for Rust is missing: run \`rustup target add $target\`, or as root \`apt-get install $packages\`" >&2
        exit 1
    fi
fi

log=$(mktemp)
trap 'rm -f "$log"' EXIT
install() {
    # shellcheck disable=SC2086 # the words of $root and $packages are meant
    $root env DEBIAN_FRONTEND=noninteractive \
        apt-get -o Acquire::http::Timeout="$patience" -o DPkg::Lock::Timeout=600 install -y --no-install-recommends $packages
}
# The package lists may be missing or old; fetching them costs time, so only then.
if ! install >"$log" 2>&1 && ! { $root apt-get update && install; } >"$log" 2>&1; then
    cat "$log" >&2
    echo "failed to install $packages" >&2
    exit 1
fi
have_debian || { echo "$packages are installed, but do not build plugins here" >&2; exit 1; }
finish "installed $packages"
