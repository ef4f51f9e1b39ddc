"""A build spec: everything that is wrong with it at once, each with its path."""

import copy
import json
from typing import Any

import pytest

from slagate.pools.grid.errors import ConfigError
from slagate.pools.grid_build.build import build_fleet
from slagate.pools.grid_build.spec import parse_spec

AXIS = {"min": 0, "max": 4000, "resolution": 2}
TARGETS = {"min": 100, "max": 500, "resolution": 2}
SPEC: dict[str, Any] = {
    "prefill": {
        "isl": AXIS,
        "ttft_ms": TARGETS,
        "pools": [{"name": "p0", "ttft_curve": [[0, 50], [1000, 100]]}],
    },
    "decode": {
        "context_length": AXIS,
        "itl_ms": TARGETS,
        "pools": [{"name": "d0", "tp": 1, "profile": "llama-3.1-8b-h100"}],
    },
}


def problems(content: object) -> list[str]:
    text = content if isinstance(content, str) else json.dumps(content)
    with pytest.raises(ConfigError) as caught:
        build_fleet(parse_spec(text, "spec"), "spec")
    return [str(problem) for problem in caught.value.problems]


def changed(path: str, value: object) -> dict[str, Any]:
    content: Any = copy.deepcopy(SPEC)
    *parents, last = (int(part) if part.isdigit() else part for part in path.split("."))
    place = content
    for part in parents:
        place = place[part]
    place[last] = value
    return content  # type: ignore[no-any-return]


CASES = [
    ("mode", "both", 'mode: must be "disagg" or "agg" (got "both")'),
    ("utilisation", 1.0, "utilisation: must be below 1 (got 1.0)"),
    ("margin", -0.1, "margin: must be at least 0 (got -0.1)"),
    ("utilization", 0.5, 'utilization: unknown key, did you mean "utilisation"? (got 0.5)'),
    ("prefill.isl.max", 0, "prefill.isl.max: must be above min, which is 0 (got 0)"),
    ("prefill.isl.min", -1, "prefill.isl.min: must be at least 0 (got -1)"),
    ("prefill.isl.resolution", 0, "prefill.isl.resolution: must be at least 1 (got 0)"),
    ("prefill.isl.resolution", True, "prefill.isl.resolution: must be an integer (got true)"),
    (
        "prefill.isl.edges",
        [0, 5],
        "prefill.isl.min: does not go together with edges (got 0)",
    ),
    ("prefill.isl", {"edges": [0, 5, 5]}, "prefill.isl.edges[2]: must be above the one before, 5"),
    ("prefill.isl", {"edges": [7]}, "prefill.isl.edges: must have at least 2 entries (got [7])"),
    ("prefill.isl", {"max": 5}, "prefill.isl.min: is required without edges (got nothing)"),
    ("prefill.isl.max", 1e308, "prefill.isl.max: must be at most 2147483647 (got 1e+308)"),
    ("decode.itl_ms.max", 1e308, "decode.itl_ms.max: must be at most 2147483647 (got 1e+308)"),
    (
        "decode.context_length",
        {"edges": [0, 9, 2**31]},
        "decode.context_length.edges[2]: must be at most 2147483647 (got 2147483648)",
    ),
    ("prefill.pools", [], "prefill.pools: must not be empty (got [])"),
    (
        "prefill.pools.0.ttft_curve",
        [[100, 50]],
        "prefill.pools[0].ttft_curve: must have at least 2 points (got [[100, 50]])",
    ),
    (
        "traffic",
        {"service_variability": "x"},
        'traffic.service_variability: must be a number (got "x")',
    ),
    ("utilisation", [], "utilisation: must be a number (got [])"),
    ("objectives", [], "objectives: must be an object (got [])"),
    ("prefill.pools.0.name", "", "prefill.pools[0].name: must not be empty"),
    ("decode.pools.0.name", "p0", "decode.pools[0].name: is the name of prefill.pools[0] already"),
    ("prefill.pools.0.profile", "x", "prefill.pools[0].ttft_curve: does not go together"),
    ("prefill.pools.0.itl_curve", [[0, 1]], "prefill.pools[0].itl_curve: says nothing of a pool"),
    ("prefill.pools.0.ttft_curve", [[0, 1], [0, 2]], "prefill.pools[0].ttft_curve[1]: must be"),
    ("prefill.pools.0.ttft_curve", [[0]], "prefill.pools[0].ttft_curve[0]: must be a pair"),
    ("prefill.pools.0.ttft_curve", [], "prefill.pools[0].ttft_curve: must have at least 2"),
    ("prefill.pools.0.workers", ["a"], "prefill.pools[0].workers[0]: must be host:port"),
    ("prefill.pools.0.cost", 0, "prefill.pools[0].cost: must be above 0"),
    (
        "decode.pools.0",
        {"name": "d", "profile": "llama-3.1-8b-h100"},
        "decode.pools[0].tp: is required with profile (got nothing)",
    ),
    ("decode.pools.0", {"name": "d"}, "decode.pools[0].itl_curve: is required without profile"),
    ("decode.pools.0.profile", "nope", "decode.pools[0].profile: profile 'nope' is not packaged"),
    (
        "decode.pools.0.profile",
        "no/tensor-parallel size.json",
        "decode.pools[0].profile: profile no/tensor-parallel size.json: No such file",
    ),
    ("decode.pools.0.tp", 3, "decode.pools[0].tp: profile llama-3.1-8b-h100: no tensor-parallel"),
    (
        "decode.pools.0",
        {**SPEC["decode"]["pools"][0], "replicas": 2, "workers": ["h:1"]},
        "decode.pools[0].replicas: must be 1, the number of workers, or left out (got 2)",
    ),
    ("scheduling", {"spil": "any"}, 'scheduling.spil: unknown key, did you mean "spill"?'),
    ("scheduling", {"admission": "onn"}, "scheduling.admission: must be 'off', 'shadow' or 'on'"),
    ("objectives", {"*": {"ttft": 5}}, 'objectives["*"].ttft: unknown key'),
]


@pytest.mark.parametrize(("path", "value", "message"), CASES, ids=[c[2][:40] for c in CASES])
def test_one_thing_wrong_is_one_problem(path: str, value: object, message: str) -> None:
    found = problems(changed(path, value))
    assert any(line.startswith(message) for line in found), found


def test_all_problems_come_at_once() -> None:
    content = changed("utilisation", 2)
    content["prefill"]["isl"] = {"min": 5, "max": 1, "resolution": 0}
    content["decode"]["pools"].append({"name": "p0"})
    paths = [line.split(": ")[0] for line in problems(content)]
    assert sorted(paths) == [
        "decode.pools[1].itl_curve",
        "decode.pools[1].name",
        "prefill.isl.max",
        "prefill.isl.resolution",
        "utilisation",
    ]


def test_profiles_are_looked_at_whatever_else_is_wrong() -> None:
    """Also of pools that share a name, and where the size is wrong by itself."""
    content = changed("utilisation", 2)
    qwen = "qwen3-32b-fp8-h200"
    content["decode"]["pools"] = [
        {"name": "d", "tp": 1, "profile": "nope"},
        {"name": "d", "tp": 3, "profile": qwen, "cost": 0},
        {"name": "e", "tp": 0, "profile": qwen},
        {"name": "f", "tp": True, "profile": 7},
    ]
    paths = [line.split(": ")[0] for line in problems(content)]
    assert sorted(paths) == [
        "decode.pools[0].profile",
        "decode.pools[1].cost",
        "decode.pools[1].name",
        "decode.pools[1].tp",
        "decode.pools[2].tp",
        "decode.pools[3].profile",
        "decode.pools[3].tp",
        "utilisation",
    ]


def test_what_is_no_spec_at_all() -> None:
    assert problems("[]") == ["$: must be an object (got [])"]
    assert problems("{")[0].startswith("$: is not JSON")
    assert "prefill: is required (got nothing)" in problems("{}")
    assert "margin: is given more than once, keep one" in problems(
        json.dumps(SPEC)[:-1] + ', "margin": 0, "margin": 0.1}'
    )
    assert "mode: must be" in problems({**SPEC, "mode": None})[0]


def test_an_agg_grid_without_sizes_needs_a_typical_prompt() -> None:
    stage = {"ttft_ms": TARGETS, "itl_ms": TARGETS}
    stage["pools"] = [{"name": "a", "tp": 1, "profile": "llama-3.1-8b-h100"}]  # type: ignore[assignment]
    assert problems({"mode": "agg", "agg": stage}) == [
        "agg.isl: is required without traffic.isl (got nothing)"
    ]
