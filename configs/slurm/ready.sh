#!/usr/bin/env bash
# ready.sh FILE: pass standard input on, and keep the ready line of a slagate process in FILE. Engines print
# there too.
set -euo pipefail

while IFS= read -r line; do
  if [[ $line == '{"event": "ready"'* ]]; then
    # In one step: whoever looks sees all of it or nothing.
    printf '%s\n' "$line" >"$1.new"
    mv "$1.new" "$1"
  fi
  printf '%s\n' "$line"
done
