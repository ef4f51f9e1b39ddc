"""When an engine is polled, and what becomes of what it answers."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anyio
import pytest

from slagate.workers.trtllm_poll import EVENT_PACE, LINGER_S, SLICE, Activity, NewestRows, Poller
from support import virtual_loop
from support.sim_llm import n_timers, until


class Source:
    """An engine's queue; it refuses to be asked before its first result, as TensorRT-LLM does."""

    def __init__(self, activity: Activity) -> None:
        self.activity = activity
        self.queue: list[Any] = []
        self.fails = 0  # polls that will
        self.polled_at_s: list[float] = []
        self.taken: list[Any] = []

    def poll(self) -> AsyncIterator[Any]:
        assert self.activity.has_answered
        self.polled_at_s.append(asyncio.get_running_loop().time())
        return self._items()

    async def _items(self) -> AsyncIterator[Any]:
        while self.queue:
            yield self.queue.pop(0)
        if self.fails:
            self.fails -= 1
            raise RuntimeError("the queue is broken")


def play(scenario: Callable[[Activity, Source, Poller], Awaitable[None]]) -> None:
    async def main() -> None:
        activity = Activity()
        source = Source(activity)
        poller = Poller(
            "events", source.poll, source.taken.extend, pace=EVENT_PACE, activity=activity
        )
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(poller.run)
            await scenario(activity, source, poller)
            tasks.cancel_scope.cancel()

    virtual_loop.run(main)


def test_nothing_is_polled_before_the_first_result() -> None:
    async def scenario(activity: Activity, source: Source, _: Poller) -> None:
        activity.started()
        await until(5.0)
        assert source.polled_at_s == []
        activity.answered()
        await until(5.001)
        assert source.polled_at_s == [5.0]

    play(scenario)


def test_polls_slow_down_while_nothing_comes_and_speed_up_when_something_does() -> None:
    async def scenario(activity: Activity, source: Source, _: Poller) -> None:
        activity.started()
        activity.answered()
        await until(0.2)
        gaps = [b - a for a, b in zip(source.polled_at_s, source.polled_at_s[1:], strict=False)]
        assert gaps == pytest.approx([0.0075, 0.01125, 0.016875] + [0.02] * (len(gaps) - 3))
        source.queue.append("event")
        n_polls = len(source.polled_at_s)
        await until(0.26)
        newest = source.polled_at_s[n_polls:]
        assert newest[1] - newest[0] == pytest.approx(0.005)
        assert source.taken == ["event"]

    play(scenario)


def test_an_idle_engine_is_left_alone_until_the_next_request() -> None:
    async def scenario(activity: Activity, source: Source, _: Poller) -> None:
        activity.started()
        activity.answered()
        await until(0.5)
        activity.ended()
        await until(0.5 + LINGER_S + 0.03)
        n_polls, n_waiting = len(source.polled_at_s), n_timers()
        assert n_waiting == 0
        assert source.polled_at_s[-1] == pytest.approx(0.5 + LINGER_S, abs=0.021)
        await until(1000.0)
        assert len(source.polled_at_s) == n_polls
        activity.started()
        await until(1000.001)
        assert source.polled_at_s[n_polls:] == [1000.0]

    play(scenario)


def test_what_is_left_is_read_although_the_engine_is_idle() -> None:
    """A slice at a time, with everybody else's turn in between."""

    async def scenario(activity: Activity, source: Source, _: Poller) -> None:
        activity.started()
        activity.answered()
        activity.ended()
        source.queue += range(3 * SLICE + 1)
        others_turns = 0
        while source.queue:
            others_turns += 1
            await anyio.lowlevel.checkpoint()
        await until(2.0)
        assert source.taken == list(range(3 * SLICE + 1))
        assert others_turns > 3

    play(scenario)


def test_an_error_is_counted_and_what_came_before_it_is_kept(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(activity: Activity, source: Source, poller: Poller) -> None:
        activity.started()
        activity.answered()
        source.queue += ["a", "b"]
        source.fails = 5
        await until(10.0)
        assert poller.n_errors == 5
        source.queue.append("c")
        await until(11.0)
        assert source.taken == ["a", "b", "c"]

    play(scenario)
    # The 1st, 2nd and 4th: a fault that stays must not fill the log.
    assert len(caplog.records) == 3


@pytest.mark.parametrize("as_awaitable", [True, False])
def test_an_answer_that_is_no_iterator_is_passed_on_whole(*, as_awaitable: bool) -> None:
    """KV-04: the annotation and the answers of versions differ."""

    async def later() -> object:
        return [["e1"], ["e2"]]

    async def main() -> None:
        activity, taken = Activity(), list[Any]()
        poller = Poller(
            "events",
            lambda: later() if as_awaitable else [["e1"], ["e2"]],
            taken.append,
            pace=EVENT_PACE,
            activity=activity,
        )
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(poller.run)
            activity.started()
            activity.answered()
            await until(0.001)
            tasks.cancel_scope.cancel()
        assert taken == [[["e1"], ["e2"]]]

    virtual_loop.run(main)


def test_rows_are_kept_by_rank_the_newest_wins() -> None:
    rows = NewestRows(2)
    rows.take([{"attentionDpRank": 0, "iter": 1}, {"attentionDpRank": 1, "iter": 1}])
    rows.take([[{"attentionDpRank": 1, "iter": 2}], None, 7, {"attentionDpRank": 2}, {"iter": 9}])
    assert {rank: row["iter"] for rank, row in rows.of_rank.items()} == {0: 1, 1: 2}
    unnamed = NewestRows(1)
    unnamed.take([{"iter": 3}])
    assert unnamed.of_rank == {0: {"iter": 3}}
