"""What the gateway adds: the same requests through it, and straight to the aggregated worker behind it."""

import time
from pathlib import Path
from typing import Any

import grpc

from bench.figures import figures, ratio
from slagate.proto import openengine_pb2 as oe
from support.processes import MODEL, Pool, Process, cluster

ROUNDS = 8
REQUESTS = 40
N_TOKENS = 16
PROMPT = list(range(1000))


def measure(folder: Path) -> dict[str, Any]:
    """Sequential requests of 1,000 prompt and 16 output tokens on an engine that takes no time."""
    seconds: dict[str, list[float]] = {"gateway": [], "direct": []}
    with cluster(folder, {"agg": Pool("agg", options=("--time-scale", "0"))}) as fleet:
        entry = {"gateway": fleet.gateway.address, "direct": fleet.addresses("agg")[0]}
        channels = {way: grpc.insecure_channel(address) for way, address in entry.items()}
        cpu_s = 0.0
        for number in range(ROUNDS):
            for way, channel in channels.items():
                before_s = _cpu_s(fleet.gateway.process)
                for at in range(REQUESTS):
                    seconds[way].append(_one(channel, f"{way}-{number}-{at}"))
                if way == "gateway":
                    cpu_s += _cpu_s(fleet.gateway.process) - before_s
        for channel in channels.values():
            channel.close()
    return {
        "rounds": ROUNDS,
        "requests": ROUNDS * REQUESTS,
        **figures("gateway", seconds["gateway"]),
        **figures("direct", seconds["direct"]),
        "ratio": ratio(seconds["gateway"], seconds["direct"]),
        "gateway_cpu_us_per_request": round(cpu_s / (ROUNDS * REQUESTS) * 1e6),
        "missed": [],
    }


def _one(channel: grpc.Channel, request_id: str) -> float:
    data = oe.GenerateRequest(
        request_id=request_id,
        model=MODEL,
        token_ids=oe.TokenIds(ids=PROMPT),
        stopping=oe.StoppingOptions(max_tokens=N_TOKENS, ignore_eos=True),
    ).SerializeToString()
    started_s = time.perf_counter()
    for _ in channel.unary_stream("/openengine.v1.Inference/Generate")(data):
        pass
    return time.perf_counter() - started_s


def _cpu_s(process: Process) -> float:
    """User and system seconds of a process so far."""
    fields = Path(f"/proc/{process.popen.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / 100
