"""Classes of a replay: read from a file, drawn for conversations."""

import json
from collections import Counter
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from slagate.pools.grid.errors import ConfigError
from slagate.router.replay.classes import RequestClass, drawn, drawn_tenant, load_classes

ONE: dict[str, Any] = {"name": "a", "share": 1, "ttft_ms": 1000, "itl_ms": 15.5}
THREE = [RequestClass(name, share, 1, 1) for name, share in (("a", 0.5), ("b", 0.3), ("c", 0.2))]


def written(folder: Path, value: object) -> Path:
    path = folder / "classes.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
    return path


def problems(folder: Path, value: object) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_classes(written(folder, value))
    return [str(each) for each in caught.value.problems]


def test_what_a_class_leaves_out_has_a_default(tmp_path: Path) -> None:
    full = {
        "name": "b",
        "share": 0.75,
        "ttft_ms": 1,
        "itl_ms": 2,
        "priority": -3,
        "policy": "shed",
        "weight": 0.5,
        "max_tokens": 9,
    }
    assert load_classes(written(tmp_path, [{**ONE, "share": 0.25}, full])) == (
        RequestClass("a", 0.25, 1000, 15.5, 0, None, None, 2048),
        RequestClass("b", 0.75, 1, 2, -3, "shed", 0.5, 9),
    )


def test_shares_of_a_few_digits_make_a_whole(tmp_path: Path) -> None:
    thirds = [{**ONE, "name": name, "share": 0.3333333} for name in "abc"]
    assert len(load_classes(written(tmp_path, thirds))) == 3
    for each in thirds:
        each["share"] = 0.33333
    assert problems(tmp_path, thirds) == ["classes: all shares together must be 1 (got 0.99999)"]


def test_every_problem_is_named_with_its_place(tmp_path: Path) -> None:
    wrong = [
        {**ONE, "shar": 1, "ttft_ms": 0, "priority": 2**31},
        {
            "name": "a",
            "share": True,
            "ttft_ms": "x",
            "itl_ms": 1,
            "policy": "drop",
            "max_tokens": 0,
        },
        7,
    ]
    assert problems(tmp_path, wrong) == [
        "classes[0].ttft_ms: must be a finite number above 0 (got 0)",
        "classes[0].priority: must be below 2147483648 (got 2147483648)",
        'classes[0].shar: unknown key, did you mean "share"? (got 1)',
        "classes[1].share: must be a finite number above 0 (got true)",
        'classes[1].ttft_ms: must be a finite number above 0 (got "x")',
        "classes[1].policy: must be 'protect', 'shed' or 'relegate' (got \"drop\")",
        "classes[1].max_tokens: must be at least 1 (got 0)",
        "classes[2]: must be an object (got 7)",
        'classes[0].name: is of more than one class (got "a")',
        'classes[1].name: is of more than one class (got "a")',
    ]


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ([], "classes: must not be empty (got [])"),
        ({"classes": [ONE]}, "classes: must be a list (got "),
        ([["a", 1, 2, 3]], 'classes[0]: must be an object (got ["a", 1, 2, 3])'),
        ('[{"name": "a", "name": "b"}]', "classes[0].name: is given more than once, keep one"),
        ("[", "$: is not JSON: "),
        ("", "$: is empty"),
    ],
)
def test_what_is_no_list_of_classes_is_refused(tmp_path: Path, value: object, problem: str) -> None:
    (found,) = problems(tmp_path, value)
    assert found.startswith(problem)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_classes(tmp_path / "none.json")
    path = written(tmp_path, "")
    path.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="save it as UTF-8"):
        load_classes(path)
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps([ONE]).encode())
    assert len(load_classes(path)) == 1


def test_conversations_draw_classes_by_their_digest() -> None:
    for seed, conversation in ((1, 0), (2, 0), (3, 14), (1, 2**70)):
        digest = sha256(f"{seed}:{conversation}".encode()).hexdigest()
        fraction = int(digest[:16], 16) / 2**64
        expected = "a" if fraction < 0.5 else "b" if fraction < 0.8 else "c"
        assert drawn(THREE, seed, conversation).name == expected


def test_shares_of_classes_and_tenants_are_those_asked_for() -> None:
    names = Counter(drawn(THREE, 1, n).name for n in range(4000))
    assert [round(names[each.name] / 4000, 1) for each in THREE] == [0.5, 0.3, 0.2]
    tenants = Counter(drawn_tenant(THREE[0], 4, 1, n) for n in range(4000))
    assert {round(n / 4000, 2) for n in tenants.values()} <= {0.24, 0.25, 0.26}
    assert set(tenants) == {f"a-{n}" for n in range(1, 5)}


def test_a_sum_of_shares_just_below_1_leaves_nobody_without_a_class() -> None:
    almost = [RequestClass("a", 1e-9, 1, 1), RequestClass("b", 1e-9, 1, 1)]
    assert drawn(almost, 1, 5).name == "b"
