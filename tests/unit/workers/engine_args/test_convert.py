"""`slagate worker convert`: roles and sizes into each other, every change with its reason."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from slagate.router.commands import cli
from slagate.workers.engine_args.convert import Conversion, convert
from slagate.workers.engine_args.yaml_text import engine_configs, read_yaml
from slagate.workers.runtime.usage import UsageError

DECODERS = [name for name in engine_configs() if name.endswith("decode")]


def values_of(name: str) -> dict[str, Any]:
    return read_yaml(Path(name)).values


def changed(conversion: Conversion) -> dict[str, str]:
    assert all(change.why for change in conversion.changes)
    return {change.key: str(change) for change in conversion.changes}


def test_decode_to_agg_as_the_profiler_does_it() -> None:
    before = values_of("deepseek-r1/decode")
    conversion = convert(before, role="decode", to="agg", tp=None)
    assert changed(conversion) == {
        "cache_transceiver_config": (
            '- cache_transceiver_config: {"backend": "UCX", "max_tokens_in_buffer": 16384}'
        ),
        "kv_cache_config.enable_block_reuse": "+ kv_cache_config.enable_block_reuse: true",
        "max_num_tokens": "~ max_num_tokens: 256 -> 8192",
        "enable_chunked_prefill": "+ enable_chunked_prefill: true",
    }
    assert conversion.values["kv_cache_config"]["dtype"] == "fp8"
    assert before == values_of("deepseek-r1/decode")


def test_prefill_to_agg_as_the_profiler_does_it() -> None:
    conversion = convert(values_of("deepseek-r1/prefill"), role="prefill", to="agg", tp=None)
    assert list(changed(conversion)) == [
        "cache_transceiver_config",
        "kv_cache_config.enable_block_reuse",
        "disable_overlap_scheduler",
    ]
    assert conversion.values["kv_cache_config"]["enable_block_reuse"] is False


@pytest.mark.parametrize("name", DECODERS)
def test_decode_to_agg_and_back_is_what_it_was(name: str) -> None:
    before = values_of(name)
    peer = values_of(name.removesuffix("decode") + "prefill")
    agg = convert(before, role="decode", to="agg", tp=None)
    back = convert(agg.values, role="agg", to="decode", tp=None, peer=peer)
    # Chunked prefill does nothing on decode, and a step above the batch neither.
    unused = {"enable_chunked_prefill"}
    if before.get("max_num_tokens", 8192) > 1024:
        unused |= {"max_num_tokens"}
    assert {key: value for key, value in back.values.items() if key not in unused} == {
        key: value for key, value in before.items() if key not in unused
    }


@pytest.mark.parametrize("name", [name for name in engine_configs() if name.endswith("prefill")])
def test_prefill_to_agg_and_back_is_what_it_was(name: str) -> None:
    before = values_of(name)
    peer = values_of(name.removesuffix("prefill") + "decode")
    agg = convert(before, role="prefill", to="agg", tp=None)
    assert convert(agg.values, role="agg", to="prefill", tp=None, peer=peer).values == before


@pytest.mark.parametrize("name", ["deepseek-r1/decode", "deepseek-r1/wide-ep-decode", "qwen3/agg"])
def test_another_tensor_parallel_size_and_back_is_what_it_was(name: str) -> None:
    before = values_of(name)
    n_gpus = before["tensor_parallel_size"]
    role = name.rpartition("/")[2].rpartition("-")[2]
    wider = convert(before, role=role, to=None, tp=n_gpus * 2)
    assert wider.values["tensor_parallel_size"] == n_gpus * 2
    assert convert(wider.values, role=role, to=None, tp=n_gpus).values == before


def test_experts_follow_the_tensor_parallel_size() -> None:
    conversion = convert(values_of("deepseek-r1/wide-ep-prefill"), role="prefill", to=None, tp=5)
    assert conversion.values["moe_expert_parallel_size"] == 5
    assert conversion.values["moe_config"]["load_balancer"]["num_slots"] == 290
    some = {"tensor_parallel_size": 8, "moe_expert_parallel_size": 4, "moe_tensor_parallel_size": 2}
    conversion = convert(some, role="agg", to=None, tp=6)
    assert conversion.values == {"tensor_parallel_size": 6, "moe_expert_parallel_size": 2}


def test_one_gpu_has_no_attention_dp() -> None:
    conversion = convert(values_of("gpt-oss-120b/decode"), role="decode", to=None, tp=1)
    assert "enable_attention_dp" not in conversion.values


def test_a_way_that_there_is_not() -> None:
    with pytest.raises(UsageError, match="--to: from decode to prefill"):
        convert({}, role="decode", to="prefill", tp=None)
    with pytest.raises(UsageError, match="--peer-engine-args: decode needs"):
        convert({}, role="agg", to="decode", tp=None)
    with pytest.raises(UsageError, match="--peer-engine-args: has no cache_transceiver_config"):
        convert({}, role="agg", to="decode", tp=None, peer={"cache_transceiver_config": None})
    with pytest.raises(UsageError, match="--extra-engine-args: E103 tensor_parallel_size"):
        convert({"tensor_parallel_size": 0}, role="decode", to="agg", tp=None)


def ran(*arguments: str) -> tuple[int, str, str]:
    # Opening NIXL sets it for the whole process, and it is a finding.
    ended = CliRunner().invoke(cli, ["worker", "convert", *arguments], env={"UCX_TLS": None})
    return ended.exit_code, ended.stdout, ended.stderr


def test_the_command_explains_and_writes(tmp_path: Path) -> None:
    agg, decode = tmp_path / "agg.yaml", tmp_path / "decode.yaml"
    status, shown, said = ran(
        *("--role", "decode", "--to", "agg", "--extra-engine-args", "deepseek-r1/decode"),
        *("--out", str(agg)),
    )
    assert (status, said) == (0, "")
    assert shown.splitlines()[0].startswith("- cache_transceiver_config")
    assert shown.splitlines()[1] == "      an aggregated worker hands nothing over"
    status, _, said = ran(
        *("--role", "agg", "--to", "decode", "--extra-engine-args", str(agg)),
        *("--peer-engine-args", "deepseek-r1/prefill", "--out", str(decode)),
    )
    assert (status, said) == (0, "")
    assert yaml.safe_load(decode.read_text()) == values_of("deepseek-r1/decode")


def test_a_result_with_errors_is_exit_status_1(tmp_path: Path) -> None:
    file = tmp_path / "decode.yaml"
    file.write_text("moe_config: {backend: WIDEEP}\ntensor_parallel_size: 4\n")
    status, _, said = ran("--role", "agg", "--tp", "8", "--extra-engine-args", str(file))
    assert status == 1
    assert "error: E809" in said


def test_a_misspelt_name_in_the_result_is_told_unless_unknown_ones_are_allowed(
    tmp_path: Path,
) -> None:
    file = tmp_path / "agg.yaml"
    file.write_text("tenser_parallel_size: 4\n")
    arguments = ("--role", "agg", "--tp", "8", "--extra-engine-args", str(file))
    status, _, said = ran(*arguments)
    assert status == 0
    assert "warning: E101 tenser_parallel_size" in said
    status, _, said = ran(*arguments, "--allow-unknown-engine-args")
    assert status == 0
    assert "E101" not in said
