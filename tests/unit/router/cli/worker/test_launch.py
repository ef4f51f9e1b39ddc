"""Launch options of Dynamo's worker and of trtllm-serve, and their variables: what becomes of each."""

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from slagate.router.cli.worker.launch import LaunchOptions
from slagate.router.commands import cli
from slagate.workers.engine_args.model.facts import known_versions

PAGE = (Path(__file__).parents[5] / "docs" / "from-dynamo.md").read_text()
ROLE = ("--role", "agg")


class Printed:
    """What `slagate worker trtllm --print-engine-args` printed."""

    def __init__(self, *options: str, variables: Mapping[str, str] | None = None) -> None:
        command = ["worker", "trtllm", "--print-engine-args", *options]
        ended = CliRunner().invoke(cli, command, env=variables)
        self.status, self.said, self.shown = ended.exit_code, ended.stderr, ended.stdout
        self.values: dict[str, Any] = yaml.safe_load(ended.stdout) or {}

    def value(self, dotted: str) -> Any:
        """The value at a dotted key. Raises `KeyError`."""
        value: Any = self.values
        for key in dotted.split("."):
            value = value[key]
        return value

    def source(self, key: str) -> str:
        """Where the last part of a dotted key came from."""
        indent, name = "  " * key.count("."), key.rpartition(".")[2]
        (source,) = re.findall(rf"^{indent}{name}:.*?  # (.*)$", self.shown, re.MULTILINE)
        return str(source)


TAKEN: list[tuple[str, str, Any]] = [
    ("--model-path Qwen/Q", "model", "Qwen/Q"),
    ("--kv-block-size 64", "kv_cache_config.tokens_per_block", 64),
    ("--max-beam-width 2", "max_beam_width", 2),
    ("--load-format dummy", "load_format", "dummy"),
    ("--tp_size 2", "tensor_parallel_size", 2),
    ("--tp-size=2", "tensor_parallel_size", 2),
    ("--ep_size 4", "moe_expert_parallel_size", 4),
    ("--max_batch_size 8", "max_batch_size", 8),
    ("--kv_cache_free_gpu_memory_fraction 0.5", "kv_cache_config.free_gpu_memory_fraction", 0.5),
    ("--kv_cache_dtype fp8", "kv_cache_config.dtype", "fp8"),
    ("--custom_tokenizer deepseek_v32", "custom_tokenizer", "deepseek_v32"),
    ("--hf_revision main", "revision", "main"),
    ("--context-length 4096", "max_seq_len", 4096),
    ("--trust_remote_code", "trust_remote_code", True),
    ("--no-enable-attention-dp", "enable_attention_dp", False),
    ("--trtllm.kv_cache_config.dtype fp8", "kv_cache_config.dtype", "fp8"),
    ("--trtllm.kv_cache_config.tokens_per_block=64", "kv_cache_config.tokens_per_block", 64),
    ("--trtllm.enable_chunked_prefill True", "enable_chunked_prefill", True),
    ("--trtllm.max_seq_len 4096", "max_seq_len", 4096),
    ("--trtllm.cuda_graph_config null", "cuda_graph_config", None),
    ("--trtllm.cuda_graph_config.batch_sizes [1,2]", "cuda_graph_config.batch_sizes", [1, 2]),
]  # fmt: skip


@pytest.mark.parametrize(("options", "key", "value"), TAKEN, ids=[each[0] for each in TAKEN])
def test_an_option_sets_an_engine_argument(options: str, key: str, value: Any) -> None:
    printed = Printed(*ROLE, *options.split())
    assert (printed.status, printed.value(key)) == (0, value)
    option = options.split()[0].partition("=")[0]
    expected = option if option.startswith("--trtllm.") else "command line"
    assert printed.source(key) == expected


ANSWERED = [
    ("--publish-events-and-metrics", "note", "always publishes"),
    ("--publish-kv-events", "note", "always publishes"),
    ("--use-kv-events", "note", "always publishes"),
    ("--publish-metrics", "note", "always publishes"),
    ("--no-publish-metrics", "note", "always publishes"),
    ("--fail_fast_on_attention_window_too_large", "note", "without effect"),
    ("--no-publish-kv-events", "warning", "--kv-events 0"),
    ("--no-kv-events", "warning", "--kv-events 0"),
    ("--connector none", "note", "without effect"),
    ("--connector", "note", "without effect"),
    ("--connector kvbm", "error", "kv_connector_config"),
    ("--connector kvbm nixl", "error", "kv_connector_config"),
    ("--endpoint dyn://a.b.c", "warning", "fleet file"),
    ("--namespace x", "warning", "fleet file"),
    ("--discovery-backend file", "warning", "fleet file"),
    ("--store-kv file", "warning", "fleet file"),
    ("--request-plane nats", "warning", "gRPC"),
    ("--event-plane zmq", "warning", "gRPC"),
    ("--durable-kv-events", "warning", "broker"),
    ("--modality text", "note", "without effect"),
    ("--modality multimodal", "warning", "UNIMPLEMENTED"),
    ("--modality video_diffusion", "error", "language models only"),
    ("--modality smells", "error", "text or multimodal"),
    ("--enable-multimodal", "warning", "UNIMPLEMENTED"),
    ("--allowed-local-media-path /tmp", "warning", "UNIMPLEMENTED"),
    ("--max-file-size-mb 50", "warning", "UNIMPLEMENTED"),
    ("--encode-endpoint dyn://a.b.c", "warning", "UNIMPLEMENTED"),
    ("--multimodal-embedding-cache-capacity-gb 10", "warning", "UNIMPLEMENTED"),
    ("--media-output-fs-url file:///tmp", "error", "language models only"),
    ("--dyn-tool-call-parser hermes", "warning", "token ids"),
    ("--dyn-reasoning-parser qwen3", "warning", "token ids"),
    ("--custom-jinja-template t.jinja", "warning", "token ids"),
    ("--conversation-affinity", "warning", "the gateway picks"),
    ("--model-loader-extra-config {}", "error", "gms_config"),
    ("--router-kv-events", "warning", "docs/routing.md"),
    ("--router-mode kv", "warning", "docs/routing.md"),
    ("--use-nixl-connect", "warning", "cache_transceiver_config"),
    ("--host 0.0.0.0", "error", "--listen HOST:PORT"),
    ("--port 8000", "error", "--listen HOST:PORT"),
    ("--tcp-tls-cert-path c.pem", "error", "--tls-cert"),
    ("--engine-request-limit 8", "warning", "max_inflight"),
    ("--quant-algo FP8", "warning", "diffusion"),
]


@pytest.mark.parametrize(("options", "kind", "word"), ANSWERED, ids=[a[0] for a in ANSWERED])
def test_an_option_is_answered_with_what_to_use_here(options: str, kind: str, word: str) -> None:
    printed = Printed(*ROLE, *options.split())
    assert printed.status == (2 if kind == "error" else 0)
    (line,) = printed.said.splitlines()
    assert line.startswith(f"slagate: {kind}: {options.split()[0]}: ")
    assert word in line


def test_an_empty_value_is_an_option_that_was_not_given() -> None:
    printed = Printed(
        *ROLE, "--encode-endpoint", "", "--model-loader-extra-config=", "--model-path", ""
    )
    assert (printed.status, printed.said) == (0, "")


def test_options_with_one_answer_share_a_line_and_every_error_is_told_at_once() -> None:
    planes = ("--request-plane", "nats", "--host", "h", "--store-kv", "file")
    lines = Printed(*planes, "--connector", "kvbm").said.splitlines()
    assert [
        re.findall("--[a-z-]+", line.partition(": ")[2].rpartition(": ")[0]) for line in lines
    ] == [
        ["--request-plane", "--store-kv"],
        ["--host"],
        ["--connector"],
    ]


@pytest.mark.parametrize(
    ("options", "role"),
    [
        ("--disaggregation-mode prefill", "prefill"),
        ("--disaggregation-mode=decode", "decode"),
        ("--disaggregation-mode agg", "agg"),
        ("--disaggregation-mode aggregated", "agg"),
        ("--disaggregation-mode pd", "agg"),
        ("--disaggregation-mode prefill_and_decode", "agg"),
        ("--disaggregation-mode encode", "encode"),
        ("--server_role context", "prefill"),
        ("--server_role generation", "decode"),
        ("--server_role CONTEXT", "prefill"),
        ("--server_role MM_ENCODER", "encode"),
    ],
)
def test_each_spelling_of_a_role_is_taken(options: str, role: str) -> None:
    file = ("--extra-engine-args", "qwen3/prefill", "--json")
    ended = CliRunner().invoke(cli, ["worker", "check", *options.split(), *file])
    said = CliRunner().invoke(cli, ["worker", "check", "--role", role, *file])
    assert (ended.exit_code, ended.stdout) == (said.exit_code, said.stdout)


def test_an_unknown_mode_is_refused_with_those_there_are() -> None:
    printed = Printed("--disaggregation-mode", "both")
    assert printed.status == 2
    assert (
        "--disaggregation-mode must be one of agg, aggregated, pd, prefill_and_decode"
        in printed.said
    )


def test_variables_set_what_the_command_line_does_not() -> None:
    variables = {
        "DYN_TRTLLM_DISAGGREGATION_MODE": "pd",
        "DYN_TRTLLM_MODEL": "Qwen/Q",
        "DYN_TRTLLM_TENSOR_PARALLEL_SIZE": "4",
        "DYN_TRTLLM_MAX_BATCH_SIZE": "8",
        "DYN_TRTLLM_MAX_BEAM_WIDTH": "2",
        "DYN_TRTLLM_ENABLE_ATTENTION_DP": "true",
        "DYN_TRTLLM_OVERRIDE_ENGINE_ARGS": '{"max_seq_len": 512}',
        "DYN_TRTLLM_EXTRA_ENGINE_ARGS": "qwen3/agg",
        "DYN_TRTLLM_PUBLISH_KV_EVENTS": "1",
        "DYN_TRTLLM_ENCODE_ENDPOINT": "",
    }
    printed = Printed("--max-batch-size", "32", variables=variables)
    assert printed.status == 0
    assert "note: DYN_TRTLLM_PUBLISH_KV_EVENTS: a worker always publishes" in printed.said
    assert "is 32 on the command line, and 16 by DYN_TRTLLM_EXTRA_ENGINE_ARGS" in printed.said
    assert "is 4 by DYN_TRTLLM_TENSOR_PARALLEL_SIZE, and 1 by" in printed.said
    sources = {
        "model": "DYN_TRTLLM_MODEL",
        "max_beam_width": "DYN_TRTLLM_MAX_BEAM_WIDTH",
        "enable_attention_dp": "DYN_TRTLLM_ENABLE_ATTENTION_DP",
        "max_seq_len": "DYN_TRTLLM_OVERRIDE_ENGINE_ARGS",
    }
    assert {key: printed.source(key) for key in sources} == sources
    assert printed.source("max_batch_size").startswith("DYN_TRTLLM_EXTRA_ENGINE_ARGS qwen3/agg:")
    counted = Printed(*ROLE, "--max-beam-width", "3", "--tp", "2", variables=variables)
    assert (counted.value("max_beam_width"), counted.source("max_beam_width")) == (
        3,
        "command line",
    )


@pytest.mark.parametrize(
    ("variables", "status", "word"),
    [
        ({"DYN_TRTLLM_MAX_BATCH_SIZE": "many"}, 2, "DYN_TRTLLM_MAX_BATCH_SIZE"),
        ({"DYN_TRTLLM_OVERRIDE_ENGINE_ARGS": "{"}, 2, "is not JSON"),
        ({"DYN_TRTLLM_MODALITY": "image_diffusion"}, 2, "DYN_TRTLLM_MODALITY: this worker"),
        ({"DYN_TRTLLM_ENABLE_MULTIMODAL": "false"}, 0, ""),
        ({"DYN_CONNECTOR": "kvbm"}, 2, "DYN_CONNECTOR: put it into kv_connector_config"),
        ({"DYN_CONNECTOR": "none"}, 0, "note: DYN_CONNECTOR: without effect"),
        (
            {"DYN_REQUEST_PLANE": "nats", "NATS_SERVER": "nats://n"},
            0,
            "PLANE, NATS_SERVER: the gateway",
        ),
        ({"DYN_DEFAULT_THINKING_MODE": "on"}, 0, "token ids"),
        ({"DYN_ENGINE_CONV_AFFINITY": "true"}, 0, "the gateway picks the attention-DP rank"),
        ({"DYN_ENGINE_CONV_AFFINITY": "false"}, 0, ""),
        ({"DYN_SYSTEM_PORT": "9090"}, 0, "DYN_SYSTEM_PORT: use --metrics-listen"),
        ({"DYN_NAMESPACE": "", "DYN_KVBM_CPU_CACHE_GB": "4", "NATS_SERVICE_HOST": "n"}, 0, ""),
        ({"DYN_TRTLLM_ENABLE_MULTIMODAL": "on"}, 0, "DYN_TRTLLM_ENABLE_MULTIMODAL: requests with"),
        (
            {"DYN_TRTLLM_NO_SUCH": "1"},
            0,
            "DYN_TRTLLM_NO_SUCH: slagate knows no option of that name",
        ),
    ],
)
def test_a_variable_is_answered_by_its_name(
    variables: dict[str, str], status: int, word: str
) -> None:
    printed = Printed(*ROLE, variables=variables)
    assert printed.status == status
    assert word in printed.said
    assert word or not printed.said


def test_a_dotted_option_counts_over_a_file_and_an_override() -> None:
    override = ("--override-engine-args", '{"max_batch_size": 3}')
    printed = Printed(
        *ROLE, "--trtllm.max_batch_size", "5", "--extra-engine-args", "qwen3/agg", *override
    )
    assert printed.value("max_batch_size") == 5
    assert printed.source("max_batch_size") == "--trtllm.max_batch_size"


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ("--trtllm. 1", "--trtllm.: an engine argument is"),
        ("--trtllm.a..b 1", "SECTION.KEY"),
        ("--trtllm.max_seq_len", "requires a value"),
        ("--model-path", "requires a value"),
        ("--disaggregation-mode prefill --role decode", "is given twice: decode and prefill"),
        ("Qwen/Qwen3-8B --role agg", "Qwen/Qwen3-8B is no option; the model is --model"),
        ("--no-such-option", "No such option: --no-such-option"),
    ],
)
def test_a_wrong_option_is_refused_by_name(options: str, word: str) -> None:
    printed = Printed(*options.split())
    assert printed.status == 2
    assert word in printed.said


def test_a_pasted_launch_line_can_be_checked() -> None:
    line = "--model-path /m --served-model-name m --disaggregation-mode agg --request-plane nats"
    ended = CliRunner().invoke(
        cli, ["worker", "check", *line.split(), "--extra-engine-args", "qwen3/agg", "--json"]
    )
    assert ended.exit_code == 0, ended.output
    assert "--served-model-name: slagate worker check does not need it" in ended.stderr


def test_a_check_takes_what_only_a_worker_needs() -> None:
    line = "--role agg --listen h:1 --insecure --log_level=info --extra-engine-args qwen3/agg"
    ended = CliRunner().invoke(cli, ["worker", "check", *line.split(), "--json"])
    assert ended.exit_code == 0, ended.output
    said = "slagate: note: --listen, --insecure, --log_level: slagate worker check does not need it"
    assert said in ended.stderr
    line = (
        "--role agg --host 0.0.0.0 --port 8000 --tcp-tls-cert-path c --extra-engine-args qwen3/agg"
    )
    ended = CliRunner().invoke(cli, ["worker", "check", *line.split(), "--json"])
    assert ended.exit_code == 0, ended.output
    assert (
        "note: --host, --port, --tcp-tls-cert-path: slagate worker check does not" in ended.stderr
    )
    ended = CliRunner().invoke(cli, ["worker", "check", *ROLE, "--listen"])
    assert (ended.exit_code, ended.stderr) == (2, "slagate: --listen requires a value\n")


def test_the_table_is_sound_and_the_page_has_all_of_it() -> None:
    table = LaunchOptions().table
    for entry in table["entries"]:
        kinds = entry.keys() & {"role", "option", "argument", "say"}
        assert len(kinds) == 1
        assert "say" not in kinds or entry["kind"] in ("note", "warning", "error")
        for option in entry["options"]:
            name, _, value = option.partition("=")
            shown = name if name.isupper() else f"--{name} {value}".strip()
            assert f"`{shown}`" in PAGE, option
        assert entry.get("say", "") in PAGE
    named = [entry["argument"] for entry in table["entries"] if "argument" in entry]
    for dotted in (*table["places"].values(), *named):
        assert dotted in known_versions()[-1].fields(), dotted
    every = [option for entry in table["entries"] for option in entry["options"]]
    for flag in (*table["flags"], *table["lists"]):
        assert flag == "kv-events" or any(fnmatchcase(flag, o.partition("=")[0]) for o in every), (
            flag
        )


def test_a_launch_line_without_a_file_is_checked() -> None:
    line = "--disaggregation-mode agg --model-path m --tensor-parallel-size 2 --ep_size 3 --json"
    ended = CliRunner().invoke(cli, ["worker", "check", *line.split()])
    assert ended.exit_code == 1
    assert '"code": "E401"' in ended.stdout
    nothing = CliRunner().invoke(cli, ["worker", "check", *ROLE])
    assert nothing.exit_code == 2
    assert "--extra-engine-args is missing" in nothing.stderr


def test_a_version_without_facts_is_told_which_stands_in() -> None:
    options = [*ROLE, "--extra-engine-args", "qwen3/agg", "--engine-version"]
    for version, said in {
        "1.30": "of 1.30 nothing is known, and 1.4 stands in",
        "1.3.0rc9": "",
    }.items():
        ended = CliRunner().invoke(cli, ["worker", "check", *options, version])
        assert ended.exit_code == 0
        assert said in ended.stderr
        assert said or not ended.stderr
