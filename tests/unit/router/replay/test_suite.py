"""Suite files: what they say, what is wrong with one, and the requests of a run."""

import json
import pickle
from collections import Counter
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from slagate.pools.grid.errors import ConfigError
from slagate.router.replay.classes import RequestClass, drawn
from slagate.router.replay.client import Ask
from slagate.router.replay.fleet import IDEAL, REAL, Slow, load_fleet
from slagate.router.replay.policies.registry import NAMES
from slagate.router.replay.suite import Suite, load_suite, parse_suite
from slagate.router.replay.trace import TraceRow, read_rows
from slagate.router.request.metadata import FAIRNESS_ID, SESSION_ID
from slagate.workers.runtime.usage import UsageError

PACKAGED = Path(str(files("slagate.configs"))) / "suites"
LEAST: dict[str, Any] = {
    "traces": ["t.jsonl"],
    "fleets": ["fleets/split.json"],
    "classes": [{"name": "a", "share": 1, "ttft_ms": 1, "itl_ms": 2}],
    "policies": ["prefix"],
    "loads": [1],
    "seeds": [1],
    "requests": 3,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder for a suite, with a trace and two fleets."""
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces" / "t.jsonl").touch()
    (tmp_path / "fleets").symlink_to(PACKAGED / "fleets")
    return tmp_path


def written(folder: Path, **changes: object) -> Path:
    content = {key: value for key, value in {**LEAST, **changes}.items() if value is not None}
    path = folder / "suite.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def load(folder: Path, elsewhere: Path | None = None, **changes: object) -> Suite:
    return load_suite(written(folder, **changes), elsewhere)


def problems(folder: Path, **changes: object) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(folder, **changes)
    return [str(each).replace(str(folder), "FOLDER") for each in caught.value.problems]


def test_what_a_suite_leaves_out_has_a_default(folder: Path) -> None:
    suite = load(folder)
    assert suite.traces == (str(folder / "traces" / "t.jsonl"),)
    assert suite.fleets == (str(folder / "fleets" / "split.json"),)
    assert suite.classes == (RequestClass("a", 1, 1, 2),)
    assert (suite.requests, suite.skip, suite.ideal) == (3, 0, False)
    assert suite.imperfection == REAL
    assert pickle.loads(pickle.dumps(suite)) == suite


def test_everything_that_a_suite_may_say(folder: Path) -> None:
    suite = load(
        folder,
        skip=7,
        loads=[0.5, 2],
        parameters={"mooncake": {"ttft_limit": 0.9}},
        find_rate=0.9,
        slow={"pool": "p4", "factor": 3},
        prediction_noise=0.6,
        ranks={"d1": 8},
        tenants={"a": 4},
        ideal=True,
    )
    slow = Slow("p4", 3, 0.0)
    assert suite.imperfection == IDEAL._replace(slow=slow, prediction_noise=0.6)
    assert suite.parameters == {"mooncake": {"ttft_limit": 0.9}}
    assert (suite.find_rate, suite.ranks, suite.tenants) == (0.9, {"d1": 8}, {"a": 4})


def test_traces_are_looked_for_in_the_folder_given_then_beside_the_suite(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tmp_path_factory.mktemp("other")
    assert load(folder, other).traces == (str(folder / "traces" / "t.jsonl"),)
    (other / "t.jsonl").touch()
    assert load(folder, other).traces == (str(other / "t.jsonl"),)


def test_options_are_the_same_as_a_file(folder: Path) -> None:
    loaded = load(folder)
    content = {**LEAST, "traces": list(loaded.traces), "fleets": list(loaded.fleets)}
    content["classes"] = [each._asdict() for each in loaded.classes]
    assert parse_suite(content, source="the options") == loaded


def test_every_bad_value_is_named_with_its_place(folder: Path) -> None:
    assert problems(
        folder,
        classes=[{"name": "a", "shr": 2}],
        loads=[],
        seeds=[-1],
        requests=None,
        find_rate=2,
        slow={"pool": "p4", "factor": 0, "fro_s": 3},
        prediction_noise=-1,
        ranks={"p1": 9},
        tenants={"a": 0},
        parameters={"mooncake": 1},
        ideal=1,
        slo=3,
    ) == [
        "classes[0].share: is required (got nothing)",
        "classes[0].ttft_ms: is required (got nothing)",
        "classes[0].itl_ms: is required (got nothing)",
        'classes[0].shr: unknown key, did you mean "share"? (got 2)',
        "loads: must not be empty (got [])",
        "seeds[0]: must be at least 0 (got -1)",
        "requests: is required (got nothing)",
        "parameters.mooncake: must be an object (got 1)",
        "find_rate: must be a number above 0, and at most 1 (got 2)",
        "slow.factor: must be a finite number above 0 (got 0)",
        'slow.fro_s: unknown key, did you mean "from_s"? (got 3)',
        "prediction_noise: must be a finite number, 0 or above (got -1)",
        "ranks.p1: must be at most 8 (got 9)",
        "tenants.a: must be at least 1 (got 0)",
        "ideal: must be true or false (got 1)",
        'slo: unknown key, did you mean "slow"? (got 3)',
    ]


def test_names_of_nothing_and_repetitions_are_named(folder: Path) -> None:
    split = "fleets/split.json"
    assert problems(
        folder,
        traces=["x"],
        fleets=["y", split, split],
        classes=[{"name": "a", "share": 0.5, "ttft_ms": 1, "itl_ms": 2}],
        policies=["prefx", "prefix", "prefix"],
        loads=[1, 1.0],
        parameters={"mooncake": {"ttft_limits": 3, "ttft_limit": "x"}, "none": {"a": 1}},
        slow={"pool": "p44", "factor": 2},
        ranks={"p1": 4, "zz": 2},
        tenants={"b": 2},
    ) == [
        'traces[0]: is no file in FOLDER/traces (got "x")',
        'fleets[0]: is no file in FOLDER (got "y")',
        "classes: all shares together must be 1 (got 0.5)",
        'fleets[2]: is there already (got "split")',
        'policies[2]: is there already (got "prefix")',
        "loads[1]: is there already (got 1.0)",
        'policies[0]: is no known policy, did you mean "prefix"? (got "prefx")',
        f'parameters.none: is no known policy; there are {", ".join(NAMES)} (got "none")',
        'tenants.b: is no known class; there are a (got "b")',
        'ranks.zz: is no known pool; there are p4, p1, d4, d1 (got "zz")',
        'slow.pool: is no known pool, did you mean "p4"? (got "p44")',
        'parameters.mooncake: "ttft_limits" is not known, did you mean "ttft_limit"?',
        "parameters.mooncake.ttft_limit: must be a number from 0 on, got 'x'",
    ]


def test_what_is_no_suite_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "suite.json"
    path.write_text("[]", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"\$: must be an object"):
        load_suite(path)
    with pytest.raises(
        UsageError, match="suite 'sla-smal' does not come along; there are sla, sla"
    ):
        load_suite("sla-smal")


# --- the packaged suites ---------------------------------------------------------------------------


def test_small_suite_needs_nothing_but_the_package() -> None:
    suite = load_suite("sla-small")
    assert len(suite.policies) == 7
    assert (suite.requests, suite.loads, suite.seeds) == (400, (1, 2), (1, 2))
    (trace,) = suite.traces
    notes: list[str] = []
    rows = read_rows(trace, skip=0, n_rows=800, note=notes.append)
    assert len(rows) == 2 * suite.requests, "as many again to tune parameters on"
    assert not notes
    page = " ".join((PACKAGED / "traces" / "README.md").read_text().split())
    isl, osl = ([row[at] for row in rows] for at in (2, 3))
    assert f"{len(rows)} requests of the first {round(rows[-1].time_s)} s" in page
    assert f"{sum(isl):,} prompt tokens, {sum(osl):,} output tokens" in page
    assert f"(longest prompt {max(isl):,}, longest output {max(osl):,})" in page


def test_large_suite_names_traces_that_are_elsewhere(tmp_path: Path) -> None:
    named = json.loads((PACKAGED / "sla.json").read_text())
    with pytest.raises(ConfigError, match=r"traces\[0\]: is no file in .*conversation_trace"):
        load_suite("sla")
    for name in named["traces"]:
        (tmp_path / name).touch()
    suite = load_suite("sla", tmp_path)
    assert suite.classes == load_suite(PACKAGED / "sla-small.json").classes
    assert [load_fleet(path).gpus for path in suite.fleets] == [16, 16]


# --- the requests of a run -------------------------------------------------------------------------

ROWS = [TraceRow(n, n * 0.5, 40, 500 * n, (0, n)) for n in range(1, 9)]


def suite(**changes: object) -> Suite:
    classes = [RequestClass("a", 0.5, 1, 2, max_tokens=900), RequestClass("b", 0.5, 3, 4)]
    content = {
        **LEAST,
        "traces": [__file__],
        "fleets": [str(PACKAGED / "fleets" / "split.json")],
        "classes": [each._asdict() for each in classes],
        **changes,
    }
    return parse_suite(content, source="test")


def test_requests_name_the_cap_of_their_class_and_have_the_length_of_the_trace() -> None:
    asks = suite().asks(ROWS, load=2, seed=3)
    assert [ask.arrival_s for ask in asks] == [row * 0.25 for row in range(8)]
    assert [ask.answer_tokens for ask in asks] == [row.osl_tokens for row in ROWS]
    assert {(ask.sla.name, ask.max_tokens) for ask in asks} == {("a", 900), ("b", 2048)}
    assert not any(ask.ignore_eos for ask in asks)
    for ask in asks:
        assert ask.sla == drawn(suite().classes, 3, ask.row.conversation)
        assert (ask.tokens == ask.row.prompt(128_256)).all()


def test_ideal_requests_name_their_length_up_to_the_cap() -> None:
    for ask in suite(ideal=True).asks(ROWS, load=1, seed=3):
        assert ask.max_tokens == ask.answer_tokens == min(ask.row.osl_tokens, ask.sla.max_tokens)
        assert ask.ignore_eos


def test_tenants_are_drawn_for_conversations_and_sent() -> None:
    def sent(ask: Ask) -> tuple[object, object]:
        metadata = dict(ask.metadata())
        return metadata[SESSION_ID], metadata.get(FAIRNESS_ID)

    rows = [TraceRow(n, 0.0, 40, 1, (0, n % 100)) for n in range(300)]
    asks = suite(tenants={"a": 2}).asks(rows, load=1, seed=3)
    assert len({sent(ask) for ask in asks}) == 100, "one tenant for each conversation"
    tenants = Counter((ask.sla.name, sent(ask)[1]) for ask in asks)
    assert set(tenants) == {("a", "a-1"), ("a", "a-2"), ("b", None)}
