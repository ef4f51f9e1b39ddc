"""`make bench-relay`: what relaying costs, beside nginx and grpc.aio; `build/bench-relay.json`.

python -m bench.relay W1 W3 nginx fixed --rounds 3 --seconds 2

Workloads are W1, W1h, W2p, W2s and W3, and `memory`; none named: all of them. Variants are direct, nginx,
envoy, bare (the least that relays in Python, with nothing that a real relay needs, so not for W2), fixed
(our relay with a fixed choice), full (with routing), full_own (the same, a connection to each of its 64
workers) and aio (grpc.aio with a fixed choice); none named: those of the workload.

What is measured has one core, the client and the workers the other. CPU is user and system time of the
process and its descendants, by the scheduler: a request, or in W2 a message. Every answer is checked, and
one that is not as it must be ends the run.
"""

import argparse
import json
import platform
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.relay import memory
from bench.relay.measure import Plan, rounds
from bench.relay.programs import two_cores
from bench.relay.proxies import ENVOY, has_envoy, nginx_version
from bench.relay.report import checks, lines, summary
from bench.relay.variants import VARIANTS
from bench.relay.workloads import WORKLOADS

MEMORY = "memory"
MEASURED = ("grpcio", "ngh2", "protobuf", "uvloop")


def main() -> int:
    """Run what is asked for; 1 when a bound is missed."""
    asked = _arguments()
    names = [each for each in asked.what if each in WORKLOADS]
    variants = [each for each in asked.what if each in VARIANTS]
    with_memory = MEMORY in asked.what
    if not names and not with_memory:
        names, with_memory = list(WORKLOADS), not variants
    others = ["envoy"] if has_envoy() else []
    if not others:
        print(f"without envoy: there is none that runs at {ENVOY}")
    report: dict[str, Any] = {
        "machine": f"{platform.machine()}, Linux {platform.release()}, {_processor()}",
        "versions": {
            "python": platform.python_version(),
            "nginx": nginx_version(),
            **{name: version(name) for name in MEASURED},
        },
        "rounds": asked.rounds,
        "seconds": asked.seconds,
        "connections": asked.connections,
        "packed": asked.packed,
        "workloads": {},
    }
    rows = []
    with tempfile.TemporaryDirectory(prefix="bench-relay-") as folder:
        plan = Plan(
            n_rounds=asked.rounds,
            seconds=asked.seconds,
            connections=asked.connections,
            packed=asked.packed,
            cores=two_cores(),
            folder=Path(folder),
        )
        for name in names:
            workload = WORKLOADS[name]
            found = rounds(name, workload, variants or (*workload.variants, *others), plan)
            about = {"about": workload.about, "per": workload.per}
            report["workloads"][name] = about | summary(found)
            rows += found
            for line in lines(name, report["workloads"][name]):
                print(line, flush=True)
        report["checks"] = checks(report["workloads"])
        if with_memory:
            variant = variants[0] if variants else "fixed"
            report[MEMORY] = memory.measure(variant, plan.cores, plan.folder / MEMORY)
            print(f"{MEMORY} {variant}: MiB {json.dumps(report[MEMORY]['rss_mib'])}", flush=True)
            report["checks"] += report[MEMORY]["checks"]
    report["rows"] = rows
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps(report, indent=1))
    for check in report["checks"]:
        word = "holds " if check["holds"] else "MISSED"
        print(f"{word} {check['what']}: {check['found']}, bound {check['bound']:.4g}")
    return 0 if all(check["holds"] for check in report["checks"]) else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.relay", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    names = [*WORKLOADS, MEMORY, *VARIANTS]
    parser.add_argument("what", nargs="*", metavar="NAME", help="of workloads and variants")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    parser.add_argument("--connections", type=int, default=4, help="of the client")
    parser.add_argument(
        "--packed", action="store_true", help="as many messages in a DATA frame as there are"
    )
    parser.add_argument("--out", type=Path, default=Path("build/bench-relay.json"))
    asked = parser.parse_args()
    unknown = [each for each in asked.what if each not in names]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(names)}")
    if asked.seconds < 2:
        parser.error("--seconds: at least 2, of which paced streams have one to begin and to end")
    return asked


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((each.split(": ")[1] for each in lines if each.startswith("model name")), "")


if __name__ == "__main__":
    sys.exit(main())
