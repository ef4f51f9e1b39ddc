"""A worker with a simulated engine, by its options."""

import asyncio
from typing import Any

import pytest

from slagate.proto import openengine_pb2 as oe
from slagate.workers.runtime.virtual_loop import run
from slagate.workers.serving.sim import SimOptions, sim_worker
from slagate.workers.trtllm.metrics import Observer
from support.engine.sim_llm import prompt_of, until
from support.engine.workers import MODEL, PROFILE, request
from support.worker.contract import ask


class Rows(Observer):
    """The iterations whose statistics were polled, and when."""

    def __init__(self) -> None:
        self.polled: list[tuple[float, int]] = []

    def stats_polled(self, rows: list[Any]) -> None:
        now_s = asyncio.get_running_loop().time()
        self.polled += [(now_s, row["iter"]) for row in rows]


@pytest.mark.parametrize("every_s", [None, 0.25])
def test_an_engine_may_be_asked_for_its_newest_statistics_only(every_s: float | None) -> None:
    """Then each poll brings one row, of the iteration that has just ended."""
    n_tokens, rows = 200, Rows()

    async def scenario() -> float:
        options = SimOptions(role="agg", profile=PROFILE, tp=1, model=MODEL, stats_every_s=every_s)
        worker_of = sim_worker(options, instance_id="i", transport=None, observer=rows)
        async with worker_of as worker:
            await ask(worker, request("r1", prompt_of(64), n_tokens))
            ended_s = asyncio.get_running_loop().time()
            await until(ended_s + 1.0)
            load = await worker.load(oe.GetLoadRequest())
            assert load.attributes["stats_poll_errors"] == 0
            return ended_s

    ended_s = run(scenario)
    numbers = [number for _, number in rows.polled]
    if every_s is None:
        assert numbers == list(range(n_tokens + 1))
        return
    # The first one comes with the first answer; the last one is read although the engine is idle.
    assert len(numbers) == len(set(numbers)) == int(ended_s / every_s) + 2
    assert numbers[-1] == n_tokens
    step_s = ended_s / n_tokens
    for at_s, number in rows.polled[:-1]:
        assert number * step_s == pytest.approx(at_s, abs=3 * step_s)
