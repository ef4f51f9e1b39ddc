"""A worker's health, by its table."""

import pytest

from slagate.pools.fleet.health import Health
from slagate.pools.inflight.row_view import State

OK, FAILED, WRONG = "ok", "failed", "wrong"
JOINING, CONNECTING, READY = State.JOINING, State.CONNECTING, State.READY
NOT_READY, REFUSED = State.NOT_READY, State.REFUSED

WAYS: dict[State, list[str]] = {
    JOINING: [],
    CONNECTING: [FAILED],
    READY: [OK],
    NOT_READY: [OK, FAILED, FAILED, FAILED],
    REFUSED: [WRONG],
}
"""What brings a new worker into each state."""

TABLE = [
    (JOINING, [OK], [READY]),
    (JOINING, [FAILED], [CONNECTING]),
    (JOINING, [WRONG], [REFUSED]),
    (CONNECTING, [OK], [READY]),
    (CONNECTING, [FAILED, FAILED, FAILED, OK], [CONNECTING, CONNECTING, CONNECTING, READY]),
    (CONNECTING, [WRONG], [REFUSED]),
    (READY, [OK], [READY]),
    (READY, [FAILED, FAILED, FAILED], [READY, READY, NOT_READY]),
    (READY, [FAILED, FAILED, OK, FAILED, FAILED, FAILED], [READY] * 5 + [NOT_READY]),
    (READY, [WRONG], [REFUSED]),
    (NOT_READY, [OK, OK], [NOT_READY, READY]),
    (NOT_READY, [OK, FAILED, OK, OK], [NOT_READY, NOT_READY, NOT_READY, READY]),
    (NOT_READY, [WRONG], [REFUSED]),
    (REFUSED, [OK, OK], [NOT_READY, READY]),
    (REFUSED, [OK, FAILED, OK, OK], [NOT_READY, NOT_READY, NOT_READY, READY]),
    (REFUSED, [FAILED, FAILED, WRONG], [REFUSED, REFUSED, REFUSED]),
]


def learn(health: Health, what: str) -> bool:
    if what == OK:
        return health.ok()
    return health.failed("why") if what == FAILED else health.refuse("misfit")


@pytest.mark.parametrize(("start", "looks", "states"), TABLE)
def test_what_follows_from_each_look(start: State, looks: list[str], states: list[State]) -> None:
    health = Health()
    for look in WAYS[start]:
        learn(health, look)
    assert health.state is start
    for look, state in zip(looks, states, strict=True):
        before = health.state
        assert learn(health, look) is (state is not before), (look, before)
        assert health.state is state
        # Ready is the one state that needs no reason.
        assert bool(health.reason) is (state is not READY)


def test_one_failure_makes_a_ready_worker_suspect_until_a_success() -> None:
    health = Health()
    assert not health.is_suspect
    health.failed("down")
    assert (health.is_suspect, health.reason) == (False, "down")
    health.ok()
    health.failed("slow")
    assert (health.is_suspect, health.state, health.reason) == (True, READY, "")
    health.ok()
    assert not health.is_suspect
    for _ in range(3):
        health.failed("gone")
    assert (health.is_suspect, health.reason) == (False, "gone")


def test_the_reason_is_the_newest() -> None:
    health = Health()
    health.failed("first")
    health.failed("second")
    assert health.reason == "second"
    health.refuse("a decode worker")
    health.refuse("another release")
    assert health.reason == "another release"
    health.failed("down")
    assert (health.state, health.reason) == (REFUSED, "down")
