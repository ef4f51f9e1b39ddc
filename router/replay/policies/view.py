"""What another router's policy sees of a fleet, and how it answers."""

from collections.abc import Callable, Mapping
from typing import ClassVar, Protocol

import msgspec
import numpy as np

from slagate.pools.grid.grid import Stage
from slagate.pools.inflight.rows import Flags, Floats, Ints


class StageView(msgspec.Struct, frozen=True, gc=False, eq=False, kw_only=True):
    """The rows that a policy may choose from for one stage of a request; arrays have n_rows entries.

    It is our own gateway's knowledge: leases counted when they are taken, prefixes by KV events, seconds
    by the pool's profile and what was observed since. What a peer polls for is older.
    """

    stage: Stage
    now_s: float  # on the gateway's clock
    isl_tokens: int
    ttft_s: float | None  # the request's target
    itl_s: float | None  # the request's target
    names: tuple[str, ...]  # address, with the rank where the worker has several
    is_open: Flags  # whether the row may take the request now
    is_full: Flags  # whether it is at a limit, which passes by itself; others may be down
    cached_tokens: Ints  # leading prompt tokens that are cached there
    device_tokens: Ints  # those of them that are on the device, not on the host
    inflight: Ints  # requests on the row, without this one
    queued_tokens: Ints  # prompt tokens to compute, of requests ahead
    context_tokens: Ints  # tokens of KV cache of the requests there; 0 for prefill
    capacity_tokens: Ints  # tokens that its KV cache holds
    since_lease: Ints  # leases of its pool since the last one on the row: more, the longer ago
    prefill_s: Floats  # predicted, from dispatch until the prompt is computed, queue included; 0 for decode
    prompt_tokens_per_s: Floats  # of a lone prompt of this length, nothing cached; 0 for decode
    transfer_s: Floats  # predicted, to pull the prompt's KV cache; 0 but for decode
    step_s: Callable[[float], Floats]
    """Predicted seconds of a step with this request in the batch, once each request of it has so many
    tokens more; 0 for prefill."""

    def __len__(self) -> int:
        return len(self.names)

    @property
    def uncached_tokens(self) -> Ints:
        """Prompt tokens that the row would have to compute."""
        return self.isl_tokens - self.cached_tokens

    @property
    def kv_share(self) -> Floats:
        """How full the KV cache is, 0 to 1 and above."""
        share: Floats = self.context_tokens / np.maximum(self.capacity_tokens, 1)
        return share

    @property
    def first_token_s(self) -> Floats:
        """Predicted seconds that the stage adds to TTFT: of decode the transfer and the first step."""
        if self.stage is Stage.DECODE:
            return self.transfer_s + self.step_s(0.0)
        return self.prefill_s


class Pick(msgspec.Struct, frozen=True, gc=False):
    """The row chosen for one stage, as an index; None: none now, so the request waits for one.

    `ttft_s` is what the policy itself predicts, where it does: from arrival to the first token.
    """

    row: int | None
    ttft_s: float | None = None


REFUSED = "refused"
"""What a policy answers that refuses the request."""

Picks = Mapping[Stage, Pick]


class PeerPolicy(Protocol):
    """One policy. It is a frozen dataclass whose fields are its parameters, with the published defaults.

    The metadata of each has the values that a search tries, under "tune". An instance serves one run, and
    may keep state besides, in fields that are no arguments.
    """

    over_all_pools: ClassVar[bool]
    """Whether it chooses among all workers of a stage, or among those of the grid's pool."""

    def pick(self, views: Mapping[Stage, StageView], draw: float) -> Picks | str:
        """Pick a row for each stage, or refuse. `draw` in [0, 1) chooses between equals.

        A retry has only the stage that is to be chosen again. Where a stage has no open row the request
        waits, and is asked for again when a worker can take more.
        """


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


def in_turn(view: StageView, candidates: Flags) -> int | None:
    """The index of the candidate that was chosen longest ago; of equals the first."""
    rows = candidates.nonzero()[0]
    return int(rows[view.since_lease[rows].argmax()]) if len(rows) else None


def total_ttft_s(views: Mapping[Stage, StageView], rows: Mapping[Stage, int]) -> float:
    """Predicted TTFT with these rows, or the part of it that they add."""
    return sum(float(views[stage].first_token_s[row]) for stage, row in rows.items())


def picks_of(rows: Mapping[Stage, int | None], ttft_s: float | None) -> Picks:
    """These rows as picks; the TTFT is with the stage that computes the prompt."""
    return {
        stage: Pick(row, None if stage is Stage.DECODE else ttft_s) for stage, row in rows.items()
    }


def waiting(views: Mapping[Stage, StageView], draw: float) -> Picks:
    """The picks where a stage has no open row, of the others the row with the least seconds."""
    return {
        stage: Pick(least(view.first_token_s, view.is_open, draw)) for stage, view in views.items()
    }
