"""`scheduling` and the classes of a fleet file: defaults, every kind of file, and what is refused."""

from typing import Any

import pytest

from slagate.pools.fleet_file.load import parse_config
from slagate.pools.fleet_file.models import Objective, Scheduling
from support.fleet.files import agg_file, disagg_file
from support.fleet.problems import lines

EPP = {
    "poolLabels": ["tp1", "tp2"],
    "sizeMax": 8000,
    "sizeResolution": 1,
    "latencyMaxMs": 900,
    "latencyResolution": 2,
    "mapping": [[0, 1]],
}
KINDS = {"disagg": disagg_file(), "agg": agg_file(), "endpoint picker": EPP}


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_says_nothing_refuses_nothing_and_spills_as_its_cells_say(kind: str) -> None:
    config = parse_config({**KINDS[kind], "objectives": {"a": {}}}, source="f")
    assert config.scheduling == Scheduling(spill="listed", admission="off", bypass="off")
    assert config.objectives["a"] == Objective(policy="shed", weight=1)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_file_says_it_at_the_top(kind: str) -> None:
    content = {
        **KINDS[kind],
        "scheduling": {"spill": "any", "admission": "shadow", "bypass": "auto"},
        "objectives": {"a": {"policy": "relegate", "weight": 2.5}, "*": {"policy": "protect"}},
    }
    config = parse_config(content, source="f")
    modes = config.scheduling
    assert (modes.spill, modes.admission, modes.bypass) == ("any", "shadow", "auto")
    assert {name: (of.policy, of.weight) for name, of in config.objectives.items()} == {
        "a": ("relegate", 2.5),
        "*": ("protect", 1),
    }
    assert config.warnings == ()


CASES: list[tuple[dict[str, Any], str]] = [
    ({"scheduling": None}, "scheduling: must be an object (got null)"),
    ({"scheduling": "on"}, 'scheduling: must be an object (got "on")'),
    (
        {"scheduling": {"spill": "listd"}},
        "scheduling.spill: must be 'none', 'listed' or 'any', did you mean 'listed'? (got \"listd\")",
    ),
    (
        {"scheduling": {"admission": "ON"}},
        "scheduling.admission: must be 'off', 'shadow' or 'on', did you mean 'on'? (got \"ON\")",
    ),
    (
        {"scheduling": {"admission": True}},
        "scheduling.admission: must be 'off', 'shadow' or 'on' (got true)",
    ),
    ({"scheduling": {"bypass": None}}, "scheduling.bypass: must be 'off' or 'auto' (got null)"),
    (
        {"scheduling": {"spil": "any"}},
        'scheduling.spil: unknown key, did you mean "spill"? (got "any")',
    ),
    (
        {"scheduling": {"weight": 1}},
        "scheduling.weight: unknown key at this level, it belongs in an entry of objectives (got 1)",
    ),
    (
        {"admission": "on"},
        'admission: unknown key at this level, it belongs in scheduling (got "on")',
    ),
    ({"shceduling": {}}, 'shceduling: unknown key, did you mean "scheduling"? (got {})'),
    (
        {"objectives": {"a": {"policy": "relegated"}}},
        "objectives.a.policy: must be 'protect', 'shed' or 'relegate', did you mean 'relegate'?"
        ' (got "relegated")',
    ),
    ({"objectives": {"a": {"weight": 0}}}, "objectives.a.weight: must be a finite number above 0"),
    (
        {"objectives": {"a": {"weight": 1e400}}},
        "objectives.a.weight: must be a finite number above 0",
    ),
    (
        {"objectives": {"a": {"weigth": 2}}},
        'objectives.a.weigth: unknown key, did you mean "weight"? (got 2)',
    ),
]


@pytest.mark.parametrize(("more", "line"), CASES, ids=[line[:60] for _, line in CASES])
def test_what_is_no_mode_is_refused_at_its_path_with_what_was_meant(
    more: dict[str, Any], line: str
) -> None:
    for kind in KINDS.values():
        (found,) = lines({**kind, **more})
        assert found.startswith(line)
