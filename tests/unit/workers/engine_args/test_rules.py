"""rules.yaml: what it names is there, what its conditions mean, and a golden case for each of its rules."""

import re
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import yaml

from slagate.workers.engine_args.model.facts import known_versions
from slagate.workers.engine_args.model.merge import leaves
from slagate.workers.engine_args.model.model import EngineModel
from slagate.workers.engine_args.rules.case import EngineCase, IntendedUse
from slagate.workers.engine_args.rules.rule import Rule, rules, value_at
from slagate.workers.engine_args.rules.table import CODES

SAID = Path(__file__).parents[3].joinpath("golden", "engine-args.txt").read_text()


def case_of(**args: Any) -> EngineCase:
    given = frozenset(key for key, _ in leaves(args))
    return EngineCase("agg", EngineModel(args), given, IntendedUse())


def is_said(when: Mapping[str, Any], **args: Any) -> bool:
    """Whether a rule about the number of a batch is one for these arguments."""
    rule = Rule("note E999 max_batch_size", when, "is {value}", "take it out")
    return bool([*rule.check(case_of(**args))])


def names_of(rule: Rule) -> set[str]:
    """Every name in a rule, of its conditions and of its words."""

    def of(conditions: Mapping[str, Any]) -> Iterator[str]:
        for name, wanted in conditions.items():
            yield name
            yield from others(wanted)

    def others(wanted: Any) -> Iterator[str]:
        if isinstance(wanted, list):
            for each in wanted:
                yield from others(each)
        if isinstance(wanted, dict):
            for condition, than in wanted.items():
                if condition == "not":
                    yield from others(than)
                elif condition not in ("names no", "given") and isinstance(than, str):
                    yield than

    words = re.findall(r"\{([\w.]+)", f"{rule.text}{rule.advice}".replace("{others}", ""))
    keys = rule.finding.split()[2:]
    return {*of(rule.when), *of(rule.unless or {}), *words, *keys} - {"value"}


def test_every_name_in_the_rules_is_there() -> None:
    """A name that is nowhere would never be anything but null, and the rule never said."""
    assert len(rules()) > 60
    arguments = {name for facts in known_versions() for name in facts.fields()}
    sections = {name.rpartition(".")[0] for name in arguments}
    case = case_of(speculative_config={"decoding_type": "MTP"}, kv_connector_config={})
    for name in set[str]().union(*map(names_of, rules())) - arguments - sections:
        section, _, last = name.rpartition(".")
        if section not in ("env", "cp_config"):
            assert hasattr(value_at(case, section) if section else case, last) or hasattr(
                case.args, name
            ), name


def test_every_rule_has_a_code_and_a_golden_case_of_each_key() -> None:
    said = " ".join(SAID.split())
    for rule in rules():
        severity, code, *keys = rule.finding.split()
        assert code in CODES
        words = re.sub(r"\\\{.*?\\\}", ".*?", re.escape(rule.text))
        for key in map(re.escape, keys):
            text = rf"({key} {words}|\S+ {words}; the same of {key})"
            found = re.search(rf"({severity}|warning) {code} \w+ {text}", said)
            assert found, f"{rule.finding}: {rule.text}"


def test_libyaml_and_pyyaml_read_the_same_rules() -> None:
    file = resources.files("slagate.workers.engine_args.rules").joinpath("rules.yaml")
    assert [Rule(**each) for each in yaml.safe_load(file.read_text())] == [*rules()]


@pytest.mark.parametrize(
    ("when", "fits", "does_not_fit"),
    [
        ({"value": 4}, {"max_batch_size": 4}, {"max_batch_size": 5}),
        ({"max_seq_len": None}, {}, {"max_seq_len": 4}),
        ({"dtype": "auto"}, {}, {"dtype": "bfloat16"}),
        ({"dtype": "b*16"}, {"dtype": "bfloat16"}, {"dtype": "auto"}),
        ({"model": "?*"}, {"model": "m"}, {}),
        ({"value": [1, {"above": 7}]}, {"max_batch_size": 1}, {"max_batch_size": 7}),
        ({"value": {"above": 1, "below": 3}}, {"max_batch_size": 2}, {"max_batch_size": 3}),
        ({"max_seq_len": {"above": 1}}, {"max_seq_len": 2}, {}),
        ({"value": {"above": "max_seq_len"}}, {"max_seq_len": 4}, {}),
        ({"value": {"other than": "max_seq_len"}}, {"max_seq_len": 4}, {"max_seq_len": 2048}),
        ({"value": {"no multiple of": "max_seq_len"}}, {"max_seq_len": 3}, {"max_seq_len": 4}),
        ({"model": {"not": [None, "a"]}}, {"model": "b"}, {"model": "a"}),
        ({"kv_cache_config": {"given": False}}, {}, {"kv_cache_config": {"dtype": "fp8"}}),
        ({"model": {"names no": "folder"}}, {"model": __file__}, {}),
        ({"model": {"names no": "file"}}, {"model": "/nowhere"}, {"model": __file__}),
        ({"dwdp_config.dwdp_size": 1}, {"dwdp_config": {}}, {}),
        ({"role": "agg", "value": 4}, {"max_batch_size": 4}, {"max_batch_size": 5}),
    ],
)
def test_a_condition_means_what_the_file_says(
    when: dict[str, Any], fits: dict[str, Any], does_not_fit: dict[str, Any]
) -> None:
    assert is_said(when, **fits)
    assert not is_said(when, **does_not_fit)
