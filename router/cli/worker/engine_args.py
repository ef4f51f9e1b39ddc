"""Engine arguments for `slagate worker trtllm` and `check`: their options, and how they are read."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from slagate.router.cli.command import check_choice, ending_on_usage_error, errors, fail
from slagate.router.cli.worker.launch import LaunchOptions, nested
from slagate.workers.engine_args.build import EngineArgs, build_engine_args
from slagate.workers.engine_args.model.facts import EngineFacts, facts_of_version, read_facts
from slagate.workers.engine_args.model.merge import DEFAULT, Layer
from slagate.workers.engine_args.rules.case import IntendedUse
from slagate.workers.engine_args.yaml_text import EXTRA, read_override, yaml_lines
from slagate.workers.findings import Finding
from slagate.workers.serving.sim import TRANSPORTS
from slagate.workers.trtllm.package import installed_version

INT32_MAX = (1 << 31) - 1
"""The largest count of the engine's C++."""

MAX_RANKS = 4096
"""More GPUs than one engine has ever spanned: a larger number is a mistake."""

TP = typer.Option(
    "--tp", "--tensor-parallel-size", min=1, max=MAX_RANKS, help="Tensor parallel size."
)
MAX_BATCH_SIZE = typer.Option(min=1, max=1_000_000, help="Requests a step may run.")
MAX_SEQ_LEN = typer.Option(min=2, max=INT32_MAX, help="Context window, tokens.")
ATTENTION_DP = typer.Option(
    "--attention-dp", "--enable-attention-dp", help="One KV cache per rank; as many ranks as --tp."
)
KV_EVENTS = typer.Option(
    min=0, max=100_000_000, help="KV events the engine keeps until they are read; 0: it makes none."
)
STREAM_INTERVAL = typer.Option(
    min=1, max=INT32_MAX, help="Tokens between two responses of a stream."
)


def _count(about: str, most: int = INT32_MAX) -> Any:
    return typer.Option(min=1, max=most, help=about)


Model = Annotated[str | None, typer.Option(help="Folder or Hugging Face id.")]
Tp = Annotated[int | None, TP]
MaxBatchSize = Annotated[int | None, MAX_BATCH_SIZE]
MaxSeqLen = Annotated[int | None, MAX_SEQ_LEN]
AttentionDp = Annotated[bool | None, ATTENTION_DP]
KvEvents = Annotated[int | None, KV_EVENTS]
StreamInterval = Annotated[int | None, STREAM_INTERVAL]
Backend = Annotated[str | None, typer.Option(help="pytorch or _autodeploy.")]
PipelineParallelSize = Annotated[int | None, _count("Pipeline parallel size.", MAX_RANKS)]
ExpertParallelSize = Annotated[int | None, _count("Expert parallel size of MoE layers.", MAX_RANKS)]
GpusPerNode = Annotated[int | None, _count("GPUs of a node; default: those visible.", MAX_RANKS)]
KvBlockSize = Annotated[int | None, _count("Tokens of a KV block.")]
MaxNumTokens = Annotated[int | None, _count("Tokens a step may run.")]
FreeGpuMemoryFraction = Annotated[
    float | None, typer.Option(min=0.0, max=1.0, help="Share of free GPU memory for the KV cache.")
]
GuidedDecodingBackend = Annotated[str | None, typer.Option(help="xgrammar or llguidance.")]
ExtraEngineArgs = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Engine arguments, YAML: a file, or a packaged configuration such as qwen3/prefill.",
    ),
]
OverrideEngineArgs = Annotated[
    str | None, typer.Option(metavar="JSON", help="Engine arguments over those of the file.")
]
AllowUnknownEngineArgs = Annotated[
    bool,
    typer.Option(
        "--allow-unknown-engine-args",
        help="Pass on arguments that slagate does not know: for newer engines.",
    ),
]
EngineVersion = Annotated[
    str | None,
    typer.Option(
        metavar="X.Y", help="Of TensorRT-LLM, for rules that depend on it; default: the installed."
    ),
]
EngineFactsFile = Annotated[
    str | None,
    typer.Option(
        metavar="FILE", help="What the engine's arguments may be, as slagate worker facts says it."
    ),
]


def read_engine_args(
    role: str,
    context: typer.Context,
    *,
    extra: Path | None,
    override: str | None,
    wanted: IntendedUse,
) -> EngineArgs:
    """Merge and check the arguments of options, variables and files. A usage error ends the command."""
    launch: LaunchOptions = context.obj
    variables, dotted = list(launch.variables), list(launch.overrides)
    given: dict[str, Any] = {}
    for name, key in launch.table["places"].items():
        value = context.params.get(name)
        if variable := launch.variable_of.get(name):
            variables.append(Layer(variable, nested({key: value})))
        elif value is not None:
            given[key] = value
    with ending_on_usage_error():
        variable = launch.variable_of.get("override_engine_args")
        if variable and override is not None:
            dotted.insert(0, Layer(variable, read_override(override)))
        return build_engine_args(
            role=role,
            variables=variables,
            cli=nested({**given, **launch.values}),
            extra=extra,
            override=None if variable else override,
            dotted=dotted,
            wanted=wanted,
            extra_option=launch.variable_of.get("extra_engine_args", EXTRA),
        )


def engine_version_of(text: str | None) -> tuple[int, int] | None:
    """Parse `--engine-version` (None: of the installed package, if any). Other text ends the command."""
    if text is None:
        return _major_minor(installed_version() or "")
    version = _major_minor(text)
    if version is None:
        fail(f"--engine-version must be a version such as 1.2 or 1.3.0rc22 (got {text!r})")
    facts = facts_of_version(version)
    if facts is not None and not f"{text}.".startswith(f"{facts.version}."):
        say = f"of {text} nothing is known, and {facts.version} stands in; see slagate worker facts"
        errors.print(f"slagate: note: --engine-version: {say}")
    return version


def facts_of(place: str | None) -> EngineFacts | None:
    """Parse `--engine-facts`. What is no such file or version ends the command."""
    with ending_on_usage_error():
        return None if place is None else read_facts(place, "--engine-facts")


def _major_minor(text: str) -> tuple[int, int] | None:
    match = re.match(r"(\d+)\.(\d+)(?![\d])", text)
    return None if match is None else (int(match[1]), int(match[2]))


def show_engine_args(args: EngineArgs) -> None:
    """Print the arguments with their sources as YAML on stdout, the findings on stderr."""
    for finding in args.findings:
        errors.print(f"slagate: {finding.severity}: {finding}")
    for line in yaml_lines(args.values, args.sources):
        print(line)


def place_of(finding: Finding, places: Mapping[str, str]) -> str:
    """Where the value that a finding is about comes from, or the section that lacks it; else empty."""
    key = finding.place.partition("[")[0]
    section = places.get(key.rpartition(".")[0], "")
    return places.get(key, "" if section == DEFAULT else section)


Transport = Annotated[
    str,
    typer.Option(
        help="How the KV cache moves between workers: nixl, shm (shared memory), or auto: nixl where it "
        "works, else shm."
    ),
]


def check_transport(transport: str) -> None:
    """End the command unless `transport` is one of `TRANSPORTS`."""
    check_choice("--transport", transport, TRANSPORTS)
