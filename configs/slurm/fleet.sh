#!/usr/bin/env bash
# fleet.sh POOL=N...: wait until each pool has at least N workers that serve, then write where they all are to
# $RUN_DIR/pools.json. Run it again whenever workers came or went: a gateway with --watch takes it over.
set -euo pipefail

: "${RUN_DIR:?the folder of pool.sbatch}"
pools=()
for wanted in "$@"; do
  pool=${wanted%=*}
  pools+=("$pool")
  deadline=$((SECONDS + ${WAIT_S:-3600}))
  until found=$(find "$RUN_DIR/workers/$pool" -name '*.json' 2>/dev/null | wc -l) && ((found >= ${wanted##*=})); do
    if ((SECONDS >= deadline)); then
      echo "fleet.sh: $pool has $found of ${wanted##*=} workers after ${WAIT_S:-3600} s" >&2
      exit 1
    fi
    sleep 1
  done
done

python3 - "$RUN_DIR" "${pools[@]}" <<'PYTHON'
import json
import os
import sys
from pathlib import Path

run, pools = Path(sys.argv[1]), sys.argv[2:]
fleet = {
    pool: {
        "workers": [
            json.loads(file.read_text())["listen"]
            for file in sorted((run / "workers" / pool).glob("*.json"))
        ]
    }
    for pool in pools
}
new = run / "pools.json.new"
new.write_text(json.dumps({"pools": fleet}, indent=2) + "\n")
os.replace(new, run / "pools.json")
PYTHON
