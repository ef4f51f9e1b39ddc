"""Pulls that wait for room: in order of arrival, within their time, and to an end when all is closed."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import numpy as np
import pytest

from slagate.workers.kv_transfer.nixl.descriptor import NixlDescriptor
from slagate.workers.kv_transfer.nixl.nixl import RETRY_S, NixlTransport, PullQueue
from slagate.workers.kv_transfer.transport import Blocks, Done, KvTimeout, KvTransferError
from slagate.workers.runtime.virtual_loop import run
from support.engine.sim_llm import n_timers, until
from support.kv.processes import (
    BLOCK_BYTES,
    Here,
    blocks_of,
    call,
    digest,
    export,
    fetch,
    is_whole,
    wait_for,
    wait_for_acks,
)
from support.limits import HANG_S

LIMIT_S = 1.0


def wanted(session: int, n_slots: int) -> NixlDescriptor:
    fields: dict[str, Any] = dict.fromkeys(NixlDescriptor._fields)
    slots = np.zeros(n_slots, np.uint32)
    return NixlDescriptor(
        **{**fields, "session_id": session, "tag": b"%8d" % session, "slots": slots}
    )


class Desk:
    """A queue in front of `n_free` slots; `log` has what became of each session, and when."""

    def __init__(self, n_free: int) -> None:
        self.n_free = n_free
        self.log: list[tuple[int, str, float]] = []
        self.queue = PullQueue(self.begin, lambda wanted: KvTimeout("full"))
        self.broken = ""
        self.then: Callable[[], None] = lambda: None

    def begin(self, wanted: NixlDescriptor, done: Done, due_s: float) -> bool:
        del done
        if self.broken:
            raise KvTransferError(self.broken)
        if len(wanted.slots) > self.n_free:
            return False
        assert due_s > asyncio.get_running_loop().time()
        self.n_free -= len(wanted.slots)
        self.note(wanted.session_id, "begun")
        return True

    def note(self, session: int, what: str) -> None:
        self.log.append((session, what, asyncio.get_running_loop().time() - self.began_s))

    def ask(self, session: int, n_slots: int) -> None:
        def done(result: Blocks | KvTransferError) -> None:
            self.note(session, str(result))
            self.then()

        due_s = asyncio.get_running_loop().time() + LIMIT_S
        self.queue.enqueue(wanted(session, n_slots), done, due_s=due_s)

    def ends(self) -> list[tuple[int, str]]:
        return [(session, what) for session, what, _ in self.log]

    def times_s(self) -> list[float]:
        return [time_s for _, _, time_s in self.log]

    def play(self, scenario: Callable[[], Awaitable[None]]) -> None:
        async def main() -> None:
            self.began_s = asyncio.get_running_loop().time()
            await scenario()
            assert (len(self.queue), n_timers()) == (0, 0)

        run(main)

    async def at(self, time_s: float) -> None:
        await until(self.began_s + time_s)


def test_who_came_first_is_first_though_another_one_would_fit() -> None:
    desk = Desk(n_free=5)

    async def scenario() -> None:
        for session, n_slots in ((1, 4), (2, 3), (3, 1)):
            desk.ask(session, n_slots)
        assert desk.ends() == [(1, "begun")]
        assert (len(desk.queue), b"%8d" % 3 in desk.queue, b"%8d" % 1 in desk.queue) == (
            2,
            True,
            False,
        )
        desk.n_free += 1
        desk.queue.retry_soon()
        await desk.at(0.01)
        assert desk.ends() == [(1, "begun")]
        desk.n_free += 2
        desk.queue.retry_soon()
        await desk.at(0.015)
        assert desk.ends() == [(1, "begun"), (2, "begun"), (3, "begun")]

    desk.play(scenario)


def test_room_that_nobody_tells_of_is_found() -> None:
    desk = Desk(n_free=0)

    async def scenario() -> None:
        desk.ask(1, 1)
        desk.n_free = 1
        await desk.at(1.5 * RETRY_S)
        assert desk.ends() == [(1, "begun")]
        assert desk.times_s() == pytest.approx([RETRY_S])

    desk.play(scenario)


def test_each_waits_for_its_own_time_and_who_is_behind_goes_on() -> None:
    desk = Desk(n_free=2)

    async def scenario() -> None:
        desk.ask(1, 3)
        await desk.at(0.755)
        desk.ask(2, 3)
        desk.ask(3, 1)
        await desk.at(1.5)
        assert desk.ends() == [(1, "full")]
        await desk.at(2.0)
        assert desk.ends() == [(1, "full"), (2, "full"), (3, "full")]
        assert desk.times_s() == pytest.approx([1.0, 1.755, 1.755])

    desk.play(scenario)


def test_one_that_can_never_begin_ends_and_the_next_one_is_asked() -> None:
    desk = Desk(n_free=0)

    async def scenario() -> None:
        desk.ask(1, 1)
        desk.ask(2, 1)
        desk.broken = "no agent"
        desk.queue.retry_soon()
        await desk.at(0.01)
        assert desk.ends() == [(1, "no agent"), (2, "no agent")]

    desk.play(scenario)


def test_closing_ends_all_and_leaves_no_timer() -> None:
    desk = Desk(n_free=0)

    async def scenario() -> None:
        desk.ask(1, 1)
        desk.ask(2, 1)
        desk.queue.fail_all()
        assert desk.ends() == [(1, "transport is closed"), (2, "transport is closed")]

    desk.play(scenario)


def test_who_pulls_again_on_hearing_of_an_end_goes_to_the_back() -> None:
    desk = Desk(n_free=0)

    async def scenario() -> None:
        def again() -> None:
            desk.then = lambda: None
            desk.broken = ""
            desk.n_free = 2
            desk.ask(9, 1)

        desk.ask(1, 1)
        desk.ask(2, 1)
        desk.broken, desk.then = "no agent", again
        desk.queue.retry_soon()
        await desk.at(0.01)
        assert desk.ends() == [(1, "no agent"), (2, "begun"), (9, "begun")]

    desk.play(scenario)


# --- between transports ---


def side(name: str, n_slots: int, *, pull_limit_s: float = HANG_S) -> Here:
    return Here(
        NixlTransport(
            name, n_slots=n_slots, block_bytes=BLOCK_BYTES, loopback=True, pull_limit_s=pull_limit_s
        )
    )


@pytest.fixture
def prefill() -> Iterator[Here]:
    here = side("prefill", 64)
    yield here
    here.close()


def n_waiting(here: Here) -> int:
    return here.transport.counters()["kv_pulls_waiting"]


def test_a_pull_waits_for_room_that_a_release_makes(prefill: Here) -> None:
    decode = side("decode", 32)
    export(decode, 1, n_blocks=30)
    descriptor = export(prefill, 7)
    pull = decode.begin("pull", descriptor=descriptor)
    assert n_waiting(decode) == 1
    assert "already consumed" in fetch(decode, descriptor)["text"]
    call(decode, "release", session=1)
    assert decode.end(pull)["text"] == digest(blocks_of(7, 3))
    assert n_waiting(decode) == 0
    wait_for_acks(prefill, [7])
    wait_for(decode, "state", is_whole)
    decode.close()


def test_a_pull_that_waits_in_vain_says_so_and_uses_nothing_up(
    prefill: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = side("decode", 32, pull_limit_s=0.1)
    export(decode, 1, n_blocks=30)
    descriptor = export(prefill, 7)
    result = fetch(decode, descriptor)
    assert result["error"] == "KvTimeout"
    assert result["text"] == (
        "session 7: the pool was full for 0.1 s: 4 slots wanted, 1 of 32 free, "
        "0 wait for peers that hang"
    )
    assert decode.transport.problem() == ""
    call(decode, "release", session=1)
    monkeypatch.setattr(decode.transport, "_pull_limit_s", HANG_S)
    assert fetch(decode, descriptor)["text"] == digest(blocks_of(7, 3))
    decode.close()


def test_a_pull_larger_than_the_pool_fails_at_once(prefill: Here) -> None:
    """Also when others wait in front of it."""
    decode = side("decode", 32)
    export(decode, 1, n_blocks=30)
    waits = decode.begin("pull", descriptor=export(prefill, 7))
    large = export(prefill, 8, n_blocks=32)
    assert fetch(decode, large)["text"] == "session 8: 33 slots wanted, the whole pool has 32"
    assert n_waiting(decode) == 1
    decode.transport.close()
    assert decode.end(waits)["text"] == "transport is closed"
    decode.close()


def test_pulls_that_wait_for_an_agent_that_ends_are_told(
    prefill: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = side("decode", 32)
    export(decode, 1, n_blocks=30)
    pull = decode.begin("pull", descriptor=export(prefill, 7))
    (agent,) = vars(decode.transport)["_agents"]
    agent.close()
    assert agent.join(HANG_S)
    assert decode.end(pull)["error"] == "KvUnavailable"
    decode.close()


def test_forty_sessions_of_one_long_prompt_fit_where_one_does() -> None:
    """Both pools have room for one prompt and the tickets; the pulls come all at once."""
    n_blocks, sessions = 600, range(1, 41)
    prefill, decode = side("prefill", n_blocks + 40), side("decode", n_blocks + 40)
    descriptors = [export(prefill, i, n_blocks=n_blocks, seed=0) for i in sessions]
    assert call(prefill, "state")["n_free"] == 0
    pulls = [decode.begin("pull", descriptor=each) for each in descriptors]
    assert n_waiting(decode) > 30
    right = digest(blocks_of(0, n_blocks))
    assert [decode.end(pull)["text"] for pull in pulls] == [right] * 40
    wait_for_acks(prefill, list(sessions))
    for each in (prefill, decode):
        wait_for(each, "state", is_whole)
        each.close()
