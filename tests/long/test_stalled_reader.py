"""A client that stops reading for a minute of real time, beside others of the same worker."""

from pathlib import Path
from typing import Any

import grpc

from slagate.workers.runtime.clock import monotonic_s
from support.engine.tokens import expected, prompt
from support.gateway.foreign_client import Client, read, read_tokens, request
from support.gateway.processes import Pool, cluster, eventually

STOPS_S = 60.0
N_OTHERS = 200
N_AT_ONCE = 10
N_TOKENS = 40
FAST = ("--time-scale", "0.1")

# Each relayed message carries the client's id: this makes 500 of them less than what may wait for a client,
# and 15,000 more, also than what gRPC reads ahead.
LONG_ID = "x" * 1000


def asking(tokens: list[int], n_tokens: int, request_id: str) -> Any:
    """For exactly so many tokens."""
    return request(tokens, n_tokens, request_id=request_id, stopping={"ignore_eos": True})


def test_a_reader_that_stops_for_a_minute_disturbs_no_other(tmp_path: Path) -> None:
    """STREAM-05: one that was given all of its answer gets it later; one that is owed more is ended."""
    asked = {"short": 500, "long": 15_000}
    prompts = {name: prompt(50, seed=n) for n, name in enumerate(asked)}
    with (
        cluster(tmp_path, {"a": Pool("agg", 1, FAST)}) as running,
        Client(running.gateway.address) as stopped,
        Client(running.gateway.address) as other,
    ):
        calls = {
            name: stopped.start(asking(prompts[name], n, LONG_ID), timeout_s=180)
            for name, n in asked.items()
        }
        firsts = {name: read_tokens(call, 1) for name, call in calls.items()}
        ends_s = monotonic_s() + STOPS_S
        n_others = 0
        while n_others < N_OTHERS or monotonic_s() < ends_s:
            tokens = [prompt(60, seed=1000 + n_others + at) for at in range(N_AT_ONCE)]
            beside = [
                other.start(asking(each, N_TOKENS, f"o{n_others + at}"))
                for at, each in enumerate(tokens)
            ]
            for each, call in zip(tokens, beside, strict=True):
                assert read(call).tokens == expected(each, N_TOKENS)
            n_others += N_AT_ONCE
        short, long = (read(calls[name]) for name in asked)
        assert firsts["short"] + short.tokens == expected(prompts["short"], asked["short"])
        assert short.reason
        assert long.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "reads too slowly" in long.details
        received = firsts["long"] + long.tokens
        assert received == expected(prompts["long"], len(received))
        eventually(running.gateway.is_idle, "nothing is leased")
