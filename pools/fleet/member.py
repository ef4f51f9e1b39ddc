"""One worker's record: health, capacity, leases, what it last said, how predictions of its cache came true.

A request that the worker did not even take (UNAVAILABLE before any answer) counts as a failed probe: a dead
worker gives its leases back at once, looks idle, and would draw all traffic until the next looks.

A member that the configuration has no place for any more drains: whatever its health, it takes no new work.
It has left once nothing is leased on it and no KV is parked there. When its time is up its legs are ended;
what is parked there is let go of by the requests that it belongs to.
"""

import logging
from collections.abc import Callable
from typing import NamedTuple, Protocol

from slagate.pools.fleet.health import Health
from slagate.pools.fleet.ranks import Limits, Ranks
from slagate.pools.grid.stage import Stage
from slagate.pools.inflight.rows import UNLIMITED, State
from slagate.pools.inflight.table import LoadTable
from slagate.pools.kv_events.view import EventView
from slagate.proto import openengine_pb2 as oe
from slagate.workers.worker import Worker


class WorkerCapacity(NamedTuple):
    """Before a worker has said anything: one rank, and no limit."""

    block_tokens: int = 0  # of one KV block; 0 while that is not known
    n_ranks: int = 1  # attention-DP ranks, each with a KV cache of its own
    n_rows: int = 1  # as many as ranks where one can be asked for
    row_tokens: int = UNLIMITED  # KV cache of a row
    running: int = 0  # requests that its engine runs at once; 0 while that is not known


def capacity_of(info: oe.ServerInfo, *, decodes: bool) -> WorkerCapacity:
    """What follows from `info`; whether a rank can be asked for also depends on whether it `decodes`."""
    said = info.capacity
    n_ranks = max(1, info.parallelism.data_parallel_size)
    key = "slagate_supports_decode_dp_rank" if decodes else "trtllm_supports_dp_rank_targeting"
    takes_rank = key in info.extra.fields and info.extra.fields[key].bool_value
    n_rows = n_ranks if takes_rank else 1
    row_tokens = UNLIMITED
    if said.total_kv_blocks:
        row_tokens = said.total_kv_blocks // n_rows * max(1, said.kv_block_size)
    running = said.max_running_requests * n_ranks
    return WorkerCapacity(said.kv_block_size, n_ranks, n_rows, row_tokens, running)


class PrefixPredictionError:
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


log = logging.getLogger(__name__)

TOO_LONG = "was removed from the configuration, and its requests took too long"


class Leg(Protocol):
    """A call to the worker that is under way."""

    def worker_lost(self, reason: str) -> None:
        """The worker is out of service."""

    def cut_off(self, reason: str) -> None:
        """The worker has to go now."""


class Member:
    """One worker of a pool. Changed by its watch loop and by leases, both on the event loop.

    Its ranks have rows of the pool's table; one row as long as nobody can choose between its ranks.
    """

    def __init__(
        self,
        address: str,
        *,
        pool: str,
        stage: Stage,
        table: LoadTable,
        limits: Limits | None = None,
    ) -> None:
        self.address = address
        self.pool = pool
        self.stage = stage
        self._limits = limits or Limits()
        self.worker: Worker | None = None
        self._health = Health()
        self.legs: set[Leg] = set()  # told when it stops being ready, and when its time is up
        self.on_change: Callable[[], None] = lambda: None  # told when it may take more than before
        self.on_left: list[Callable[[], None]] = []  # told once when it has left
        self.draining_since_s: float | None = None
        self.has_left = False
        self._is_cut = False
        self._n_held = 0  # handoffs parked there, and aborts under way
        self.load: oe.LoadInfo | None = None
        self.load_at_s = 0.0
        self.n_served = 0  # prompts it has processed that must have left KV events
        self.truth = PrefixPredictionError()
        self.events: EventView | None = None  # None: not watched
        self._info: oe.ServerInfo | None = None
        self._capacity = WorkerCapacity()
        # Looked up once: every lease asks.
        self.block_tokens, self.n_ranks = self._capacity.block_tokens, self._capacity.n_ranks
        self._models: dict[str, oe.ModelInfo] = {}
        self.ranks = Ranks(address, table)
        self._set_up()

    def __repr__(self) -> str:
        """State in one line, for people and for tests."""
        return (
            f"Member({self.address}, {self.state.value}, inflight {self.ranks.inflight},"
            f" queued {self.ranks.queued_tokens}, context {self.ranks.context_tokens})"
        )

    @property
    def state(self) -> State:
        """Whether it may take work."""
        if self.has_left:
            return State.LEFT
        return State.DRAINING if self.is_draining else self._health.state

    @property
    def reason(self) -> str:
        """Why it is not ready; empty when it is."""
        if self.has_left:
            return "is not in the configuration any more"
        return TOO_LONG if self._is_cut else self._health.reason

    @property
    def is_draining(self) -> bool:
        """Whether the configuration has no place for it any more."""
        return self.draining_since_s is not None

    @property
    def is_refused(self) -> bool:
        """Whether what answers there is not what the configuration says."""
        return self._health.state is State.REFUSED

    @property
    def is_up(self) -> bool:
        """Whether what it has been given can be done there."""
        return self._health.state is State.READY and not self._is_cut

    @property
    def everywhere(self) -> tuple[int, int]:
        """Leases, and prompt tokens not prefilled yet, of all processes of the gateway."""
        inflight, queued_tokens = self.ranks.elsewhere
        return self.ranks.inflight + inflight, self.ranks.queued_tokens + queued_tokens

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
        decodes = self.stage is Stage.DECODE
        self._capacity = WorkerCapacity() if info is None else capacity_of(info, decodes=decodes)
        self.block_tokens, self.n_ranks = self._capacity.block_tokens, self._capacity.n_ranks
        if info is not None:
            self._set_up()

    @property
    def limits(self) -> Limits:
        """What the fleet file says."""
        return self._limits

    @limits.setter
    def limits(self, limits: Limits) -> None:
        self._limits = limits
        self._set_up()
        self.on_change()

    @property
    def max_inflight(self) -> int:
        """Requests it gets at once: what the fleet file says, else for decode what its engine runs."""
        if self.limits.max_inflight is not None:
            return self.limits.max_inflight
        if self.stage is not Stage.PREFILL and self._capacity.running:
            # What is more would wait in the engine, where nobody can give it to another worker.
            return self._capacity.running
        return UNLIMITED

    @property
    def has_row_for_each_rank(self) -> bool:
        """Whether a rank can be asked for. Else none of their caches can be counted on."""
        return self.ranks.n_used == self.n_ranks

    def _set_up(self) -> None:
        """Bring the rows in line with what the worker says of itself."""
        if self.has_left:
            return
        self.ranks.set_up(
            self._capacity.n_rows,
            limits=self.limits._replace(max_inflight=self.max_inflight),
            capacity_tokens=self._capacity.row_tokens,
            models=frozenset(self._models),
        )
        self._show_state()

    def _show_state(self) -> None:
        self.ranks.set_state(self.state, suspect=self._health.is_suspect)

    def drain(self, now_s: float) -> None:
        """Take no new work, and leave once the old is done."""
        self.draining_since_s = now_s
        self._show_state()
        self._leave_if_done()

    def resume(self) -> None:
        """The configuration has a place for it again. No-op for one that does not drain."""
        assert not self.has_left, self
        if self.is_draining:
            self.draining_since_s, self._is_cut = None, False
            self._show_state()
            self.on_change()

    def has_drained_for(self, seconds: float, now_s: float) -> bool:
        """Whether it drains, and has for so long."""
        since_s = self.draining_since_s
        return since_s is not None and now_s - since_s >= seconds

    def cut(self) -> bool:
        """End what is still running there: it has drained for long enough. True when it was not cut yet."""
        assert self.is_draining, self
        was_cut, self._is_cut = self._is_cut, True
        if not was_cut:
            log.warning("member.cut", extra={"worker": self.address, "pool": self.pool})
            for leg in list(self.legs):
                leg.cut_off(TOO_LONG)
        return not was_cut

    def hold(self) -> None:
        """Something is left there that has to be collected, or done, before it may leave."""
        self._n_held += 1

    def let_go(self) -> None:
        """What `hold` announced is over."""
        self._n_held -= 1
        self._leave_if_done()

    def gave_back(self) -> None:
        """A lease on it has ended."""
        self.on_change()
        self._leave_if_done()

    def _leave_if_done(self) -> None:
        if self.draining_since_s is None:
            return
        if not self.has_left and not self.ranks.inflight and not self._n_held:
            self.has_left = True
            for tell in self.on_left:
                tell()

    def probe_ok(self) -> bool:
        """One good probe. True when the state changed."""
        was_ready = self._health.state is State.READY
        return self._learnt(was_ready=was_ready, changed=self._health.ok())

    def probe_failed(self, reason: str) -> bool:
        """One bad or missing probe. True when the state changed."""
        was_ready = self._health.state is State.READY
        return self._learnt(was_ready=was_ready, changed=self._health.failed(reason))

    def refuse(self, reason: str) -> bool:
        """The worker is not what the configuration says it is. True when the state changed."""
        was_ready = self._health.state is State.READY
        return self._learnt(was_ready=was_ready, changed=self._health.refuse(reason))

    def _learnt(self, *, was_ready: bool, changed: bool) -> bool:
        self._show_state()
        if changed:
            state, reason = self._health.state, self._health.reason
            about = {"worker": self.address, "pool": self.pool, "state": state.value}
            log.info("member.state", extra=about | {"reason": reason})
            if was_ready:
                for leg in list(self.legs):
                    leg.worker_lost(reason)
            # A worker less is news too for whoever waits: there may be nobody left to wait for.
            self.on_change()
        return changed
