"""One worker's record: health, capacity, leases, what it last reported, how good cache predictions were.

A request that the worker did not even take (UNAVAILABLE before any answer) counts as a failed probe: a dead
worker gives its leases back at once, looks idle, and would draw all traffic until the next probes.

A worker that is no longer in the configuration drains: whatever its health, it takes no new work. It has
left once nothing is leased on it and no KV is parked there. When the time for draining is up its legs are
ended; parked KV is released by the requests that it belongs to.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

from slagate.pools.fleet.health import Health
from slagate.pools.grid.grid import Stage
from slagate.pools.inflight.pair_key import ANY_PAIR, AUTO, PairKey
from slagate.pools.inflight.row_view import State
from slagate.pools.inflight.table import UNLIMITED, LoadTable
from slagate.pools.inflight.worker_rows import Limits, WorkerRows
from slagate.pools.kv_events.view import EventView
from slagate.proto import openengine_pb2 as oe
from slagate.workers.worker import Worker

log = logging.getLogger(__name__)

TOO_LONG = "was removed from the configuration, and its requests took too long"


class WorkerCapacity(NamedTuple):
    """What a worker can hold. The defaults are for one that has not reported yet: one rank, no limit."""

    block_tokens: int = 0  # of one KV block; 0 while that is not known
    n_ranks: int = 1  # attention-DP ranks, each with a KV cache of its own
    n_rows: int = 1  # as many as ranks where one can be asked for, else 1
    row_tokens: int = UNLIMITED  # KV cache of a row
    running: int = 0  # requests that its engine runs at once; 0 while that is not known
    step_tokens: int = (
        0  # tokens that a row's engine computes in one step; 0 while that is not known
    )


def capacity_of(info: oe.ServerInfo, *, decodes: bool) -> WorkerCapacity:
    """The capacity in `info`; a worker that `decodes` announces its ranks under another key."""
    said = info.capacity
    n_ranks = max(1, info.parallelism.data_parallel_size)
    key = "slagate_supports_decode_dp_rank" if decodes else "trtllm_supports_dp_rank_targeting"
    takes_rank = key in info.extra.fields and info.extra.fields[key].bool_value
    n_rows = n_ranks if takes_rank else 1
    row_tokens = UNLIMITED
    if said.total_kv_blocks:
        row_tokens = said.total_kv_blocks // n_rows * max(1, said.kv_block_size)
    running = said.max_running_requests * n_ranks
    step_tokens = said.max_batched_tokens * n_ranks // n_rows
    return WorkerCapacity(said.kv_block_size, n_ranks, n_rows, row_tokens, running, step_tokens)


MAX_PAIR_TEXT = 40
"""Characters of a text in a `PairKey`: a worker may say anything."""


def pair_of(info: oe.ServerInfo) -> PairKey:
    """What `info` says of handoffs; stock servers name no more than their back-end and block size."""
    fields = info.extra.fields

    def said(key: str) -> str:
        # A message map adds a missing key when it is read.
        text = fields[key].string_value if key in fields else ""
        return text.lower()[:MAX_PAIR_TEXT]

    return PairKey(
        transport=said("slagate_kv_transport") or _transport(info.kv_connector.transfer_backend),
        library=said("slagate_kv_transport_library"),
        runtime=said("slagate_transceiver_runtime"),
        kv_dtype=said("slagate_kv_dtype"),
        manager=said("slagate_kv_cache_manager"),
        block_tokens=info.capacity.kv_block_size,
        handoff_key=said("slagate_handoff_key"),
    )


def takes_whole(info: oe.ServerInfo) -> bool:
    """Whether `info` says that a decode worker takes requests without a handoff; not known is no."""
    fields, key = info.extra.fields, "slagate_takes_whole_requests"
    return key in fields and fields[key].bool_value


def _transport(backend: str) -> str:
    """The transport that a transfer back-end names, in lower case."""
    name = backend.lower()[:MAX_PAIR_TEXT]
    # The engine takes one by itself: which one depends on its version.
    return AUTO if name == "default" else name


class PrefixPredictionError:
    """Sums of one worker: prompt tokens predicted to be cached, and found cached by its engine."""

    def __init__(self) -> None:
        self.n_requests = 0
        self.predicted_tokens = 0
        self.engine_cached_tokens = 0
        self.abs_error_tokens = 0  # summed over the requests, so that errors do not cancel out

    def add_prompt(self, predicted_tokens: int, cached_tokens: int) -> None:
        """Add one prompt: its cached tokens as predicted, and as the engine found."""
        self.n_requests += 1
        self.predicted_tokens += predicted_tokens
        self.engine_cached_tokens += cached_tokens
        self.abs_error_tokens += abs(predicted_tokens - cached_tokens)


class Leg(Protocol):
    """A running call to the worker. `router.legs` implements it, which `pools` may not import."""

    def worker_lost(self, reason: str) -> None:
        """Fail the call if it can be retried: the worker is out of service."""

    def drain_timed_out(self, reason: str) -> None:
        """Fail the call in any case: the worker has drained for too long."""


class Member:
    """One worker of a pool. Its watch loop and leases change it, both on the event loop.

    Its ranks have rows of the pool's table; it has one row while the gateway cannot choose between ranks.
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
        self.limits = limits or Limits()  # of the fleet file
        self.worker: Worker | None = None
        self.health = Health()
        self.legs: set[Leg] = set()  # called when it stops being ready, and when it is cut
        # Called when it may take more than before.
        self.on_change: Callable[[], None] = lambda: None
        self.on_report: Callable[[], None] = lambda: None  # called when its load was asked for
        self.on_left: list[Callable[[], None]] = []  # called once when it has left
        self.draining_since_s: float | None = None
        self.has_left = False
        self.is_up = False  # it can do what was leased on it: it is healthy, and not cut
        self._is_cut = False
        self._n_retained = 0  # handoffs parked there, and aborts under way
        self.load: oe.LoadInfo | None = None
        self.load_at_s = 0.0
        self.n_served = 0  # prompts it has processed that must have left KV events
        self.prefix_error = PrefixPredictionError()
        self.events: EventView | None = None  # None: not watched
        self.server_info: oe.ServerInfo | None = None  # who it says it is
        self.capacity = WorkerCapacity()
        self.pair = ANY_PAIR  # what it says of its handoffs
        self.takes_whole = False  # it says that it takes requests without a handoff
        self.models: dict[str, oe.ModelInfo] = {}  # what it serves, by name
        self.ranks = WorkerRows(address, table)
        # Whether a rank can be asked for; else no rank's cache can be relied on.
        self.has_row_for_each_rank = True
        self._set_up()

    def __repr__(self) -> str:
        """State in one line, for people and for tests."""
        return (
            f"Member({self.address}, {self.state.value}, inflight {self.ranks.inflight},"
            f" queued {self.ranks.queued_tokens}, context {self.ranks.context_tokens})"
        )

    @property
    def state(self) -> State:
        """`LEFT`, `DRAINING`, or else the state of its health; only `READY` takes work."""
        if self.has_left:
            return State.LEFT
        return State.DRAINING if self.is_draining else self.health.state

    @property
    def reason(self) -> str:
        """Why it is not healthy, was cut or has left, for people; else empty."""
        if self.has_left:
            return "is not in the configuration any more"
        return TOO_LONG if self._is_cut else self.health.reason

    @property
    def is_draining(self) -> bool:
        """Whether it was dropped from the configuration, and not taken back since."""
        return self.draining_since_s is not None

    @property
    def max_inflight(self) -> int:
        """Most requests at once: the fleet file's, else (not for prefill) what its engine runs."""
        if self.limits.max_inflight is not None:
            return self.limits.max_inflight
        if self.stage is not Stage.PREFILL and self.capacity.running:
            # Further requests would wait in the engine, and could not go to another worker.
            return self.capacity.running
        return UNLIMITED

    def takes(self, backend: str) -> bool:
        """Whether it can take over a handoff of this transfer back-end, as far as both say."""
        known = _transport(backend), self.pair.transport
        return known[0] == known[1] or "" in known or AUTO in known

    def set_models(self, models: dict[str, oe.ModelInfo]) -> None:
        """Set the models that it serves, by name."""
        self.models = models
        self.ranks.set_models(frozenset(models))
        self.on_change()

    def set_server_info(self, info: oe.ServerInfo) -> None:
        """Set the worker's `ServerInfo`, from which its rows and their limits follow."""
        self.server_info = info
        self.capacity = capacity_of(info, decodes=self.stage is Stage.DECODE)
        self.pair = pair_of(info)
        self.takes_whole = takes_whole(info)
        self._set_up()

    def set_limits(self, limits: Limits) -> None:
        """Set the limits of the fleet file."""
        self.limits = limits
        self._set_up()
        self.on_change()

    def _set_up(self) -> None:
        """Bring the rows in line with what the worker says of itself."""
        if self.has_left:
            return
        self.ranks.set_up(
            self.capacity.n_rows,
            limits=self.limits._replace(max_inflight=self.max_inflight),
            capacity_tokens=self.capacity.row_tokens,
            step_tokens=self.capacity.step_tokens,
            models=frozenset(self.models),
            pair=self.pair,
            takes_whole=self.takes_whole,
        )
        self.has_row_for_each_rank = self.ranks.n_used == self.capacity.n_ranks
        self._show_state()

    def _show_state(self) -> None:
        self.is_up = self.health.state is State.READY and not self._is_cut
        self.ranks.set_state(self.state, suspect=self.health.is_suspect)

    def drain(self, now_s: float) -> None:
        """Take no new requests, and leave once those that it has are done."""
        self.draining_since_s = now_s
        self._show_state()
        self._leave_if_done()

    def resume(self) -> None:
        """Take work again: it is back in the configuration. No-op for one that does not drain."""
        assert not self.has_left, self
        if self.is_draining:
            self.draining_since_s, self._is_cut = None, False
            self._show_state()
            self.on_change()

    def has_drained_for(self, seconds: float, now_s: float) -> bool:
        """Whether it has been draining for at least `seconds`."""
        since_s = self.draining_since_s
        return since_s is not None and now_s - since_s >= seconds

    def force_drain(self) -> bool:
        """Fail the calls that still run there, as it has drained too long. True the first time."""
        assert self.is_draining, self
        was_cut, self._is_cut = self._is_cut, True
        self._show_state()
        if not was_cut:
            log.warning("member.cut", extra={"worker": self.address, "pool": self.pool})
            for leg in list(self.legs):
                leg.drain_timed_out(TOO_LONG)
        return not was_cut

    def add_hold(self) -> None:
        """Keep it from leaving: KV is parked there, or an abort under way, until `remove_hold`."""
        self._n_retained += 1

    def remove_hold(self) -> None:
        """Undo one `add_hold`; the worker leaves if it drains and has nothing else to do."""
        self._n_retained -= 1
        if self.draining_since_s is not None:
            self._leave_if_done()

    def lease_ended(self) -> None:
        """Note that a lease on it has ended; it leaves if it drains and that was the last."""
        self.on_change()
        if self.draining_since_s is not None:
            self._leave_if_done()

    def _leave_if_done(self) -> None:
        if not self.has_left and not self.ranks.inflight and not self._n_retained:
            self.has_left = True
            for left in self.on_left:
                left()

    def probe_ok(self) -> bool:
        """Count a good probe. True when the state changed."""
        return self._update(self.health.ok)

    def probe_failed(self, reason: str) -> bool:
        """Count a bad or missing probe. True when the state changed."""
        return self._update(partial(self.health.failed, reason))

    def refuse(self, reason: str) -> bool:
        """Give it no work: it is not what the configuration says. True when the state changed."""
        return self._update(partial(self.health.refuse, reason))

    def _update(self, change: Callable[[], bool]) -> bool:
        was_ready = self.health.state is State.READY
        changed = change()
        self._show_state()
        if changed:
            state, reason = self.health.state, self.health.reason
            about = {"worker": self.address, "pool": self.pool, "state": state.value}
            log.info("member.state", extra=about | {"reason": reason})
            if was_ready:
                for leg in list(self.legs):
                    leg.worker_lost(reason)
            # Waiting requests must know of a lost worker too: they may have none left to wait for.
            self.on_change()
        return changed
