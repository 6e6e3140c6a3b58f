#!/bin/sh
# Makes sure that this machine has PostgreSQL, which the tests start by themselves; does nothing, and says nothing, when it already has.
set -eu

# Given to apt, which otherwise tries a server that does not answer for minutes.
patience=20

started=$(date +%s)

have_postgres() {
    for programs in /usr/lib/postgresql/*/bin; do
        [ -x "$programs/initdb" ] && [ -x "$programs/psql" ] && return
    done
    command -v initdb >/dev/null && command -v postgres >/dev/null && command -v psql >/dev/null
}

have_postgres && exit

if ! command -v apt-get >/dev/null; then
    echo "PostgreSQL is missing: install its server (initdb, postgres) and psql with your package manager" >&2
    exit 1
fi
root=
if [ "$(id -u)" != 0 ]; then
    root="sudo -n"
    if ! $root true 2>/dev/null; then
        echo "PostgreSQL is missing: run, as root, \`apt-get install postgresql\`" >&2
        exit 1
    fi
fi

log=$(mktemp)
trap 'rm -f "$log"' EXIT
install() {
    # shellcheck disable=SC2086 # the words of $root are meant
    $root env DEBIAN_FRONTEND=noninteractive \
        apt-get -o Acquire::http::Timeout="$patience" -o DPkg::Lock::Timeout=600 install -y --no-install-recommends "$@"
}
# The package of the server makes a database and starts it, unless the one before it says otherwise.
install_all() {
    install postgresql-common &&
        $root sed -i 's/^#*create_main_cluster.*/create_main_cluster = false/' /etc/postgresql-common/createcluster.conf &&
        install postgresql
}
# The package lists may be missing or old; fetching them costs time, so only then.
if ! install_all >"$log" 2>&1 && ! { $root apt-get update && install_all; } >"$log" 2>&1; then
    cat "$log" >&2
    echo "failed to install postgresql" >&2
    exit 1
fi
have_postgres || { echo "postgresql is installed, but has no initdb here" >&2; exit 1; }
echo "installed postgresql ($(($(date +%s) - started)) s)"
