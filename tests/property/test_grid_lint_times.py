"""What lint calls faster under every load is so between the loads that it looks at, too."""

import math
from itertools import combinations

import pytest

from slagate.pools.grid_build.curve import Load, profile_decode
from slagate.pools.grid_lint.times import Deployment, PoolCurves
from slagate.workers.profiles.profile import load_profile

LOADS = [step / 200 for step in range(10, 198)]


@pytest.mark.parametrize(
    ("name", "sizes"), [("qwen3-32b-fp8-h200", (1, 2, 4, 8)), ("llama-3.1-8b-h100", (1, 2, 4))]
)
@pytest.mark.parametrize("batch", [64, 256])
def test_a_pool_that_is_less_is_so_at_loads_in_between(
    name: str, sizes: tuple[int, ...], batch: int
) -> None:
    """Each passes the rows of its profile elsewhere; where memory limits batches it is a near thing."""
    profile = load_profile(name)
    n_faster = 0
    looked_up = {}
    for tp in sizes:
        found = profile.tp(tp)
        curves = PoolCurves(found, Deployment(1, batch), ("itl_ms",), longest_tokens=131_072)
        exact = [profile_decode(found, Load(load, replicas=1, batch=batch)) for load in LOADS]
        looked_up[tp] = curves, exact
    for context_tokens in range(500, 131_000, 1999):
        times = {tp: of[0].times(context_tokens, "itl_ms") for tp, of in looked_up.items()}
        for small, large in combinations(sizes, 2):
            if times[large].less(times[small]) and times[small].busy < math.inf:
                n_faster += 1
                pairs = zip(looked_up[large][1], looked_up[small][1], strict=True)
                assert all(
                    mine.ms(context_tokens) <= other.ms(context_tokens) for mine, other in pairs
                ), (context_tokens, small, large)
    assert n_faster > 20
