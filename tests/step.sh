#!/usr/bin/env bash
# Runs a command as one step of a longer work: one line with its duration, and its output only if it fails, but for lines that begin
# with `note: `. On a terminal the last line of output shows while it runs.
#
#     tests/step.sh "what it is" command arguments…
set -u
title=$1
shift
log=$(mktemp)
trap 'rm -f "$log"' EXIT
start=$(date +%s)
"$@" >"$log" 2>&1 &
command=$!
trap 'kill "$command" 2>/dev/null; exit 130' INT TERM
if [ -t 2 ]; then
  while kill -0 "$command" 2>/dev/null; do
    printf '\r\033[K  …   %-28s %4ds  %.60s' "$title" $(($(date +%s) - start)) "$(tail -n 1 "$log" | tr -d '\r' | sed 's/\x1b\[[0-9;]*m//g')" >&2
    sleep 0.5
  done
  printf '\r\033[K' >&2
fi
if wait "$command"; then
  printf '  ok  %-28s %4ds\n' "$title" $(($(date +%s) - start)) >&2
  sed -n 's/^note: /      /p' "$log" >&2
else
  code=$?
  cat "$log" >&2
  printf '  failed  %s: %s\n' "$title" "$*" >&2
  exit "$code"
fi
