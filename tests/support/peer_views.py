"""Views of a stage for peers' policies, worked out by hand."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from slagate.pools.grid.grid import Stage
from slagate.router.replay.policies.view import StageView

Column = Sequence[float] | float
"""One figure of each row; a single number is that of all."""


def stage_view(
    stage: Stage,
    n_rows: int = 2,
    *,
    now_s: float = 0.0,
    isl_tokens: int = 1000,
    ttft_s: float | None = 1.0,
    itl_s: float | None = 0.020,
    is_open: Sequence[bool] | None = None,
    is_full: Sequence[bool] | None = None,
    cached: Column = 0,
    device: Column | None = None,
    inflight: Column = 0,
    queued: Column = 0,
    context: Column = 0,
    capacity: Column = 100_000,
    since_lease: Column = 0,
    prefill_s: Column = 0.0,
    tokens_per_s: Column = 10_000.0,
    transfer_s: Column = 0.0,
    step_s: Column = 0.0,
    growth_s: Column = 0.0,
) -> StageView:
    """Of `n_rows` workers, w0 on. A step gets `growth_s` longer with each token more of every request."""

    def ints(values: Column) -> npt.NDArray[np.int64]:
        return np.zeros(n_rows, np.int64) + np.array(values, np.int64)

    def floats(values: Column) -> npt.NDArray[np.float64]:
        return np.zeros(n_rows, np.float64) + np.array(values, np.float64)

    def step(more_tokens: float) -> npt.NDArray[np.float64]:
        return floats(step_s) + more_tokens * floats(growth_s)

    return StageView(
        stage=stage,
        now_s=now_s,
        isl_tokens=isl_tokens,
        ttft_s=ttft_s,
        itl_s=itl_s,
        names=tuple(f"{stage.value}-w{i}:1" for i in range(n_rows)),
        is_open=np.array([True] * n_rows if is_open is None else is_open, np.bool_),
        is_full=np.array([False] * n_rows if is_full is None else is_full, np.bool_),
        cached_tokens=ints(cached),
        device_tokens=ints(cached if device is None else device),
        inflight=ints(inflight),
        queued_tokens=ints(queued),
        context_tokens=ints(context),
        capacity_tokens=ints(capacity),
        since_lease=ints(since_lease),
        prefill_s=floats(prefill_s),
        prompt_tokens_per_s=floats(tokens_per_s),
        transfer_s=floats(transfer_s),
        step_s=step,
    )
