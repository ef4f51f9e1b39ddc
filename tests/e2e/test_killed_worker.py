"""A worker that is killed while it streams to many: one UNAVAILABLE with a message for each of them."""

import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest

from support.engine.tokens import expected, prompt
from support.gateway.foreign_client import Client, endless, read, read_tokens
from support.gateway.processes import Pool, cluster, eventually
from support.seeds import is_long_run

N_CLIENTS = 4
N_STREAMS = 6  # of each
N_TOKENS = 3


@pytest.mark.parametrize("role", ["agg", "decode"] if is_long_run() else ["decode"])
def test_a_worker_killed_mid_stream_gives_each_client_one_unavailable(
    role: str, tmp_path: Path
) -> None:
    """HEALTH-01, STREAM-06: nobody resumes, nobody is left hanging, and nothing is held."""
    pools = {"x": Pool(role, 1, ("--time-scale", "3"))}
    if role == "decode":
        pools["p"] = Pool("prefill")
    with (
        cluster(tmp_path, pools) as fleet,
        ThreadPoolExecutor(N_CLIENTS * N_STREAMS) as threads,
        ExitStack() as stack,
    ):
        clients = [stack.enter_context(Client(fleet.gateway.address)) for _ in range(N_CLIENTS)]
        calls = [
            (client.start(endless(prompt(50, seed=n))), prompt(50, seed=n))
            for n in range(N_STREAMS)
            for client in clients
        ]
        for call, tokens in calls:
            got = read_tokens(call, N_TOKENS)
            assert got == expected(tokens, len(got))
        fleet.workers["x"][0].kill()
        answers = list(threads.map(lambda each: read(each[0]), calls))
        for answer in answers:
            assert answer.code is grpc.StatusCode.UNAVAILABLE
            assert answer.details.startswith(f"{role}: ")
            assert not re.search(r"\d+\.\d+\.\d+\.\d+|Traceback|Error", answer.details)
            assert not {"error", "finished"} & set(answer.events)
        eventually(fleet.gateway.is_idle, "nothing is leased")
        assert sum(fleet.gateway.metrics("slagate_requests_total").values()) == len(calls)
