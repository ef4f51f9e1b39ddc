"""What another router's policy sees of a fleet, and how it answers."""

from collections.abc import Mapping
from typing import ClassVar, Protocol

import msgspec
import numpy as np

from slagate.pools.grid.grid import Stage
from slagate.pools.inflight.table import Flags, Floats, Ints


class StageView(msgspec.Struct, frozen=True, gc=False, eq=False, kw_only=True):
    """The rows that a policy may choose from for one stage of a request; arrays have n_rows entries.

    It is our own gateway's knowledge: leases counted when they are taken, prefixes by KV events, seconds
    by the pool's profile and what was observed since. What a peer polls for is older.
    """

    stage: Stage
    isl_tokens: int
    ttft_s: float | None  # the request's target
    itl_s: float | None  # the request's target
    names: tuple[str, ...]  # address, with the rank where the worker has several
    is_open: Flags  # whether the row may take the request now
    cached_tokens: Ints  # leading prompt tokens that are cached there
    inflight: Ints  # requests on the row, without this one
    queued_tokens: Ints  # prompt tokens to compute, of requests ahead
    queued_s: Floats  # the same, in seconds
    context_tokens: Ints  # tokens of KV cache of the requests there
    capacity_tokens: Ints  # tokens that its KV cache holds
    max_inflight: Ints
    prefill_s: (
        Floats  # predicted seconds to compute this prompt, without what is cached; 0 for decode
    )
    predicted_itl_s: Floats  # predicted with this request in the batch; 0 for prefill
    since_lease: (
        Ints  # leases of its pool since the last one on the row: the larger, the longer ago
    )

    def __len__(self) -> int:
        return len(self.names)

    @property
    def uncached_tokens(self) -> Ints:
        """Prompt tokens that the row would have to compute."""
        return self.isl_tokens - self.cached_tokens


class Pick(msgspec.Struct, frozen=True, gc=False):
    """The row chosen for one stage, as an index; None: none now, so the request waits for one.

    `ttft_s` is what the policy itself predicts, where it does.
    """

    row: int | None
    ttft_s: float | None = None


REFUSED = "refused"
"""What a policy answers that refuses the request."""

Picks = Mapping[Stage, Pick]


class PeerPolicy(Protocol):
    """One policy. It is a frozen dataclass whose fields are its parameters, with the published defaults.

    An instance serves one run, and may keep state besides, such as whose turn it is.
    """

    over_all_pools: ClassVar[bool]
    """Whether it chooses among all workers of a stage, or among those of the grid's pool."""

    def pick(self, views: Mapping[Stage, StageView], draw: float) -> Picks | str:
        """Pick a row for each stage, or refuse. `draw` in [0, 1) chooses between equals."""


def least(score: Floats, is_open: Flags, draw: float) -> int | None:
    """The index of the least of f64[n] scores among open rows; `draw` chooses between equals.

    >>> least(np.array([3.0, 1.0, 1.0]), np.array([True, True, True]), 0.9)
    2
    """
    rows = is_open.nonzero()[0]
    if not len(rows):
        return None
    scores = score[rows]
    best = rows[scores == scores.min()]
    return int(best[int(draw * len(best))])


def open_rows(view: StageView) -> list[int]:
    """Indices of the rows that may take the request now."""
    return [int(row) for row in np.flatnonzero(view.is_open)]
