"""NIXL between processes that hang for longer than a pull may take.

Pulls have a limit of 0.5 s here, so that what ends them fits into seconds: not for a busy machine.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from slagate.workers.runtime.clock import monotonic_s
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

LIMIT_S = 0.5
MARGIN_S = 2.0
"""What a busy machine may add before an end counts as late."""


@pytest.fixture(scope="module")
def stable() -> Iterator[Stable]:
    processes = Stable(pull_limit_s=LIMIT_S)
    yield processes
    processes.close()


@pytest.fixture
def sides(stable: Stable) -> Iterator[list[There]]:
    """A prefill, a decode and a bystander process."""
    with stable.borrow(3) as processes:
        yield processes


def begin_pull(side: There, descriptor: str) -> int:
    return side.begin("pull", descriptor=descriptor)


def end_within(side: There, pull: int, limit_s: float) -> dict[str, Any]:
    started_s = monotonic_s()
    answer = side.end(pull)
    assert monotonic_s() - started_s < limit_s
    return answer


def whole(side: There) -> None:
    """Wait until no slot is missing and no former agent is left."""
    wait_for(side, "state", is_whole)


def wait_for_agents(side: There, n_agents: int) -> None:
    wait_for(side, "state", lambda state: bool(state["n_agents"] == n_agents))


def connect(prefill: There, decode: There, session: int = 1000) -> None:
    """A first pull finds the peer, for which the limit of a pull can be short on a busy machine."""
    for each in range(session, session + 5):
        pulled = fetch(decode, export(prefill, each))
        if pulled["error"] != "KvTimeout":
            break
    assert pulled["text"] == digest(blocks_of(each, 3))
    wait_for_acks(prefill, [each])


@pytest.mark.parametrize("known", [False, True], ids=["first contact", "known"])
@pytest.mark.parametrize("thaws", [False, True], ids=["killed", "thawed"])
def test_a_long_freeze_ends_the_pull_and_nobody_elses(
    sides: list[There],
    thaws: bool,  # noqa: FBT001
    known: bool,  # noqa: FBT001
) -> None:
    """DISAGG-08: the limit covers the set-up, and no pair waits for another."""
    prefill, decode, bystander = sides
    if known:
        connect(prefill, decode)
    descriptors = [export(prefill, session) for session in (1, 2)]
    prefill.freeze()
    pulls = [begin_pull(decode, each) for each in descriptors]
    for session in range(5):
        beside = begin_pull(decode, export(bystander, session))
        result = end_within(decode, beside, LIMIT_S)
        assert result["text"] == digest(blocks_of(session, 3))
    for pull in pulls:
        result = end_within(decode, pull, LIMIT_S + MARGIN_S)
        assert (result["error"], "nothing came from" in result["text"]) == ("KvTimeout", True)
    state = call(decode, "state")
    assert (state["n_quarantined"], state["n_free"]) == (8, state["n_slots"] - 8)
    (prefill.thaw if thaws else prefill.kill)()
    whole(decode)
    if thaws:
        # The reads did end, long after anybody wanted them.
        wait_for_acks(prefill, [1, 2])
        connect(prefill, decode)
        assert fetch(decode, descriptors[0])["error"] == "KvTransferError"


def test_quarantine_of_most_of_the_pool_replaces_the_agent(sides: list[There]) -> None:
    prefill, decode, bystander = sides
    kept = export(decode, 77)
    descriptors = [export(prefill, session, n_blocks=20) for session in (1, 2)]
    prefill.freeze()
    for pull in [begin_pull(decode, each) for each in descriptors]:
        assert end_within(decode, pull, LIMIT_S + MARGIN_S)["error"] == "KvTimeout"
    wait_for_agents(decode, 2)
    state = call(decode, "state")
    assert (state["n_quarantined"], state["n_free"], state["text"]) == (42, state["n_slots"], "")
    connect(bystander, decode)
    # What was offered before names the former agent, which serves it still.
    assert fetch(bystander, kept)["text"] == digest(blocks_of(77, 3))
    wait_for_acks(decode, [77])
    prefill.thaw()
    whole(decode)


def test_a_third_replacement_waits_and_the_transport_says_so(sides: list[There]) -> None:
    prefill, decode, _ = sides
    descriptors = [export(prefill, session, n_blocks=20) for session in (1, 2, 3)]
    with started("other", n_slots=128) as (other,):
        descriptors += [export(other, session, n_blocks=40) for session in (4, 5)]
        for side in (prefill, other):
            side.freeze()
        # 63 of 64 slots, then twice 41.
        for n_agents, each in enumerate((descriptors[:3], descriptors[3:4], descriptors[4:]), 2):
            for pull in [begin_pull(decode, descriptor) for descriptor in each]:
                assert decode.end(pull)["error"] == "KvTimeout"
            wait_for_agents(decode, min(n_agents, 3))
        state = call(decode, "state")
        assert (state["n_agents"], state["n_quarantined"], state["n_free"]) == (3, 145, 23)
        refused = fetch(decode, export(decode, 9, n_blocks=22))
        assert (refused["error"], "the pool was full" in refused["text"]) == ("KvTimeout", True)
        assert "23 slots wanted, 0 of 64 free, 41 wait for peers that hang" in refused["text"]
        assert "peers that hang" in call(decode, "state")["text"]
        call(decode, "release", session=9)
        other.kill()
        prefill.kill()
        whole(decode)
