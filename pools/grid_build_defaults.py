"""The targets of requests that name none, where a spec does not say: the middle of what was asked for.

The middle of the built axis would do for them otherwise, and bands that were added move that.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping

from slagate.pools.grid_build_bands import Bands
from slagate.pools.grid_file import ANY_CLASS, Objective

_NEAR_EDGE = 0.01
"""Of a band's width: a target so near to its edge is put into its middle."""


def assumed_targets(
    objectives: Mapping[str, Objective], axes: Iterable[Bands]
) -> dict[str, int | float]:
    """By field (`ttft_ms`, `itl_ms`) what `objectives` has no target in ms for, for any class."""
    given = objectives.get(ANY_CLASS, Objective())
    return {axis.field: _middle_ms(axis) for axis in axes if getattr(given, axis.field) is None}


def _middle_ms(axis: Bands) -> int | float:
    middle_ms = sum(axis.asked) / 2
    band = min(max(0, bisect_right(axis.edges, middle_ms) - 1), axis.resolution - 1)
    low_ms, high_ms = axis.edges[band : band + 2]
    near_ms = _NEAR_EDGE * (high_ms - low_ms)
    if min(middle_ms - low_ms, high_ms - middle_ms) < near_ms:
        middle_ms = (low_ms + high_ms) / 2
    return int(middle_ms) if middle_ms.is_integer() else middle_ms
