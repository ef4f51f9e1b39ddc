#!/usr/bin/env bash
# rank0.sh FILE OPTIONS...: a worker at an address of this node, told in FILE once it serves. The port is the
# kernel's choice, so that workers may share a node.
set -euo pipefail

file=$1
shift
printf '%s %s\n' "${SLURMD_NODENAME:-$(hostname)}" "$$" >"$file.pid"
exec slagate worker --listen "${LISTEN_HOST:-$(hostname -f)}:0" "$@" > >(bash "${BASH_SOURCE[0]%/*}/ready.sh" "$file")
