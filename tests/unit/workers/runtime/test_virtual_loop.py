"""The virtual loop of these tests: it never hangs and hides no failure."""

import asyncio

import pytest

from slagate.workers.runtime.virtual_loop import DeadlockError, run
from support.engine.sim_llm import until


def test_a_lost_wake_up_is_an_error_not_a_hang() -> None:
    async def scenario() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(DeadlockError, match="no ready task and no timer"):
        run(scenario)


def test_an_hour_passes_at_once_and_a_failing_callback_fails_the_run() -> None:
    async def scenario() -> None:
        asyncio.get_running_loop().call_at(1.0, lambda: 1 // 0)
        await until(3600.0)
        assert asyncio.get_running_loop().time() == pytest.approx(3600.0)

    with pytest.raises(ZeroDivisionError):
        run(scenario)
