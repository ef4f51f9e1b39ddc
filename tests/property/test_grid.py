import copy
import json
from fractions import Fraction
from itertools import pairwise
from typing import Any

from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from slagate.pools.fleet_file.load import FleetConfig, parse_config
from slagate.pools.grid.errors import ConfigError
from slagate.pools.grid.grid import Axis
from slagate.router.cli.grid.commands import select_lines
from support.fleet.files import agg_file, disagg_file
from support.seeds import n_in

everyday = st.integers(-10, 20_000) | st.decimals(-10, 2000, places=1).map(float)
extreme = st.integers(-(10**420), 10**420) | st.floats(allow_nan=False, allow_infinity=False)
numbers = everyday | extreme


@st.composite
def ranges(draw: st.DrawFn) -> tuple[float, float, int]:
    """A low, a high and a resolution that a file may have."""
    ends = everyday | st.floats(allow_nan=False, allow_infinity=False)
    low, high = sorted((draw(ends), draw(ends)))
    resolution = draw(st.integers(1, 60))
    assume(low < high)
    assume(0 < (high - low) / resolution < float("inf") and abs(low + high) < float("inf"))
    return low, high, resolution


def dynamo_band(value: float, low: float, high: float, resolution: int) -> int:
    """The upstream arithmetic as it is written there, and the nearest end where that overflows."""
    try:
        band = int((value - low) / ((high - low) / resolution))
    except OverflowError:
        assert not low <= value <= high
        return 0 if value < low else resolution - 1
    if band < 0:
        return 0
    if band > resolution - 1:
        return resolution - 1
    return band


@settings(max_examples=n_in(gate=200, long=600))
@given(ranges(), numbers)
@example((0, 16, 10), 4.8)
@example((0.0, 5e-323, 4), 5e-323)
@example((0.0, 3e-323, 10), 3e-323)
@example((-1e308, 7e307, 2), 1.7e308)
@example((0, 1e-300, 7), 1e308)
def test_a_band_is_bit_for_bit_that_of_dynamo(
    bounds: tuple[float, float, int], value: float
) -> None:
    assert Axis("isl", *bounds).index(value) == dynamo_band(value, *bounds)


@settings(max_examples=n_in(gate=100, long=200))
@given(ranges())
def test_a_missing_target_is_the_middle_of_the_range(bounds: tuple[float, float, int]) -> None:
    low, high, _ = bounds
    assert Axis("ttft_ms", *bounds).index(None) == dynamo_band((low + high) / 2, *bounds)


@settings(max_examples=n_in(gate=100, long=300))
@given(ranges(), numbers)
def test_a_band_is_the_exact_one_unless_the_value_is_at_an_edge(
    bounds: tuple[float, float, int], value: float
) -> None:
    """Against rationals: rounding moves a value by one band at most, and only at an inner edge."""
    low, high, resolution = bounds
    # Below, a double has too few digits left to say this.
    assume((high - low) / resolution > 1e-290)
    exact = (Fraction(value) - Fraction(low)) * resolution / (Fraction(high) - Fraction(low))
    band = max(0, min(int(exact), resolution - 1))
    found = Axis("isl", *bounds).index(value)
    if found != band:
        assert abs(found - band) == 1
        slack = Fraction(1, 2**50) * max(1, abs(exact))
        assert abs(exact - max(found, band)) <= slack


@settings(max_examples=n_in(gate=100, long=200))
@given(ranges(), numbers, numbers)
def test_a_larger_value_is_never_in_a_lower_band(
    bounds: tuple[float, float, int], one: float, other: float
) -> None:
    axis = Axis("isl", *bounds)
    assert axis.index(min(one, other)) <= axis.index(max(one, other))


@settings(max_examples=n_in(gate=100, long=200))
@given(st.data())
def test_a_cell_is_the_entry_of_the_nested_mapping_and_rules_come_after(
    data: st.DataObject,
) -> None:
    content = agg_file()
    strategy = content["agg_pool_selection_strategy"]
    pools = st.integers(0, 2)
    row = st.lists(pools, min_size=2, max_size=2)
    layer = st.lists(row, min_size=3, max_size=3)
    mapping = strategy["agg_pool_mapping"] = data.draw(st.lists(layer, min_size=2, max_size=2))
    priorities = st.integers(-3, 3)
    rules = [
        {"min_priority": min(ends), "max_priority": max(ends), "target_pool": target}
        for *ends, target in data.draw(
            st.lists(st.tuples(priorities, priorities, pools), max_size=4)
        )
    ]
    strategy["priority_overrides"] = rules
    request: dict[str, Any] = {
        "isl": data.draw(numbers),
        "ttft_ms": data.draw(st.none() | numbers),
        "itl_ms": data.draw(st.none() | numbers),
    }
    priority = data.draw(st.none() | priorities)

    cell = parse_config(content, source="f").stages["agg"].select(request, priority)

    ttft_ms, itl_ms = request["ttft_ms"], request["itl_ms"]
    bands = (
        dynamo_band(request["isl"], 0, 4000, 2),
        dynamo_band(150 if ttft_ms is None else ttft_ms, 0, 300, 3),
        dynamo_band(20 if itl_ms is None else itl_ms, 0, 40, 2),
    )
    base_pool = mapping[bands[0]][bands[1]][bands[2]]
    matching = [
        rule["target_pool"]
        for rule in rules
        if priority is not None and rule["min_priority"] <= priority <= rule["max_priority"]
    ]
    assert (cell.index, cell.base_pool) == (bands, base_pool)
    assert cell.pool == [*matching, base_pool][0]


@settings(max_examples=n_in(gate=100, long=200))
@given(st.lists(st.integers(-3, 3), min_size=1, max_size=6), st.data())
def test_a_retry_never_goes_to_an_equal_or_slower_pool(
    priorities: list[int], data: st.DataObject
) -> None:
    content = disagg_file()
    n = len(priorities)
    content |= {"num_prefill_pools": n, "prefill_pools": [f"p{at}" for at in range(n)]}
    content["prefill_pool_priorities"] = priorities
    content["prefill_pool_selection_strategy"]["prefill_pool_mapping"] = [[0, 0], [0, 0]]
    chosen = data.draw(st.integers(0, n - 1))
    first, *rest = parse_config(content, source="f").stages["prefill"].retry_order(chosen)
    assert first == chosen
    assert sorted(rest) == [at for at in range(n) if priorities[at] < priorities[chosen]]
    for earlier, later in pairwise(rest):
        assert (-priorities[earlier], earlier) < (-priorities[later], later)


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-3, 5)
    | st.integers(-(10**400), 10**400)
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["isl_min", "ttft_min", "p-fast", "agg", "h:1"])
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.text(max_size=3) | st.sampled_from(["workers", "tp"]), inner, max_size=3
        )
    ),
    max_leaves=8,
)


def places(content: Any) -> list[tuple[Any, Any]]:
    """Each (container, key) of the file."""
    keys = list(content) if isinstance(content, dict) else range(len(content))
    found = [(content, key) for key in keys]
    for key in keys:
        if isinstance(content[key], dict | list):
            found += places(content[key])
    return found


@settings(max_examples=n_in(gate=100, long=400))
@given(st.data())
def test_a_damaged_file_is_refused_at_load_or_serves_every_request(data: st.DataObject) -> None:
    """No other exception than ConfigError, and nothing left over that fails when a request comes."""
    content = copy.deepcopy(data.draw(st.sampled_from([disagg_file(), agg_file()])))
    content["pools"] = {"p-fast": {"workers": ["h:1"], "profile": "x", "tp": 1}}
    for _ in range(data.draw(st.integers(1, 2))):
        container, key = data.draw(st.sampled_from(places(content)))
        container[key] = data.draw(values)
        if isinstance(container, dict) and data.draw(st.booleans()):
            container[data.draw(st.text(max_size=4))] = container.pop(key)
    try:
        config = parse_config(content, source="f")
    except ConfigError:
        return
    for grid in config.stages.values():
        for value in (-1, 0, 150.5, 10**400, 1e308, -1e308):
            request = dict.fromkeys(("isl", "context_length", "ttft_ms", "itl_ms"), value)
            cell = grid.select(request, value)
            assert grid.pool_names[cell.pool]
            assert grid.retry_order(cell.pool)[0] == cell.pool


CONFIGS: list[FleetConfig] = [
    parse_config(content, source="f") for content in (disagg_file(), agg_file())
]
fields = st.sampled_from(["isl", "context_length", "ttft_ms", "itl_ms", "priority", "ttft"])
json_lines = (
    st.text(max_size=30)
    | st.dictionaries(fields, values, max_size=5).map(json.dumps)
    | st.dictionaries(fields, numbers | st.none(), max_size=5).map(json.dumps)
    | values.map(json.dumps)
)


@settings(max_examples=n_in(gate=100, long=300))
@given(st.lists(json_lines, max_size=5))
def test_every_line_gets_one_answer(lines: list[str]) -> None:
    for config in CONFIGS:
        for grid in config.stages.values():
            answers = [json.loads(answer) for answer in select_lines(grid, lines)]
            assert len(answers) == len(lines)
            for answer in answers:
                assert ("error" in answer) != ("pool_name" in answer)
