"""One row of a pool's table as a decision shows it, and the states of a worker."""

from enum import Enum

import msgspec

from slagate.pools.inflight.pair_key import ANY_PAIR, PairKey
from slagate.pools.inflight.shared_counts import N_COUNTS, RankCell


class State(Enum):
    """Whether a worker may take work; only one that is `READY` may.

    It is `JOINING` until its first probe. When the configuration drops it, it is `DRAINING` until its
    requests have ended; then it has `LEFT`.
    """

    JOINING = "joining"
    CONNECTING = "connecting"
    READY = "ready"
    NOT_READY = "not_ready"
    REFUSED = "refused"
    DRAINING = "draining"
    LEFT = "left"


STATES = tuple(State)
READY, LEFT = STATES.index(State.READY), STATES.index(State.LEFT)


class RowView(msgspec.Struct, frozen=True, gc=False):
    """One worker and rank as the policy sees it, with what is cached there of one prompt."""

    address: str
    rank: int | None  # None: the worker itself chooses between its ranks, or has but one
    state: State
    suspect: bool  # ready, but its last probe or leg failed
    inflight: int  # leases on the rank
    worker_inflight: int  # leases on all ranks of the worker
    max_inflight: int  # of the worker
    queued_tokens: int  # prompt tokens leased and not prefilled yet, less what was cached
    max_queued_tokens: int
    queued_s: float  # the same as seconds of work, less what was computed, before any correction
    context_tokens: int  # KV tokens that each decode step reads of its requests, on average
    capacity_tokens: int  # tokens its KV cache holds
    foreign_requests: int  # running there that this gateway did not send
    foreign_s: float  # seconds of work of the prompts waiting there that it did not send
    pace: float  # the seconds that it takes for one that the pool's estimator predicts
    itl_limit_s: float  # the most that a decode step may take, as was promised; inf: any
    stall_room_s: (
        float  # work of prompts that the answers there can bear, as was promised; inf: any
    )
    join_slack_s: float  # seconds by which the last step of its queue may become longer; inf: any
    join_quiet_s: float  # the same, without much delay of what ends in it
    last_chosen: int  # number of the pool's last lease on it; 0: none yet
    join_tokens: int  # prompt tokens that would join that step; 0: there is no room, or it runs
    models: frozenset[str]
    device_tokens: int = 0  # leading prompt tokens cached on the device
    host_tokens: int = 0  # tokens behind those that are cached, but not all on the device
    pair: PairKey = ANY_PAIR  # what the worker says of its handoffs
    takes_whole: int = 0  # 1: a decode worker that says it takes requests without a handoff

    @property
    def cached_tokens(self) -> int:
        """Leading prompt tokens that are cached, on the device or the host."""
        return self.device_tokens + self.host_tokens


_COUNTS = tuple(cell.name.lower() for cell in RankCell)[:N_COUNTS]
INT_FIELDS = _COUNTS + tuple(
    field.name
    for field in msgspec.structs.fields(RowView)
    if field.type is int and field.name not in ("device_tokens", "host_tokens", *_COUNTS)
)
FLOAT_FIELDS = tuple(field.name for field in msgspec.structs.fields(RowView) if field.type is float)
FIGURE_INDEX = {name: at for names in (INT_FIELDS, FLOAT_FIELDS) for at, name in enumerate(names)}
