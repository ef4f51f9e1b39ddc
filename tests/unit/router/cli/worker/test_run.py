"""`slagate worker`: `sim` and `trtllm` run a worker, each with options of its own; `check` only looks."""

import json
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command
from typer.testing import CliRunner

from slagate.router.cli.worker import run as worker_cli
from slagate.router.cli.worker.launch import LaunchOptions
from slagate.router.commands import cli


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["sim", "--listen", "127.0.0.1:0", "--insecure"], "Missing option '--role'"),
        (["sim", "--role", "agg", "--insecure"], "Missing option '--listen'"),
        (["sim", "--role", "agg", "--listen", "127.0.0.1:0"], "--tls-cert"),
        (["sim", "--role", "agg", "--listen", "nowhere"], "--listen"),
        (["vllm", "--role", "agg"], "vllm"),
        (["chek"], "chek"),
        ([], "sim"),
    ],
)
def test_a_wrong_call_of_the_group_is_a_usage_error(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(cli, ["worker", *arguments])
    assert result.exit_code == 2
    assert said in result.output


def printed(*arguments: str) -> tuple[int, str, str]:
    ended = CliRunner().invoke(cli, ["worker", "trtllm", "--print-engine-args", *arguments])
    return ended.exit_code, ended.stdout, ended.stderr


def test_engine_arguments_are_printed_with_their_sources_as_yaml(tmp_path: Path) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text("kv_cache_config:\n  dtype: fp8\n  free_gpu_memory_fraction: 0.8\n")
    status, shown, said = printed(
        *("--role", "agg", "--tp", "4", "--model", "Qwen/Qwen3-32B"),
        *("--extra-engine-args", str(file)),
        *("--override-engine-args", '{"kv_cache_config": {"free_gpu_memory_fraction": 0.7}}'),
    )
    assert status == 0
    assert "slagate: error" not in said
    assert yaml.safe_load(shown) == {
        "backend": "pytorch",
        "enable_iter_perf_stats": True,
        "model": "Qwen/Qwen3-32B",
        "tensor_parallel_size": 4,
        "scheduler_config": {"capacity_scheduler_policy": "GUARANTEED_NO_EVICT"},
        "kv_cache_config": {
            "dtype": "fp8",
            "free_gpu_memory_fraction": 0.7,
            "event_buffer_max_size": 100_000,
        },
        "num_postprocess_workers": 0,
        "telemetry_config": {"disabled": True},
    }
    sources = dict(line.strip().split("  # ") for line in shown.splitlines() if "  # " in line)
    by_value = {value.strip(): source for value, source in sources.items()}
    assert by_value["dtype: fp8"] == f"--extra-engine-args {file}:2"
    assert by_value["free_gpu_memory_fraction: 0.7"] == "--override-engine-args"
    assert by_value["tensor_parallel_size: 4"] == "command line"
    assert by_value["backend: pytorch"] == "default"


def test_printing_shows_what_is_wrong_and_still_ends_well() -> None:
    status, shown, said = printed("--role", "prefill", "--override-engine-args", '{"x": 1}')
    assert status == 0
    assert "x: 1" in shown
    assert "slagate: note: E101 x" in said


def test_defaults_of_the_simulated_engine_are_not_the_engines() -> None:
    _, shown, _ = printed("--role", "agg")
    assert not yaml.safe_load(shown).keys() & {"max_batch_size", "max_seq_len", "stream_interval"}


@pytest.mark.parametrize("option", [("--extra-engine-args", "qwen3/agg"), ("--print-engine-args",)])
def test_engine_arguments_are_refused_for_the_simulated_engine(option: tuple[str, ...]) -> None:
    result = CliRunner().invoke(cli, ["worker", "sim", "--role", "agg", *option])
    assert result.exit_code == 2
    assert f"No such option: {option[0]}" in result.stderr


@pytest.mark.parametrize(
    ("installed", "options", "severity"),
    [
        (None, (), "warning"),
        (None, ("--engine-version", "1.3.0rc22"), ""),
        ("1.2.1", (), "error"),
        ("1.3.0rc4", (), ""),
        ("1.3.0rc4", ("--engine-version", "1.2"), "error"),
        ("0+unknown", (), "warning"),
    ],
)
@pytest.mark.parametrize("command", [("worker", "check"), ("worker", "trtllm")])
def test_engine_07_goes_by_the_version_that_is_installed_or_said(
    command: tuple[str, ...],
    installed: str | None,
    options: tuple[str, ...],
    severity: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text(
        "max_seq_len: 8192\ncache_transceiver_config: {backend: UCX, max_tokens_in_buffer: 8192}\n"
    )

    def version(name: str) -> str:
        if installed is None or name != "tensorrt_llm":
            raise PackageNotFoundError(name)
        return installed

    monkeypatch.setattr("importlib.metadata.version", version)
    show = () if "check" in command else ("--print-engine-args",)
    arguments = ("--role", "prefill", "--extra-engine-args", str(file), *options, *show)
    ended = CliRunner().invoke(cli, [*command, *arguments])
    assert ended.exit_code == int(severity == "error" and not show)
    assert ("E206" in ended.output) == bool(severity)
    assert severity in ended.output


def test_whatever_sets_an_engine_argument_is_an_option_of_both_commands(tmp_path: Path) -> None:
    worker: Any = get_command(worker_cli.worker)
    for command in (worker.commands["trtllm"], worker.commands["check"]):
        assert LaunchOptions().table["places"].keys() <= {
            parameter.name for parameter in command.params
        }
    file = tmp_path / "engine.yaml"
    file.write_text("pipeline_parallel_size: 2\n")
    given = ("--pipeline-parallel-size", "4", "--enable-attention-dp", "--kv-block-size", "7")
    status, shown, _ = checked("--extra-engine-args", str(file), *given, "--json")
    assert status == 0
    assert [json.loads(line)["code"] for line in shown.splitlines()] == ["E107", "E103", "E402"]


@pytest.mark.parametrize(
    ("typed", "option"),
    [
        ("--engine sim --role agg --listen 127.0.0.1:0 --insecure", "--engine"),
        ("--engine=trtllm --role agg --model m --listen 127.0.0.1:0 --insecure", "--engine"),
        ("--role agg --listen 127.0.0.1:0 --insecure", "--role"),
        ("--role agg check", "--role"),
    ],
)
def test_options_before_the_engine_are_refused_and_both_engines_named(
    typed: str, option: str
) -> None:
    result = CliRunner().invoke(cli, ["worker", *typed.split()])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        f"slagate: {option}: options come after the engine, which is a command:"
        " slagate worker sim OPTIONS, or slagate worker trtllm OPTIONS\n"
    )


def test_each_engine_has_options_of_its_own() -> None:
    worker: Any = get_command(worker_cli.worker)
    sim, trtllm = (
        {option for parameter in worker.commands[name].params for option in parameter.opts}
        for name in ("sim", "trtllm")
    )
    assert {"--profile", "--time-scale", "--transport", "--api"} <= sim - trtllm
    assert {"--kv-block-size", "--extra-engine-args", "--warm-up-timeout"} <= trtllm - sim
    assert {"--role", "--listen", "--tls-cert", "--drain", "--model", "--tp"} <= sim & trtllm


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "--role is missing: prefill, decode, agg or encode"),
        (["--role", "agg"], "--listen is missing: HOST:PORT"),
        (["--role", "agg", "--listen", "127.0.0.1:0", "--insecure"], "--model is missing"),
    ],
)
def test_what_a_worker_with_tensorrt_llm_needs_is_asked_for_once_that_is_there(
    given: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_cli, "check_installed", lambda: None)
    result = CliRunner().invoke(cli, ["worker", "trtllm", *given])
    assert result.exit_code == 2
    assert said in result.stderr


def checked(*arguments: str) -> tuple[int, str, str]:
    ended = CliRunner().invoke(cli, ["worker", "check", "--role", "agg", *arguments])
    return ended.exit_code, ended.stdout, ended.stderr


def test_a_check_says_what_where_and_what_to_do(tmp_path: Path) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text("# comment\ndtype: fp8\ndisable_overlap_scheduler: true\n")
    status, shown, _ = checked("--extra-engine-args", str(file))
    assert status == 0
    assert shown.splitlines()[0] == f"warning E609  agg  dtype (--extra-engine-args {file}:2)"
    assert "      Fix: use one of auto, bfloat16" in shown
    assert ".\nnote E207  agg  disable_overlap_scheduler is true: steps wait" in shown
    assert shown.splitlines()[-1] in ("1 warning, 1 note", "1 note, 1 warning")
    assert checked("--extra-engine-args", str(file), "--strict")[0] == 1
    status, shown, _ = checked("--extra-engine-args", str(file), "--strict", "--ignore", "e609")
    assert (status, shown.splitlines()[-1]) == (0, "1 note (1 ignored)")


def test_a_finding_of_a_pair_says_where_both_sides_have_it(tmp_path: Path) -> None:
    files = {role: tmp_path / f"{role}.yaml" for role in ("prefill", "decode")}
    for role, file in files.items():
        file.write_text(f"kv_cache_config:\n  dtype: {'fp8' if role == 'decode' else 'auto'}\n")
    arguments = ("--role", "prefill", "--extra-engine-args", str(files["prefill"]))
    ended = CliRunner().invoke(
        cli, ["worker", "check", *arguments, "--peer-engine-args", str(files["decode"]), "--json"]
    )
    (found,) = [
        each for line in ended.stdout.splitlines() if (each := json.loads(line))["of"] == "pair"
    ]
    assert found["source"] == (
        f"prefill: --extra-engine-args {files['prefill']}:2; "
        f"decode: --peer-engine-args {files['decode']}:2"
    )
    arguments = ("--role", "prefill", "--extra-engine-args", "deepseek-r1/prefill")
    files["decode"].write_text("max_batch_size: 0\n")
    ended = CliRunner().invoke(
        cli, ["worker", "check", *arguments, "--peer-engine-args", str(files["decode"])]
    )
    assert f"max_batch_size (--peer-engine-args {files['decode']}:1)" in ended.stdout


def test_a_finding_says_where_a_section_is_and_what_was_taken_out(tmp_path: Path) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text(
        "backend: _autodeploy\ntensor_parallel_size: 4\nattention_dp_config:\n  timeout_iters: 5\n"
        "build_config:\n  max_batch_size: 4\nspeculative_config:\n  max_draft_len: 3\n"
    )
    _, shown, _ = checked("--extra-engine-args", str(file), "--json")
    found = [json.loads(line) for line in shown.splitlines()]
    assert {
        each["key"]: each["source"].removeprefix(f"--extra-engine-args {file}:") for each in found
    } == {
        "backend": "1",
        "build_config": "5",
        "attention_dp_config": "3",
        "speculative_config.decoding_type": "7",
    }
    file.write_text("attention_dp_config:\n  timeout_iters: 5\n")
    _, shown, _ = checked("--extra-engine-args", str(file), "--json")
    assert json.loads(shown)["source"] == f"--extra-engine-args {file}:1"
    # What nobody wrote is nowhere.
    connector = dict.fromkeys(("module", "scheduler_class", "worker_class"), "kvbm")
    override = {
        "kv_connector_config": {f"connector_{name}": value for name, value in connector.items()}
    }
    _, shown, _ = checked("--override-engine-args", json.dumps(override), "--json")
    found = [json.loads(line) for line in shown.splitlines()]
    assert [(each["code"], each["source"]) for each in found] == [("E607", "")]


def test_a_check_needs_something_to_check() -> None:
    status, _, said = checked()
    assert status == 2
    assert "--extra-engine-args is missing" in said
