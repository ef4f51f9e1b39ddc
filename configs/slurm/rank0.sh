#!/usr/bin/env bash
# rank0.sh FILE sim|trtllm OPTIONS...: a worker at an address of this node, told in FILE once it serves. The port
# is the kernel's choice, so that workers may share a node.
set -euo pipefail

file=$1
engine=$2
shift 2
printf '%s %s\n' "${SLURMD_NODENAME:-$(hostname)}" "$$" >"$file.pid"
exec slagate worker "$engine" --listen "${LISTEN_HOST:-$(hostname -f)}:0" "$@" > >(bash "${BASH_SOURCE[0]%/*}/ready.sh" "$file")
