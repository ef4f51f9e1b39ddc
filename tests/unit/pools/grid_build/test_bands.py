"""The bands of a grid that is being built, outside of the range that was asked for."""

import json
from typing import Any

import pytest

from slagate.pools.grid_build.bands import assumed_targets, size_bands, target_bands
from slagate.pools.grid_build.build import BuiltFleet, build_fleet
from slagate.pools.grid_build.spec import AxisSpec, parse_spec

MEASURED = 131_072
AXIS = AxisSpec(min=0, max=65_536, resolution=4)


@pytest.mark.parametrize(
    ("edge", "last"), [(90_000, 106_384), (120_000, MEASURED), (MEASURED, MEASURED)]
)
def test_no_edge_behind_a_crossing_is_beyond_what_was_measured(edge: int, last: int) -> None:
    axis = size_bands("isl", AXIS, longest_tokens=MEASURED, profiled_tokens=MEASURED)
    assert axis.edges[-2:] == (65_536, 81_920)
    assert axis.split({edge}).edges[-1] == last


def test_a_request_without_a_target_counts_as_the_middle_of_the_range_asked_for() -> None:
    """So it is with a band for tighter targets, and not in the middle of the last band."""
    for beyond in (True, False):
        axis = AxisSpec(edges=(400, 500, 900, 2000), beyond=beyond)
        assert assumed_targets({}, [target_bands("ttft_ms", axis)]) == {"ttft_ms": 1200}


def built(itl: dict[str, Any], *, spill: bool = False) -> BuiltFleet:
    """Decode pools of which TP 8 is the fastest idle, and others are for long contexts when 70 % full."""
    axis = {"min": 0, "max": 1000, "resolution": 1}
    names = {f"d{tp}": tp for tp in (1, 2, 4, 8)}
    spec = {
        "prefill": {
            "isl": axis,
            "ttft_ms": axis,
            "pools": [{"name": "p", "ttft_curve": [[0, 1], [1, 1]]}],
        },
        "decode": {
            "context_length": {"min": 0, "max": 16_384, "resolution": 4},
            "itl_ms": itl,
            "pools": [
                {"name": name, "tp": tp, "profile": "qwen3-32b-fp8-h200"}
                for name, tp in names.items()
            ],
        },
    }
    return build_fleet(parse_spec(json.dumps(spec), "spec"), "spec", spill=spill)


@pytest.mark.parametrize("spill", [False, True])
def test_targets_that_are_too_tight_for_every_idle_pool_have_no_band_of_their_own(
    *, spill: bool
) -> None:
    """An idle TP 8 worker takes 4.1 ms for its first tokens, and so it may be 5 ms, but never 4."""
    strategy = "decode_pool_selection_strategy"
    with_band = built({"edges": [5, 8]}, spill=spill)
    assert with_band.stages["decode"].targets[0].edges == (0, 5, 8)
    without = built({"edges": [4, 8]}, spill=spill)
    assert without.stages["decode"].targets[0].edges == (4, 8)
    as_asked = built({"edges": [4, 8], "beyond": False}, spill=spill)
    assert without.content[strategy] == as_asked.content[strategy]


def test_a_band_that_was_asked_for_is_there_though_nothing_meets_it() -> None:
    (axis,) = built({"edges": [1, 4, 8]}).stages["decode"].targets
    assert axis.edges == (1, 4, 8)
