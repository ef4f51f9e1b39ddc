"""NIXL between processes that die, hang and come back.

No pull ends by its limit here: what ends it is what has happened. Limits are in tests/long.
"""

from collections.abc import Iterator

import pytest

from support.kv.processes import (
    Stable,
    There,
    blocks_of,
    call,
    digest,
    export,
    fetch,
    is_whole,
    started,
    wait_for,
    wait_for_acks,
)
from support.seeds import is_long_run


@pytest.fixture(scope="module")
def stable() -> Iterator[Stable]:
    processes = Stable()
    yield processes
    processes.close()


@pytest.fixture
def sides(stable: Stable) -> Iterator[list[There]]:
    """A prefill, a decode and a bystander process."""
    with stable.borrow(3) as processes:
        yield processes


def begin_pull(side: There, descriptor: str) -> int:
    return side.begin("pull", descriptor=descriptor)


def whole(side: There) -> None:
    """Wait until no slot is missing and no former agent is left."""
    wait_for(side, "state", is_whole)


def connect(prefill: There, decode: There, session: int = 1000) -> None:
    """A first pull finds the peer."""
    assert fetch(decode, export(prefill, session))["text"] == digest(blocks_of(session, 3))
    wait_for_acks(prefill, [session])


def test_a_peer_killed_while_idle_is_gone_and_its_successor_is_not(sides: list[There]) -> None:
    prefill, decode, _ = sides
    connect(prefill, decode)
    lost = [export(prefill, 1), export(prefill, 2)]
    prefill.kill()
    for descriptor in lost:
        result = fetch(decode, descriptor)
        assert result["error"] == "KvPeerGone", result
    with started("prefill") as (successor,):
        connect(successor, decode, session=1)
        whole(decode)


def test_a_peer_killed_before_the_first_contact_is_gone(sides: list[There]) -> None:
    prefill, decode, _ = sides
    descriptor = export(prefill, 1)
    prefill.kill()
    result = fetch(decode, descriptor)
    assert result["error"] == "KvPeerGone", result
    whole(decode)


@pytest.mark.parametrize("known", [False, True], ids=["first contact", "known"])
def test_a_peer_killed_in_mid_transfer_is_gone_at_once(
    sides: list[There],
    known: bool,  # noqa: FBT001
) -> None:
    prefill, decode, _ = sides
    if known:
        connect(prefill, decode)
    descriptors = [export(prefill, session) for session in (1, 2, 3)]
    prefill.freeze()
    pulls = [begin_pull(decode, each) for each in descriptors]
    wait_for(decode, "state", lambda state: state["n_free"] == state["n_slots"] - 12)
    prefill.kill()
    for pull in pulls:
        result = decode.end(pull)
        assert result["error"] == "KvPeerGone", result
    whole(decode)


@pytest.mark.parametrize("known", [False, True], ids=["first contact", "known"])
def test_a_short_freeze_only_delays(sides: list[There], known: bool) -> None:  # noqa: FBT001
    prefill, decode, _ = sides
    if known:
        connect(prefill, decode)
    descriptor = export(prefill, 1)
    prefill.freeze()
    pull = begin_pull(decode, descriptor)
    wait_for(decode, "state", lambda state: state["n_free"] < state["n_slots"])
    prefill.thaw()
    assert decode.end(pull)["text"] == digest(blocks_of(1, 3))
    wait_for_acks(prefill, [1])
    whole(decode)


def test_a_puller_killed_in_mid_transfer_acknowledges_nothing(sides: list[There]) -> None:
    prefill, decode, bystander = sides
    connect(prefill, decode)
    descriptor = export(prefill, 1)
    prefill.freeze()
    begin_pull(decode, descriptor)
    wait_for(decode, "state", lambda state: state["n_free"] < state["n_slots"])
    decode.kill()
    prefill.thaw()
    # The owner lives, and the session is still there for another decode worker.
    assert fetch(bystander, descriptor)["text"] == digest(blocks_of(1, 3))
    wait_for_acks(prefill, [1])
    whole(prefill)


@pytest.mark.parametrize("unaided", [False, True], ids=["progress thread", "no progress thread"])
@pytest.mark.parametrize("closes", [False, True] if is_long_run() else [False])
def test_a_process_ends_cleanly_right_after_a_failed_transfer(
    closes: bool,  # noqa: FBT001
    unaided: bool,  # noqa: FBT001
) -> None:
    """Without progress between the failure and the end, UCX aborts the process."""
    with started("prefill", "decode", unaided=unaided) as (prefill, decode):
        connect(prefill, decode)
        descriptor = export(prefill, 1)
        prefill.kill()
        assert fetch(decode, descriptor)["error"] == "KvPeerGone"
        if closes:
            call(decode, "close")
        assert decode.finish() == 0


@pytest.mark.parametrize("closes", [False, True], ids=["without closing", "closing"])
def test_a_process_ends_cleanly_while_a_transfer_hangs(sides: list[There], closes: bool) -> None:  # noqa: FBT001
    prefill, decode, _ = sides
    connect(prefill, decode)
    descriptor = export(prefill, 1)
    prefill.freeze()
    pull = begin_pull(decode, descriptor)
    wait_for(decode, "state", lambda state: state["n_free"] < state["n_slots"])
    if closes:
        call(decode, "close")
        assert decode.end(pull)["text"] == "transport is closed"
    assert decode.finish() == 0
