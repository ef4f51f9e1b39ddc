"""What pydantic finds wrong, in words."""

from typing import Annotated, NamedTuple

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from slagate.pools.fleet_file.validation import problems, reason


class Point(NamedTuple):
    across: int
    down: int = 0


class Drawing(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    points: list[Point]
    width: Annotated[float, Field(gt=0.0, le=2.5)] = 1.0


def test_places_values_and_probable_keys_are_named() -> None:
    with pytest.raises(ValidationError) as caught:
        Drawing.model_validate(
            {"points": [{"acros": 1}, {"across": "x"}, 7], "width": 0, "widht": 3}
        )
    keys = {"": Drawing.model_fields, "points": Point._fields}
    assert sorted(map(str, problems(caught.value, keys))) == [
        'points[0].acros: unknown key, did you mean "across"? (got 1)',
        "points[0].across: is required (got nothing)",
        'points[1].across: must be an integer (got "x")',
        "points[2]: must be an object (got 7)",
        'widht: unknown key, did you mean "width"? (got 3)',
        "width: must be above 0 (got 0)",
    ]


@pytest.mark.parametrize(
    ("kind", "more", "said"),
    [
        ("missing_argument", {}, "is required"),
        ("arguments_type", {}, "must be an object"),
        ("less_than_equal", {"le": 2.5}, "must be at most 2.5"),
        ("greater_than_equal", {"ge": 2.0}, "must be at least 2"),
        ("literal_error", {"expected": "'a' or 'b'"}, "must be 'a' or 'b'"),
        ("of our own", {}, "its text"),
    ],
)
def test_kinds_of_every_version_have_words(kind: str, more: dict[str, object], said: str) -> None:
    assert reason({"type": kind, "ctx": more, "msg": "its text", "input": 1}) == said


@pytest.mark.parametrize(
    ("word", "meant"),
    [("othr", ", did you mean 'other'?"), ("ONE", ", did you mean 'one'?"), ("x", "")],
)
def test_a_word_that_is_none_of_some_is_told_the_nearest(word: str, meant: str) -> None:
    item = {"type": "literal_error", "ctx": {"expected": "'one' or 'other'"}, "input": word}
    assert reason(item) == f"must be 'one' or 'other'{meant}"
