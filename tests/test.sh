#!/usr/bin/env bash
# What `make test` runs once everything is built. Its last line says how many tests passed and failed.
set -u
cd "$(dirname "$0")/.." || exit 1
step=tests/step.sh
"$step" "format" cargo fmt --all --check || exit 1
"$step" "clippy" cargo clippy --locked --workspace --all-targets -- -D warnings || exit 1
"$step" "documentation" env RUSTDOCFLAGS="-D warnings" cargo doc --locked --workspace --no-deps --document-private-items || exit 1

log=$(mktemp)
trap 'rm -f "$log"' EXIT
cargo test --locked --workspace --no-fail-fast -- "$@" 2>&1 | tee "$log"
status=${PIPESTATUS[0]}
"$step" "counts of the benchmark" "${CARGO_TARGET_DIR:-target}/debug/bench" smoke || status=1
# Why tests have failed, once more: it stands far above. How they were called says nothing of it.
awk '/^---- .* ----$/ { lines = 40 } /^(failures|successes):$/ { lines = 0 }
  /^ +([0-9]+: |at )|^stack backtrace:/ { next } lines-- > 0' "$log"
awk '/^test result:/ { passed += $4; failed += $6 } END { printf "%d passed, %d failed\n", passed, failed }' "$log"
exit "$status"
