"""One worker's record: health as a table, what it can do, what is leased to it, what it last said.

    state        probe ok              probe failed            wrong kind of worker
    connecting   -> ready              (stays)                 -> refused
    ready        (stays)               3rd in a row -> not_ready   -> refused
    not_ready    2nd in a row -> ready (stays)                 -> refused
    refused      -> not_ready          (stays)                 (stays)

Three failures and two successes, because one slow answer of a busy worker is no reason to lose it. A
request that the worker did not even take (UNAVAILABLE before any answer) counts as a failed probe: a dead
worker gives its leases back at once, looks idle, and would draw all traffic until the next looks.
"""

import logging
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

from slagate.proto import openengine_pb2 as oe
from slagate.workers.worker import Worker

log = logging.getLogger(__name__)

FAILURES_TO_LEAVE = 3
SUCCESSES_TO_RETURN = 2

UNLIMITED = 1 << 30


class Stage(Enum):
    """What a pool does with a request. The value is the label in metrics and the CLI."""

    PREFILL = "prefill"
    DECODE = "decode"
    AGG = "agg"


class State(Enum):
    """Whether a worker may take work; only `READY` may."""

    CONNECTING = "connecting"
    READY = "ready"
    NOT_READY = "not_ready"
    REFUSED = "refused"


class Work(NamedTuple):
    """What one lease puts on a worker."""

    prefill_tokens: int = 0  # prompt tokens to prefill, until `Lease.prefill_done`
    prefill_s: float = 0.0  # the same as predicted seconds
    context_tokens: int = 0  # tokens whose KV the request reads at each decode step


class MemberView(NamedTuple):
    """A worker as the policy sees it: frozen, so that a decision can be made again from it."""

    address: str
    state: State
    inflight: int
    max_inflight: int
    queued_tokens: int
    queued_s: float
    context_tokens: int
    models: frozenset[str]
    suspect: bool = False  # ready, but its last probe or leg failed
    last_chosen: int = 0  # number of its pool's last lease on it; 0: none yet


class Member:
    """One worker of a pool. Changed by its watch loop and by leases, both on the event loop."""

    def __init__(self, address: str, *, pool: str, stage: Stage, max_inflight: int | None) -> None:
        self.address = address
        self.pool = pool
        self.stage = stage
        self.max_inflight = UNLIMITED if max_inflight is None else max_inflight
        self.worker: Worker | None = None
        self.state = State.CONNECTING
        self.reason = "not reached yet"
        self.info: oe.ServerInfo | None = None
        self.on_leave: set[Callable[[str], None]] = set()  # told once when it stops being ready
        self.load: oe.LoadInfo | None = None
        self.load_at_s = 0.0
        self.inflight = 0
        self.queued_tokens = 0
        self.queued_s = 0.0
        self.context_tokens = 0
        self.last_chosen = 0
        self._in_a_row = 0
        self.models = {}

    def __repr__(self) -> str:
        """State in one line, for people and for tests."""
        return (
            f"Member({self.address}, {self.state.value}, inflight {self.inflight},"
            f" queued {self.queued_tokens}, context {self.context_tokens})"
        )

    def view(self) -> MemberView:
        """The record as it stands now."""
        return MemberView(
            self.address,
            self.state,
            self.inflight,
            self.max_inflight,
            self.queued_tokens,
            self.queued_s,
            self.context_tokens,
            self._model_names,
            self._in_a_row < 0,
            self.last_chosen,
        )

    @property
    def models(self) -> dict[str, oe.ModelInfo]:
        """What it serves, by name."""
        return self._models

    @models.setter
    def models(self, models: dict[str, oe.ModelInfo]) -> None:
        self._models = models
        self._model_names = frozenset(models)

    def probe_ok(self) -> bool:
        """One good probe. True when the state changed."""
        if self.state is State.READY:
            self._in_a_row = 0
            return False
        self._in_a_row = max(self._in_a_row, 0) + 1
        if self.state is State.NOT_READY and self._in_a_row < SUCCESSES_TO_RETURN:
            return False
        if self.state is State.REFUSED:
            return self._become(State.NOT_READY, "was refused, now fits", in_a_row=1)
        return self._become(State.READY, "")

    def probe_failed(self, reason: str) -> bool:
        """One bad or missing probe. True when the state changed."""
        if self.state is not State.READY:
            self._in_a_row = 0
            self.reason = reason
            return False
        self._in_a_row = min(self._in_a_row, 0) - 1
        if self._in_a_row > -FAILURES_TO_LEAVE:
            return False
        return self._become(State.NOT_READY, reason)

    def refuse(self, reason: str) -> bool:
        """The worker is not what the configuration says it is. True when the state changed."""
        if self.state is State.REFUSED:
            self.reason = reason
            return False
        return self._become(State.REFUSED, reason)

    def _become(self, state: State, reason: str, *, in_a_row: int = 0) -> bool:
        left = self.state is State.READY
        self.state, self.reason, self._in_a_row = state, reason, in_a_row
        about = {"worker": self.address, "pool": self.pool, "state": state.value, "reason": reason}
        log.info("member.state", extra=about)
        if left:
            for tell in list(self.on_leave):
                tell(reason)
        return True


class Lease:
    """A worker's capacity, held for one leg. Counted when taken, given back exactly once."""

    def __init__(self, member: Member, work: Work) -> None:
        self.member = member
        self.work = work
        self._prefill_open = True
        self._open = True
        member.inflight += 1
        member.queued_tokens += work.prefill_tokens
        member.queued_s += work.prefill_s
        member.context_tokens += work.context_tokens

    def prefill_done(self) -> None:
        """The prompt is processed: the worker's queue is shorter, the request goes on. Idempotent."""
        if self._prefill_open:
            self._prefill_open = False
            self.member.queued_tokens -= self.work.prefill_tokens
            # Floats do not add up to zero again by themselves.
            left = self.member.queued_s - self.work.prefill_s
            self.member.queued_s = left if self.member.queued_tokens else 0.0

    def release(self) -> None:
        """Give everything back. Idempotent."""
        if self._open:
            self._open = False
            self.prefill_done()
            self.member.inflight -= 1
            self.member.context_tokens -= self.work.context_tokens
