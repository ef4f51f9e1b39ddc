import io
import json
from typing import Any

import pytest

from slagate.pools.fleet_file.load import parse_config
from slagate.pools.fleet_file.models import Objective
from slagate.pools.grid.grid import StageGrid
from slagate.router.cli.grid.commands import select_lines
from support.fleet.files import agg_file, disagg_file


def prefill() -> StageGrid:
    content = disagg_file()
    rule = {"min_priority": 10, "max_priority": 20, "target_pool": 0}
    content["prefill_pool_selection_strategy"]["priority_overrides"] = [rule]
    return parse_config(content, source="f").stages["prefill"]


def answers(text: str, *, grid: StageGrid | None = None) -> list[dict[str, Any]]:
    """The answers to a file with this text."""
    return [json.loads(line) for line in select_lines(grid or prefill(), io.StringIO(text))]


def error(line: str) -> str:
    """The only thing in the only answer to `line`."""
    (answer,) = answers(line)
    assert list(answer) == ["error"]
    return str(answer["error"])


def test_an_answer_says_the_cell_and_the_pool() -> None:
    assert answers('{"isl": 5000, "ttft_ms": 850.5}\n') == [
        {"row": 1, "col": 1, "base_pool": 1, "pool": 1, "pool_name": "p-bulk"}
    ]


def test_a_priority_changes_the_pool_and_not_the_base_pool() -> None:
    assert answers('{"isl": 5000, "ttft_ms": 850, "priority": 15}') == [
        {"row": 1, "col": 1, "base_pool": 1, "pool": 0, "pool_name": "p-fast"}
    ]


def test_a_grid_of_three_axes_adds_the_layer() -> None:
    agg = parse_config(agg_file(), source="f").stages["agg"]
    assert answers('{"isl": 3000, "ttft_ms": 250, "itl_ms": 30}', grid=agg) == [
        {"layer": 1, "row": 2, "col": 1, "base_pool": 2, "pool": 2, "pool_name": "a-bulk"}
    ]


def test_null_and_absent_are_the_same() -> None:
    nulls = '{"isl": 1, "ttft_ms": null, "itl_ms": null, "context_length": null, "priority": null}'
    absent, null = answers(f'{{"isl": 1}}\n{nulls}')
    assert absent == null
    assert absent["col"] == 1


def test_a_target_of_0_is_not_given_in_a_file_of_dynamos_endpoint_picker_only() -> None:
    """There 0 is what an absent target is; in gRPC metadata a 0 was given, and is the tightest."""
    sizes = {"sizeMin": 0, "sizeMax": 3000, "sizeResolution": 3}
    targets = {"latencyMinMs": 1000, "latencyMaxMs": 5000, "latencyResolution": 2}
    table = {"poolLabels": ["tp1", "tp2", "tp4"], "mapping": [[1, 0], [2, 1], [2, 2]]}
    content = table | sizes | targets
    picker = parse_config(content, source="f").stages["prefill"]
    lines = "".join(f'{{"isl": 1500, "ttft_ms": {ms}}}\n' for ms in ("null", 0, -1, "0.0", 1))
    assert [answer["pool_name"] for answer in answers(lines, grid=picker)] == [*["tp2"] * 4, "tp4"]
    assert picker.select({"isl": 1500, "ttft_ms": 0}).pool == 2
    objectives = {"*": Objective(ttft_ms=1500)}
    (line,) = select_lines(picker, ['{"isl": 1500, "ttft_ms": 0}'], objectives=objectives)
    assert json.loads(line)["pool_name"] == "tp4"
    tight, absent = answers('{"isl": 5000, "ttft_ms": 0}\n{"isl": 5000}')
    assert (tight["col"], absent["col"]) == (0, 1)


def test_every_line_has_one_answer_and_an_error_stops_nothing() -> None:
    found = answers('{"isl": 1}\n\n   \n{"isl": true}\n{"isl": 5000}\n\n')
    assert [next(iter(answer)) for answer in found] == [
        "row",
        "error",
        "error",
        "error",
        "row",
        "error",
    ]


@pytest.mark.parametrize("line", ["\n", " \t\n"])
def test_an_empty_line_is_told_as_such(line: str) -> None:
    assert error(line) == "the line is empty"


def test_a_long_key_is_cut_in_the_answer() -> None:
    assert len(error(json.dumps({"k" * 100_000: 1}))) < 200


def test_the_first_class_that_counts_as_any_is_noted_and_no_further_one() -> None:
    objectives = {"*": Objective(ttft_ms=100), "batch": Objective(ttft_ms=900)}
    names = ["batch", "*", "", "bach", "bach", "other"]
    lines = [json.dumps({"isl": 1, "objective": name}) for name in names]
    noted: list[str] = []
    assert len(list(select_lines(prefill(), lines, objectives=objectives, note=noted.append))) == 6
    assert noted == ["bach"]
    del objectives["*"]
    assert list(select_lines(prefill(), lines, objectives=objectives, note=noted.append))
    assert noted == ["bach"]


def test_the_newline_at_the_end_of_the_file_starts_no_line() -> None:
    assert len(answers('{"isl": 1}\n')) == len(answers('{"isl": 1}')) == 1
    assert answers("") == []


def test_each_answer_is_one_line() -> None:
    (line,) = select_lines(prefill(), ['{"is\\nl": 1}'])
    assert "\n" not in line


@pytest.mark.parametrize("number", ["1" + "0" * 400, "-1e308", "5e-324", "-0.0", "1E5"])
def test_any_finite_number_has_a_cell(number: str) -> None:
    (answer,) = answers(f'{{"isl": {number}, "ttft_ms": {number}, "priority": {number}}}')
    assert answer["pool_name"] in {"p-fast", "p-bulk"}


@pytest.mark.parametrize("field", ["isl", "context_length", "ttft_ms", "itl_ms", "priority"])
@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("NaN", "NaN"),
        ("-Infinity", "-Infinity"),
        ("1e400", "Infinity"),
        ("9" * 5000, "Infinity"),
        ("-" + "9" * 5000, "-Infinity"),
        ('"5"', '"5"'),
        ("true", "true"),
        ("[1]", "[1]"),
        ('{"a": 1}', '{"a": 1}'),
    ],
)
def test_cfg_04_what_is_not_a_finite_number_is_an_error_by_name(
    field: str, text: str, shown: str
) -> None:
    """Also in a field that this stage does not look at."""
    request = {"isl": 1, field: "here"}
    line = json.dumps(request).replace('"here"', text)
    assert error(line) == f"{field}: must be a finite number (got {shown})"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{}", "isl: is required"),
        ('{"context_length": 5}', "isl: is required"),
        ('{"isl": null}', "isl: is required"),
        ('{"isl": 1, "ttft": 5}', 'ttft: unknown key, did you mean "ttft_ms"? (got 5)'),
        ('{"isl": 1, "zzz": null}', "zzz: unknown key (got null)"),
        ('{"isl": 1, "isl": 2}', "isl: is given more than once, keep one"),
        ("5", "a line must be an object (got 5)"),
        ("null", "a line must be an object (got null)"),
        ("[]", "a line must be an object (got [])"),
        (
            '{"isl": "x", "ttft_ms": false}',
            'isl: must be a finite number (got "x"); ttft_ms: must be a finite number (got false)',
        ),
    ],
)
def test_a_request_that_has_no_cell_says_why(line: str, message: str) -> None:
    assert error(line) == message


@pytest.mark.parametrize("line", ["{", '{"isl": 1} x', "\ufeff{}", "[" * 200_000, "isl=5"])
def test_what_is_not_json_is_an_error(line: str) -> None:
    assert error(line).startswith("$: is not JSON: ")
