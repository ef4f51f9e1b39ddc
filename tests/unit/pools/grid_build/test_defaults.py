"""The target of requests that name none, where a spec does not say."""

import pytest

from slagate.pools.grid_build.bands import Bands, assumed_targets


@pytest.mark.parametrize(
    ("edges", "asked", "target_ms"),
    [
        ((100, 400, 900), (100, 900), 500),
        ((100, 500, 900), (100, 900), 700),
        ((100, 497, 900), (100, 900), 698.5),
        ((0, 100, 500, 900), (100, 900), 700),
        ((0, 100, 400, 900), (100, 900), 500),
        ((0, 10), (0, 10), 5),
        ((0, 5), (0, 5), 2.5),
    ],
)
def test_it_is_the_middle_of_what_was_asked_for_and_never_on_an_edge(
    edges: tuple[float, ...], asked: tuple[float, float], target_ms: float
) -> None:
    axis = Bands("ttft_ms", edges, uniform=False, asked=asked)
    assert assumed_targets({}, [axis]) == {"ttft_ms": target_ms}
