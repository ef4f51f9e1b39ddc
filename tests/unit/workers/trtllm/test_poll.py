"""When an engine is polled, and what becomes of what it answers."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import anyio
import pytest

from slagate.workers.kv_events.fields import TURN_WORK
from slagate.workers.runtime import virtual_loop
from slagate.workers.trtllm.poll import (
    EVENT_PACE,
    LINGER_S,
    ROW_WORK,
    Activity,
    EnginePoll,
    NewestRows,
    Poller,
)
from support.engine.sim_llm import n_timers, until


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
            "events",
            EnginePoll(source.poll, may_block=False),
            source.taken.extend,
            pace=EVENT_PACE,
            activity=activity,
        )
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(poller.run)
            await scenario(activity, source, poller)
            tasks.cancel_scope.cancel()

    virtual_loop.run(main)


def test_nothing_is_polled_before_the_first_result() -> None:
    async def scenario(activity: Activity, source: Source, _: Poller) -> None:
        activity.request_started()
        await until(5.0)
        assert source.polled_at_s == []
        activity.result_came()
        await until(5.001)
        assert source.polled_at_s == [5.0]

    play(scenario)


def test_polls_slow_down_while_nothing_comes_and_speed_up_when_something_does() -> None:
    async def scenario(activity: Activity, source: Source, _: Poller) -> None:
        activity.request_started()
        activity.result_came()
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
        activity.request_started()
        activity.result_came()
        await until(0.5)
        activity.request_ended()
        await until(0.5 + LINGER_S + 0.03)
        n_polls, n_waiting = len(source.polled_at_s), n_timers()
        assert n_waiting == 0
        assert source.polled_at_s[-1] == pytest.approx(0.5 + LINGER_S, abs=0.021)
        await until(1000.0)
        assert len(source.polled_at_s) == n_polls
        activity.request_started()
        await until(1000.001)
        assert source.polled_at_s[n_polls:] == [1000.0]

    play(scenario)


def test_what_is_left_is_read_although_the_engine_is_idle() -> None:
    """A turn's worth at a time, with everybody else's turn in between."""
    n_items = 3 * TURN_WORK // ROW_WORK + 1

    async def scenario(activity: Activity, source: Source, _: Poller) -> None:
        activity.request_started()
        activity.result_came()
        activity.request_ended()
        source.queue += range(n_items)
        others_turns = 0
        while source.queue:
            others_turns += 1
            await anyio.lowlevel.checkpoint()
        await until(2.0)
        assert source.taken == list(range(n_items))
        assert others_turns > 3

    play(scenario)


def test_of_a_poll_that_does_not_end_each_row_is_had_when_the_next_one_comes() -> None:
    """An engine that is busy has a new row before the poll has waited long enough to end."""

    async def scenario(activity: Activity, source: Source, _: Poller) -> None:
        async def endless() -> AsyncIterator[int]:
            for row in range(1000):
                await until((row + 1) * 0.0066)
                yield row

        source._items = endless  # type: ignore[method-assign]
        activity.request_started()
        activity.result_came()
        await until(0.0066 * 100 + 0.001)
        assert source.taken == list(range(99))

    play(scenario)


def test_an_error_is_counted_and_what_came_before_it_is_kept(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(activity: Activity, source: Source, poller: Poller) -> None:
        activity.request_started()
        activity.result_came()
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
def test_an_answer_that_is_no_iterator_is_passed_on_too(*, as_awaitable: bool) -> None:
    """KV-04: the annotation and the answers of versions differ."""

    async def later() -> object:
        return [["e1"], ["e2"]]

    async def main() -> None:
        activity, taken = Activity(), list[Any]()
        poller = Poller(
            "events",
            EnginePoll(lambda: later() if as_awaitable else [["e1"], ["e2"]], may_block=False),
            taken.extend,
            pace=EVENT_PACE,
            activity=activity,
        )
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(poller.run)
            activity.request_started()
            activity.result_came()
            await until(0.001)
            tasks.cancel_scope.cancel()
        # (It polls until it is cancelled.)
        assert taken[:2] == ["e1", "e2"]

    virtual_loop.run(main)


WEIGHTS = {"small": 1000, "large": 50_000}


class Turns:
    """What a poll's answer is passed on as: the parts, and the turn of the loop in which each came."""

    def __init__(self, answer: object) -> None:
        self.parts: list[list[str]] = []
        self.turns: list[int] = []
        self.n_turns = 0
        self.answer = answer

    @property
    def taken(self) -> list[str]:
        return [name for part in self.parts for name in part]

    def take(self, part: list[Any]) -> None:
        self.parts.append([str(name) for name in part])
        self.turns.append(self.n_turns)

    async def run(self, *, n_turns: int = 1000) -> None:
        """One poll, whatever comes of it, and at most as many turns of the loop."""
        activity = Activity()
        poller = Poller(
            "events",
            EnginePoll(lambda: self.answer, may_block=False),
            self.take,
            pace=EVENT_PACE,
            activity=activity,
            work=lambda name: WEIGHTS[name.split("-")[0]],
        )
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(poller.run)
            activity.request_started()
            activity.result_came()
            for self.n_turns in range(n_turns):
                await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()


async def _in_turn(*items: object, error: Exception | None = None) -> AsyncIterator[object]:
    for item in items:
        yield item
    if error is not None:
        raise error


def many(n: int) -> list[str]:
    return [f"small-{i}" for i in range(n)]


@pytest.mark.parametrize("nested", [True, False])
def test_kv_04_a_turn_of_the_loop_takes_a_bounded_amount_of_work(*, nested: bool) -> None:
    """KV-04: also of a version whose items are lists of events, each of which may be a long chain."""

    async def main() -> None:
        events = [*many(100), "large-1", "large-2", *many(50)]
        turns = Turns(_in_turn(events) if nested else _in_turn(*events))
        await turns.run()
        assert turns.taken == events
        weights = [sum(WEIGHTS[one.split("-")[0]] for one in part) for part in turns.parts]
        lone = [["large-1"], ["large-2"]]
        assert [p for p in turns.parts if p in lone] == lone
        assert all(
            weight <= TURN_WORK
            for weight, part in zip(weights, turns.parts, strict=True)
            if part not in lone
        )
        # Few parts, as each is a batch, and never two in one turn.
        assert len(turns.parts) == 4 + 2 + 2
        assert len(set(turns.turns)) == len(turns.parts)

    virtual_loop.run(main)


class Steps(Turns):
    """Takes what is large in three steps."""

    def take(self, part: list[Any]) -> Iterator[None]:  # type: ignore[override]
        for name in part:
            for i in range(3 if name.startswith("large") else 1):
                super().take([f"{name}/{i}"])
                yield


@pytest.mark.parametrize("n_turns", [1000, *range(1, 12)])
def test_a_long_event_has_a_turn_for_each_of_its_steps_and_is_never_left_half_done(
    n_turns: int,
) -> None:
    """Whenever the worker is cancelled; the events behind it wait for the last one."""

    async def main() -> None:
        turns = Steps(["small-0", "large-1", "large-2", "small-3"])
        await turns.run(n_turns=n_turns)
        steps = [f"large-{i}/{step}" for i in (1, 2) for step in range(3)]
        whole = ["small-0/0", *steps, "small-3/0"]
        assert turns.taken[: len(whole)] == (whole if turns.parts else [])
        if n_turns == 1000:
            assert len(set(turns.turns[: len(whole)])) == len(whole)

    virtual_loop.run(main)


def test_whatever_was_read_is_passed_on_when_the_poll_fails_half_way() -> None:
    async def main() -> None:
        events = many(100)
        turns = Turns(_in_turn(events[:90], *events[90:], error=OSError("gone")))
        await turns.run()
        assert turns.taken == events

    virtual_loop.run(main)


@pytest.mark.parametrize("n_turns", range(1, 8))
def test_whatever_was_read_is_passed_on_when_the_worker_is_cancelled(n_turns: int) -> None:
    """Between any two of the parts; an engine says everything once."""

    async def main() -> None:
        events = many(200)
        turns = Turns(_in_turn(events))
        await turns.run(n_turns=n_turns)
        # (Without a turn of its own the poller has read nothing.)
        assert turns.taken == (events if turns.parts else [])
        assert turns.parts or n_turns == 1

    virtual_loop.run(main)


def test_a_poll_that_is_not_answered_is_told_of_at_ever_greater_distances(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        activity, loop = Activity(), asyncio.get_running_loop()
        answer = loop.create_future()
        monkeypatch.setattr(loop, "run_in_executor", lambda *_: answer)
        poller = Poller(
            "events",
            EnginePoll(list, may_block=True),
            lambda _: None,
            pace=EVENT_PACE,
            activity=activity,
        )
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(poller.run)
            activity.request_started()
            activity.result_came()
            await until(100.0)
            assert poller.n_errors == 4
            answer.set_result([])
            await until(1000.0)
            assert poller.n_errors == 4
            tasks.cancel_scope.cancel()

    virtual_loop.run(main)
    said = [vars(one)["seconds"] for one in caplog.records if one.msg == "poll.unanswered"]
    assert said == [10.0, 20.0, 40.0, 80.0]


def test_rows_are_kept_by_rank_the_newest_wins() -> None:
    rows = NewestRows(2)
    rows.take_rows([{"attentionDpRank": 0, "iter": 1}, {"attentionDpRank": 1, "iter": 1}])
    rows.take_rows([{"attentionDpRank": 1, "iter": 2}, {"attentionDpRank": 2}])
    assert {rank: row["iter"] for rank, row in rows.of_rank.items()} == {0: 1, 1: 2}
    # A newer version's name, and none: early versions have rows of the first rank only.
    rows.take_rows(
        [{"rank": 1, "iter": 3}, {"iter": 9}, {"attentionDpRank": 0, "rank": 1, "iter": 10}]
    )
    assert {rank: row["iter"] for rank, row in rows.of_rank.items()} == {0: 10, 1: 3}
    assert rows.counters()["stats_unusable_rows"] == 1


def test_w10_rows_of_any_shape_are_read_or_counted() -> None:
    rows = NewestRows(1)
    odd = [
        None,
        7,
        "",
        "[",
        b"\xff",
        "[" * 10_000,
        "7",
        [],
        {"attentionDpRank": "0"},
        {"rank": True},
    ]
    text = '{"iter": 4, "kvCacheStats": null}'
    read = rows.take_rows([*odd, text, text.encode()])
    assert rows.of_rank == {0: {"iter": 4, "kvCacheStats": None}}
    assert len(read) == 4
    assert rows.counters() == {"stats_unusable_rows": len(odd), "stats_poll_errors": 0}
