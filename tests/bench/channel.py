"""CPU of the gateway's side of a worker's streams, per message: ours beside grpc.aio's, same worker."""

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROUNDS = 3


class Load(NamedTuple):
    """Streams of `n_messages`, one each `pace_s`; `n_open` at a time, `n_calls` in all by channel."""

    n_messages: int
    pace_s: float
    n_open: int
    n_calls: dict[str, int]


LOADS = {
    "saturated": Load(16, 0.0, 32, {"ours": 8000, "aio": 1500}),
    "paced": Load(64, 0.01, 64, {"ours": 256, "aio": 256}),
}

LEAST_RATIO = {"saturated": 8.0, "paced": 4.0}
"""Of grpc.aio's CPU to ours."""


def measure(_folder: Path) -> dict[str, Any]:
    """Medians of interleaved rounds, in microseconds."""
    report: dict[str, Any] = {"rounds": ROUNDS, "missed": []}
    for name, load in LOADS.items():
        cpu_us = _rounds(load)
        medians = {kind: statistics.median(values) for kind, values in cpu_us.items()}
        times = medians["aio"] / medians["ours"]
        report[name] = {
            **{f"{kind}_us_per_message": round(value, 2) for kind, value in medians.items()},
            **{f"{kind}_rounds": [round(value, 2) for value in cpu_us[kind]] for kind in cpu_us},
            "aio_to_ours": round(times, 1),
        }
        if times < LEAST_RATIO[name]:
            report["missed"].append(f"channel, {name}: only {times:.1f} times less than grpc.aio")
    return report


def _rounds(load: Load) -> dict[str, list[float]]:
    cpu_us: dict[str, list[float]] = {kind: [] for kind in load.n_calls}
    serve = _command("serve", load.n_messages, load.pace_s)
    with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        port = server.stdout.readline().strip()
        try:
            for _ in range(ROUNDS):
                for kind, n_calls in load.n_calls.items():
                    command = _command(kind, port, n_calls, load.n_open)
                    out = subprocess.run(command, capture_output=True, check=True, timeout=120)
                    result = json.loads(out.stdout)
                    cpu_us[kind].append(result["cpu_s"] / result["messages"] * 1e6)
        finally:
            server.terminate()
    return cpu_us


def _command(*args: object) -> list[str]:
    return [sys.executable, "-m", "bench.channel_side", *map(str, args)]
