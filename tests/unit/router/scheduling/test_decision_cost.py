"""What a decision may cost, counted rather than timed."""

import sys
from types import FrameType

import numpy as np
import pytest

from slagate.pools.grid.grid import Stage
from slagate.pools.inflight.engine_queue import Work
from slagate.pools.prefix.overlap import Prompt
from slagate.router.scheduling.policy import choose
from support.builders import MODEL, ask, fleet, rng

BLOCK_TOKENS = 32
PROMPT = Prompt(np.arange(40 * BLOCK_TOKENS, dtype=np.uint32).tobytes())
DEPTHS = (10, 20, 30, 40)


def n_calls(n_workers: int, *, n_leases: int) -> int:
    """Calls, of Python and of C functions, in one decision over so many workers a stage."""
    names = {stage: [f"{stage}{n}:1" for n in range(n_workers)] for stage in ("prefill", "decode")}
    of = fleet(pools={stage: {"workers": workers} for stage, workers in names.items()})
    pool = of.pools["prefill"]
    assert pool.overlaps is not None
    index = pool.overlaps.index_of(BLOCK_TOKENS)
    for row in range(n_workers):
        holder = index.join()
        pool.overlaps.set_holder(row, holder, block_tokens=BLOCK_TOKENS)
        n_blocks = DEPTHS[row % len(DEPTHS)]
        tokens = PROMPT.tokens[: n_blocks * BLOCK_TOKENS * 4]
        index.stored(holder, range(1, n_blocks + 1), None, tokens)
    for number in range(n_leases):
        pool.lease(number % n_workers, Work(100, 0.1, 100), PROMPT)
    asked, draws, calls = ask(isl_tokens=PROMPT.n_tokens, model=MODEL), rng(), [0]

    def decide() -> None:
        choose(asked, of.grids, of.views(PROMPT), rng=draws)

    def count(_frame: FrameType, event: str, _arg: object) -> None:
        calls[0] += event in ("call", "c_call")

    decide()
    sys.setprofile(count)
    try:
        decide()
    finally:
        sys.setprofile(None)
    assert pool.snapshot(PROMPT).cached.cached_tokens.max() == PROMPT.n_tokens - 1
    assert {Stage.PREFILL, Stage.DECODE} == set(of.grids)
    return calls[0]


@pytest.mark.parametrize("n_leases", [0, 512 * 12])
def test_mem_09_no_step_of_a_decision_is_taken_for_each_worker(n_leases: int) -> None:
    few, many = n_calls(64, n_leases=n_leases), n_calls(512, n_leases=n_leases)
    assert abs(many - few) <= 8
