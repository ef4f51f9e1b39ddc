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

from slagate.pools.event_view import EventView
from slagate.pools.ranks import Limits, Ranks, Work
from slagate.pools.table import UNLIMITED, State, Table
from slagate.proto import openengine_pb2 as oe
from slagate.workers.worker import Worker

log = logging.getLogger(__name__)

FAILURES_TO_LEAVE = 3
SUCCESSES_TO_RETURN = 2


class Stage(Enum):
    """What a pool does with a request. The value is the label in metrics and the CLI."""

    PREFILL = "prefill"
    DECODE = "decode"
    AGG = "agg"


class Truth:
    """Prompt tokens that were predicted to be cached, beside those that the engine then found."""

    def __init__(self) -> None:
        self.n_requests = 0
        self.predicted_tokens = 0
        self.engine_cached_tokens = 0
        self.abs_error_tokens = 0  # summed over the requests, so that errors do not cancel out

    def add(self, predicted_tokens: int, cached_tokens: int) -> None:
        """Count one prompt."""
        self.n_requests += 1
        self.predicted_tokens += predicted_tokens
        self.engine_cached_tokens += cached_tokens
        self.abs_error_tokens += abs(predicted_tokens - cached_tokens)


class Member:
    """One worker of a pool. Changed by its watch loop and by leases, both on the event loop.

    Its ranks have rows of the pool's table; one row as long as nobody can choose between its ranks.
    """

    def __init__(
        self, address: str, *, pool: str, stage: Stage, table: Table, limits: Limits | None = None
    ) -> None:
        self.address = address
        self.pool = pool
        self.stage = stage
        self.limits = limits or Limits()
        self.worker: Worker | None = None
        self._state = State.CONNECTING
        self.reason = "not reached yet"
        self.on_leave: set[Callable[[str], None]] = set()  # told once when it stops being ready
        self.on_change: Callable[[], None] = _nothing  # told when it may take more than before
        self.load: oe.LoadInfo | None = None
        self.load_at_s = 0.0
        self.n_served = 0  # prompts it has processed that must have left KV events
        self.truth = Truth()
        self.events: EventView | None = None  # None: not watched
        self._info: oe.ServerInfo | None = None
        self._models: dict[str, oe.ModelInfo] = {}
        self._in_a_row = 0
        self.ranks = Ranks(address, table)
        self._set_up()

    def __repr__(self) -> str:
        """State in one line, for people and for tests."""
        return (
            f"Member({self.address}, {self.state.value}, inflight {self.inflight},"
            f" queued {self.queued_tokens}, context {self.context_tokens})"
        )

    @property
    def state(self) -> State:
        """Whether it may take work."""
        return self._state

    @state.setter
    def state(self, state: State) -> None:
        self._state = state
        self._show_state()

    @property
    def inflight(self) -> int:
        """Leases on it."""
        return self.ranks.inflight

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens leased to it and not prefilled yet."""
        return self.ranks.queued_tokens

    @property
    def queued_s(self) -> float:
        """The same as seconds of work."""
        return self.ranks.queued_s

    @property
    def context_tokens(self) -> int:
        """Tokens whose KV its requests read at each decode step."""
        return self.ranks.context_tokens

    @property
    def models(self) -> dict[str, oe.ModelInfo]:
        """What it serves, by name."""
        return self._models

    @models.setter
    def models(self, models: dict[str, oe.ModelInfo]) -> None:
        self._models = models
        self.ranks.set_models(frozenset(models))
        self.on_change()

    @property
    def info(self) -> oe.ServerInfo | None:
        """Who it says it is; its ranks and limits follow from that."""
        return self._info

    @info.setter
    def info(self, info: oe.ServerInfo | None) -> None:
        self._info = info
        if info is not None:
            self._set_up()

    @property
    def max_inflight(self) -> int:
        """Requests it gets at once: what the fleet file says, else for decode what its engine runs."""
        if self.limits.max_inflight is not None:
            return self.limits.max_inflight
        capacity = oe.DeploymentCapacity() if self._info is None else self._info.capacity
        if self.stage is not Stage.PREFILL and capacity.max_running_requests:
            # What is more would wait in the engine, where nobody can give it to another worker.
            return capacity.max_running_requests * self.n_ranks
        return UNLIMITED

    @property
    def block_tokens(self) -> int:
        """Tokens of one KV block; 0 while that is not known."""
        return 0 if self._info is None else self._info.capacity.kv_block_size

    @property
    def n_ranks(self) -> int:
        """Attention-DP ranks, each with a KV cache of its own."""
        return 1 if self._info is None else max(1, self._info.parallelism.data_parallel_size)

    @property
    def has_row_for_each_rank(self) -> bool:
        """Whether a rank can be asked for. Else none of their caches can be counted on."""
        return self.ranks.n_used == self.n_ranks

    @property
    def _takes_rank(self) -> bool:
        if self._info is None:
            return False
        decodes = self.stage is Stage.DECODE
        key = "slagate_supports_decode_dp_rank" if decodes else "trtllm_supports_dp_rank_targeting"
        return self._info.extra.fields[key].bool_value if key in self._info.extra.fields else False

    def _set_up(self) -> None:
        """Bring the rows in line with what the worker says of itself."""
        n_ranks = self.n_ranks if self._takes_rank else 1
        capacity_tokens = UNLIMITED
        if self._info is not None and self._info.capacity.total_kv_blocks:
            per_rank = self._info.capacity.total_kv_blocks // n_ranks
            capacity_tokens = per_rank * max(1, self.block_tokens)
        self.ranks.set_up(
            n_ranks,
            limits=self.limits._replace(max_inflight=self.max_inflight),
            capacity_tokens=capacity_tokens,
            models=frozenset(self._models),
        )
        self._show_state()

    def _show_state(self) -> None:
        self.ranks.set_state(self._state, suspect=self._in_a_row < 0)

    def probe_ok(self) -> bool:
        """One good probe. True when the state changed."""
        if self.state is State.READY:
            if self._in_a_row:
                self._in_a_row = 0
                self._show_state()
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
            self._show_state()
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
        self.reason, self._in_a_row = reason, in_a_row
        self.state = state
        about = {"worker": self.address, "pool": self.pool, "state": state.value, "reason": reason}
        log.info("member.state", extra=about)
        if left:
            for tell in list(self.on_leave):
                tell(reason)
        # A worker less is news too for whoever waits: there may be nobody left to wait for.
        self.on_change()
        return True


class Lease:
    """A rank's capacity, held for one leg. Counted when taken, given back exactly once."""

    def __init__(self, member: Member, row: int, work: Work, *, rank: int | None = None) -> None:
        self.member = member
        self.row = row
        self.rank = rank  # to be asked for; None: the worker chooses
        self.work = work
        self.settle: Callable[..., None] = _nothing  # told once whether the prompt was `processed`
        self._prefill_open = True
        self._open = True
        member.ranks.took(row, work)

    def prefill_done(self) -> None:
        """The prompt is processed: the worker's queue is shorter, the request goes on. Idempotent."""
        if self._end_prefill():
            # A prompt that was all cached leaves no event to wait for.
            self.member.n_served += self.work.prefill_tokens >= max(1, self.member.block_tokens)
            self.settle(processed=True)
            if self.member.limits.max_queued_tokens is not None:
                self.member.on_change()

    def release(self) -> None:
        """Give everything back. Idempotent."""
        if not self._open:
            return
        self._open = False
        given_up = self._end_prefill()
        self.member.ranks.gave_back(self.row, self.work)
        # The books are right from here on, whatever the others do with it.
        if given_up:
            self.settle(processed=False)
        self.member.on_change()

    def _end_prefill(self) -> bool:
        was_open, self._prefill_open = self._prefill_open, False
        if was_open:
            self.member.ranks.prefilled(self.row, self.work)
        return was_open


def _nothing(**_: object) -> None:
    """Nobody wants to know."""
