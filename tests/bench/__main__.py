"""`make bench`: every benchmark, one JSON object each, all of them in `build/bench.json`.

Figures are medians of interleaved rounds, beside the same thing done without the gateway in the same run;
the spread is the 10th to 90th percentile.
"""

import json
import platform
import sys
import tempfile
from pathlib import Path

from bench import (
    calls,
    cancel,
    channel,
    decisions,
    double,
    event_burst,
    prefix_index,
    reload,
    worker,
)

BENCHMARKS = {
    "calls": calls.measure,
    "cancel": cancel.measure,
    "channel": channel.measure,
    "double": double.measure,
    "worker": worker.measure,
    "prefix": prefix_index.measure,
    "decision": decisions.measure,
    "burst": event_burst.measure,
    "reload": reload.measure,
}


def main() -> int:
    """Run the named benchmarks, or all; 1 when a bound is missed."""
    names = sys.argv[1:] or list(BENCHMARKS)
    unknown = set(names) - BENCHMARKS.keys()
    if unknown:
        print(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(BENCHMARKS)}")
        return 2
    report = {"machine": f"{platform.machine()}, Python {platform.python_version()}"}
    missed = []
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            result = BENCHMARKS[name](Path(folder))
        print(json.dumps({name: result}, indent=2))
        report[name] = result
        missed += result["missed"]
    out = Path("build/bench.json")
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(report, indent=2))
    for line in missed:
        print(f"missed: {line}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
