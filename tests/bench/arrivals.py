"""What one arrival takes, beside what it took at commit `BEFORE`, in the same run.

An arrival is `Dispatcher.submit` with its leases taken and given back: prefill and decode as a pair, with
targets of its own and of its class, admission on, spill any. At `BEFORE` targets did no more than place a
request in the grid. Its tree is a worktree of this repository under `build/before`; each tree runs in a
process of its own, and rounds of both alternate, so that they meet the same noise.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROUNDS = 12
BEFORE = "0141c85"
ROOT = Path(__file__).resolve().parents[2]
TREE = ROOT / "build" / "before" / "slagate"
SIDE = Path(__file__).with_name("arrival_side.py")

SCENES: dict[str, tuple[str, ...]] = {
    "now": ("now", "256", "8192", "alike"),
    "before": ("before", "256", "8192", "alike"),
    "mixed": ("now", "256", "8192", "mixed"),  # of two kinds, so that half of all pairs fit
    "many": ("now", "1024", "8192", "alike"),
}

BOUND_US, BOUND_P99_US = 100.0, 500.0
"""Of the scene `now`: p50, and `p99_on_cpu`; the latter of `mixed` as well."""

BOUND_RATIO = 2.0
"""Of the p50 of `now` to that of `before`."""

BOUND_GROWTH = 4.0
"""Of the p50 of `many`, with four times the rows, to that of `now`."""


def seconds_of_rounds() -> dict[str, list[tuple[Sequence[float], Sequence[float]]]]:
    """By scene, for each round the seconds of its arrivals: by the clock, and of the CPU."""
    make_tree()
    found: dict[str, list[tuple[Sequence[float], Sequence[float]]]] = {name: [] for name in SCENES}
    with ExitStack() as stack:
        sides = {name: stack.enter_context(_side(scene)) for name, scene in SCENES.items()}
        for number in range(ROUNDS):
            for name in sorted(sides, reverse=bool(number % 2)):
                process = sides[name]
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdin.write("\n")
                process.stdin.flush()
                found[name].append(tuple(json.loads(process.stdout.readline())))
        for process in sides.values():
            assert process.stdin is not None
            process.stdin.close()
    return found


def checks_of(figures: dict[str, dict[str, Any]]) -> dict[str, bool]:
    """What was to hold of figures in microseconds by scene, and whether it does."""
    now, before, mixed, many = (figures[name] for name in ("now", "before", "mixed", "many"))
    ratio, growth = (
        round(a / b, 2) for a, b in ((now["p50"], before["p50"]), (many["p50"], now["p50"]))
    )
    return {
        f"an arrival takes {now['p50']} us, bound {BOUND_US}": now["p50"] <= BOUND_US,
        f"p99 {now['p99_on_cpu']} us, bound {BOUND_P99_US}": now["p99_on_cpu"] <= BOUND_P99_US,
        f"p99 {mixed['p99_on_cpu']} us where kinds are mixed": mixed["p99_on_cpu"] <= BOUND_P99_US,
        f"{ratio} times what it took at {BEFORE}, bound {BOUND_RATIO}": ratio <= BOUND_RATIO,
        f"{growth} times as much with 1024 rows, bound {BOUND_GROWTH}": growth <= BOUND_GROWTH,
    }


def make_tree() -> None:
    """Check out `BEFORE` at `TREE`, once. Raises `SystemExit` where the history does not have it."""
    if not (TREE / "router").exists():
        if _git("cat-file", "-e", f"{BEFORE}^{{commit}}").returncode:
            is_shallow = _git("rev-parse", "--is-shallow-repository").stdout.strip() == "true"
            why = "is shallow; `git fetch --unshallow` completes it" if is_shallow else "lacks it"
            raise SystemExit(f"bench: arrivals are compared with commit {BEFORE}: history {why}")
        done = _git("worktree", "add", "--force", "--detach", str(TREE), BEFORE)
        if done.returncode:
            raise SystemExit(f"bench: no worktree of {BEFORE} at {TREE}: {done.stderr.strip()}")
    # The folder is the package: without this file, the installed one would be found first.
    (TREE / "__init__.py").touch()


def _git(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)


def _side(scene: tuple[str, ...]) -> "subprocess.Popen[str]":
    paths = [TREE.parent, TREE / "tests"] if scene[0] == "before" else [ROOT / "tests"]
    return subprocess.Popen(
        [sys.executable, str(SIDE), *scene],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
    )
