"""What is known of the engine's arguments by version, from files by hand and of an installed package."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from slagate.router.commands import cli
from slagate.workers.engine_args.build import build_engine_args
from slagate.workers.engine_args.check import JUDGED_BY_ENGINE
from slagate.workers.engine_args.model.facts import (
    facts_of_version,
    known_versions,
    read_facts,
    renamed,
)
from slagate.workers.engine_args.rules.case import IntendedUse
from slagate.workers.runtime.usage import UsageError
from slagate.workers.trtllm.package import judge_arguments, load_package
from support.engine.installed import installed

VERSIONS = ("1.1", "1.2", "1.3rc", "1.4rc")


def told(*arguments: str) -> tuple[int, str, str]:
    ended = CliRunner().invoke(cli, ["worker", *arguments])
    assert isinstance(ended.exception, SystemExit | None), ended.exception
    return ended.exit_code, ended.stdout, ended.stderr


def test_the_packaged_facts_say_their_version_and_where_they_were_read() -> None:
    assert [one.version for one in known_versions()] == ["1.1", "1.2", "1.3", "1.4"]
    for one in known_versions():
        assert "file id" in one.source
        assert {"model", "kv_cache_config.tokens_per_block"} <= one.fields().keys()


def test_every_new_name_that_is_advised_is_one_of_the_newest_version() -> None:
    newest = known_versions()[-1].fields()
    for advice in renamed().values():
        words = advice.replace(",", "").replace(":", "").split()
        assert any(word in newest for word in words) or words[0] in ("the", "it"), advice


@pytest.mark.parametrize(
    ("version", "facts"), [((1, 3), "1.3"), ((1, 0), "1.1"), ((2, 0), "1.4"), ((1, 2), "1.2")]
)
def test_a_version_without_facts_has_those_of_the_one_before(
    version: tuple[int, int], facts: str
) -> None:
    found = facts_of_version(version)
    assert found is not None
    assert found.version == facts


@pytest.mark.parametrize("version", VERSIONS)
def test_the_facts_of_an_installed_package_are_a_file_that_the_checker_uses(
    version: str, tmp_path: Path
) -> None:
    file, args = tmp_path / "facts.json", tmp_path / "engine.yaml"
    with installed(version):
        assert told("facts", "--out", str(file)) == (0, "", "")
    assert f"tensorrt_llm {version}" in json.loads(file.read_text())["source"]
    args.write_text("enable_sleep: true\nmax_batch_size: [4]\n")
    status, shown, _ = told(
        *("check", "--role", "agg", "--extra-engine-args", str(args), "--json"),
        *("--engine-facts", str(file)),
    )
    found = [json.loads(line) for line in shown.splitlines()]
    assert status == 1
    has_sleep = version == "1.3rc"
    assert ("enable_sleep" in [each["key"] for each in found]) != has_sleep
    assert ("E102", "max_batch_size") in [(each["code"], each["key"]) for each in found]


def test_what_differs_between_two_versions_is_a_line_for_each_field(tmp_path: Path) -> None:
    files = {}
    for version in ("1.3rc", "1.4rc"):
        files[version] = str(tmp_path / version)
        with installed(version):
            told("facts", "--out", files[version])
    status, shown, _ = told("facts", "--diff", *files.values())
    assert status == 0
    assert {"- enable_sleep", "- kv_cache_config.onboard_blocks"} <= set(shown.splitlines())
    assert '+ telemetry_config.disabled: {"default": false, "type": "boolean"}\n' in shown
    assert told("facts", "--diff", "1.3", "1.3")[1] == "nothing differs\n"
    gone = told("facts", "--diff", "1.3", "1.4")[1].splitlines()
    assert "- disable_flashinfer_sampling" in gone
    assert [line for line in gone if line.startswith("~ moe_config.backend: ")]
    assert not [line for line in gone if line.startswith("~ max_batch_size: ")], "only by a hint"


def test_facts_need_to_be_told_what_to_do_and_a_file_that_is_one(tmp_path: Path) -> None:
    assert told("facts")[0] == 2
    assert "versions that are known: 1.1, 1.2, 1.3, 1.4" in told("facts", "--diff", "1.3", "x")[2]
    status, _, said = told("facts", "--out", str(tmp_path / "facts.json"))
    assert (status, "not installed" in said) == (2, True)
    for text in ("[]", "{", '{"version": 1}', '{"version": "1", "source": "", "schema": []}'):
        file = tmp_path / "facts.json"
        file.write_text(text)
        with pytest.raises(UsageError, match="is no file of slagate worker facts"):
            read_facts(str(file), "--engine-facts")


@pytest.mark.parametrize("version", ["1.1", "1.2", "1.3", "1.4"])
@pytest.mark.parametrize("name", ["qwen3/agg", "deepseek-r1/decode", "gpt-oss-120b/prefill"])
def test_a_packaged_configuration_has_no_error_by_the_facts(name: str, version: str) -> None:
    _, _, role = name.partition("/")
    args = build_engine_args(
        role=role,
        cli={},
        extra=Path(name),
        override=None,
        wanted=IntendedUse(facts=read_facts(version, "--engine-version")),
    )
    assert not args.errors


def by_facts(version: str, **values: Any) -> list[tuple[str, str]]:
    problems = read_facts(version, "").problems(values)
    return [(problem.kind, problem.place) for problem in problems]


def test_kinds_of_a_section_have_fields_of_their_own() -> None:
    section = {"decoding_type": "NGram", "max_draft_len": 3, "eagle3_one_model": True}
    assert by_facts("1.4", speculative_config=section) == [
        ("other kind", "speculative_config.eagle3_one_model")
    ]
    assert by_facts("1.4", speculative_config={"max_draft_len": 3}) == [
        ("missing", "speculative_config.decoding_type")
    ]
    assert by_facts("1.4", cuda_graph_config={"batch_sizes": [1, 2]}) == []
    named = {"decoding_type": "Eagle3", "max_draft_len": 3, "speculative_model_dir": "d"}
    assert by_facts("1.4", speculative_config=named) == []


def test_choices_and_mappings() -> None:
    assert by_facts("1.4", cp_config={"cp_type": "helix"}, load_format="DUMMY") == []
    assert by_facts("1.4", kv_cache_config={"use_kv_cache_manager_v2": "maybe"}) == [
        ("choice", "kv_cache_config.use_kv_cache_manager_v2")
    ]
    modes = {"kv_cache": "NONE", "nowhere": "CPU", "model": "DISK"}
    assert by_facts("1.4", sleep_config={"restore_modes": modes}) == [
        ("unknown", "sleep_config.restore_modes.nowhere"),
        ("choice", "sleep_config.restore_modes.model"),
    ]


@pytest.mark.parametrize("version", VERSIONS)
def test_the_installed_package_judges_before_anything_is_loaded(version: str) -> None:
    values: dict[str, Any] = {"model": "m", "kv_cache_config": {"free_gpu_memory_fraction": 1.5}}
    with installed(version):
        package = load_package()
        judge_arguments(package, {"model": "m", "max_batch_size": "16"})
        with pytest.raises(UsageError, match=f"tensorrt_llm {version} says: (?s:.*)fraction"):
            judge_arguments(package, values)
        with pytest.raises(UsageError, match="no_such_argument"):
            judge_arguments(package, {"model": "m", "no_such_argument": 1})
        judge_arguments(package, {"backend": "_autodeploy", "no_such_argument": 1})


def test_what_the_engine_judges_stops_no_start_by_our_facts() -> None:
    args = build_engine_args(
        role="agg", cli={"moe_config": {"backend": "BRAND_NEW"}}, extra=None, override=None
    )
    with pytest.raises(UsageError, match="E104"):
        args.refuse_errors()
    args.refuse_errors(but=JUDGED_BY_ENGINE)


@pytest.mark.parametrize("name", ["a" * 5000, "a\0b"])
def test_a_path_that_no_system_has_is_a_finding_like_any_other(name: str) -> None:
    """Longer than a name may be, or with a character that none may have."""
    cache = {"disk_cache_size": 100, "disk_cache_path": name}
    values = {"kv_cache_config": cache, "moe_config": {"load_balancer": name}}
    args = build_engine_args(role="agg", cli={}, extra=None, override=json.dumps(values))
    assert {"E608", "E802"} <= {finding.code for finding in args.findings}
