"""The file of rows: what a second run keeps, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest

from slagate.router.replay.out import OutFile, Row, RowKey
from slagate.workers.runtime.usage import UsageError

SETUP = {"requests": 3, "classes": [{"name": "a"}]}
KEYS = [RowKey("t", "f", policy, load, 1) for policy in ("x", "y") for load in (1.0, 2.0)]


def opened(path: Path, keys: list[RowKey] = KEYS, **changed: Any) -> OutFile:
    given: dict[str, Any] = {"setup": SETUP, "parameters": {}, "traces": {"t": "7f"}}
    return OutFile(path, keys, **(given | changed))


def row(key: RowKey, **more: Any) -> Row:
    return {**key._asdict(), "parameters": {}, "both_met": 0.5} | more


def test_rows_are_in_the_order_of_the_keys_however_they_come(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    file = opened(path)
    for key in reversed(KEYS):
        file.put(key, row(key))
    content = json.loads(path.read_text())
    assert content == {"setup": SETUP, "traces": {"t": "7f"}, "rows": [row(key) for key in KEYS]}
    assert [path.name for path in tmp_path.iterdir()] == ["rows.json"]


def test_a_second_run_has_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    opened(path).put(KEYS[2], row(KEYS[2]))
    file = opened(path)
    assert [key in file for key in KEYS] == [False, False, True, False]
    assert file.rows == [row(KEYS[2])]


def test_rows_of_other_policies_and_loads_stay_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    opened(path).put(KEYS[0], row(KEYS[0]))
    file = opened(path, KEYS[3:])
    file.put(KEYS[3], row(KEYS[3]))
    assert file.rows == [row(KEYS[3])]
    assert json.loads(path.read_text())["rows"] == [row(KEYS[3]), row(KEYS[0])]


def test_rows_with_other_parameters_are_played_again(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    opened(path).put(KEYS[0], row(KEYS[0]))
    assert KEYS[0] not in opened(path, parameters={"x": {"weight": 2}})


def test_the_row_of_a_search_is_known_whatever_it_found(tmp_path: Path) -> None:
    path, key = tmp_path / "rows.json", RowKey("t", "f", "x", None, 1, 0.9)
    opened(path, [key]).put(key, row(key, load=1.37))
    assert key in opened(path, [key])


def test_a_search_for_another_rate_is_another_row(tmp_path: Path) -> None:
    path, key = tmp_path / "rows.json", RowKey("t", "f", "x", None, 1, 0.9)
    other = key._replace(find_rate=0.5)
    opened(path, [key]).put(key, row(key, load=1.37))
    file = opened(path, [other])
    assert other not in file
    file.put(other, row(other, load=2.5))
    assert key in opened(path, [key])


def test_rows_of_another_set_up_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    opened(path).put(KEYS[0], row(KEYS[0]))
    with pytest.raises(UsageError, match=r"rows of another set-up \(requests\)"):
        opened(path, setup=SETUP | {"requests": 4})


def test_another_trace_of_the_same_name_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    opened(path).put(KEYS[0], row(KEYS[0]))
    with pytest.raises(UsageError, match=r"rows of another set-up \(trace t\)"):
        opened(path, traces={"t": "8e"})


def test_rows_of_other_traces_stay_and_are_known_again(tmp_path: Path) -> None:
    path, other = tmp_path / "rows.json", KEYS[0]._replace(trace="u")
    opened(path).put(KEYS[0], row(KEYS[0]))
    opened(path, [other], traces={"u": "1"}).put(other, row(other))
    assert KEYS[0] in opened(path)
    for traces in ({"t": "8e"}, {"u": "2"}):
        with pytest.raises(UsageError, match="rows of another set-up"):
            opened(path, traces=traces)


WITHOUT_PARAMETERS = dict.fromkeys((*RowKey._fields, "both_met"), 0)


@pytest.mark.parametrize(
    "content",
    [
        *("", "[]", "{}", '{"setup": {}, "rows": []}', '{"setup": 1, "rows": []}', "\x00"),
        *(
            json.dumps({"setup": SETUP, "rows": rows})
            for rows in (3, [3], [{}], [WITHOUT_PARAMETERS], [WITHOUT_PARAMETERS | {"trace": []}])
        ),
    ],
)
def test_another_file_is_refused_and_stays(tmp_path: Path, content: str) -> None:
    path = tmp_path / "rows.json"
    path.write_text(content)
    with pytest.raises(UsageError, match=f"--out {path}: "):
        opened(path)
    assert path.read_text() == content
