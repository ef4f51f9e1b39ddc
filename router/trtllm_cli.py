"""The options of `slagate worker --engine trtllm`, and what they make of the engine's arguments."""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from slagate.router.command import MAX_SECONDS, fail, finite, with_options
from slagate.workers.engine_args import ROLES
from slagate.workers.errors import UsageError
from slagate.workers.trtllm_options import (
    PROGRESS_S,
    SHUTDOWN_LIMIT_S,
    WARM_UP_LIMIT_S,
    TrtllmOptions,
    engine_args,
)
from slagate.workers.trtllm_watch import WatchTimes

BACKENDS = ("pytorch", "_autodeploy")
GUIDED_BACKENDS = ("xgrammar", "llguidance")

DRAIN_S = 10.0
PREFILL_DRAIN_S = 30.0
"""Others read a prefill worker's memory until they have fetched what it parked."""

SIM_ONLY = (
    "profile",
    "time_scale",
    "kv_blocks",
    "kv_block_bytes",
    "kv_host_blocks",
    "kv_events",
    "transport",
    "kv_transfer_timeout",
    "handoff_timeout",
    "api",
)
"""Options of the simulated engine alone: TensorRT-LLM's arguments say such things in its own words."""

_WATCH = WatchTimes()


def _seconds(about: str, default: float, *, least: float = 0.1) -> tuple[object, object]:
    option = typer.Option(min=least, max=MAX_SECONDS, callback=finite, help=about)
    return Annotated[float, option], default


def _count(about: str) -> tuple[object, object]:
    return Annotated[int | None, typer.Option(min=1, max=1 << 31, help=about)], None


def _flag(name: str, about: str) -> tuple[object, object]:
    return Annotated[bool, typer.Option(f"--{name}", help=about)], False


def _text(about: str, **option: Any) -> tuple[object, object]:
    return Annotated[str | None, typer.Option(help=about, **option)], None


OPTIONS: dict[str, tuple[object, object]] = {
    "served_model_name": _text("trtllm: what clients call the model; default: --model."),
    "backend": _text("trtllm: pytorch or _autodeploy."),
    "pipeline_parallel_size": _count("trtllm: pipeline parallel size."),
    "expert_parallel_size": _count("trtllm: expert parallel size of MoE layers."),
    "gpus_per_node": _count("trtllm: GPUs of a node; default: those visible."),
    "kv_block_size": _count("trtllm: tokens of a KV block."),
    "max_num_tokens": _count("trtllm: tokens a step may run."),
    "free_gpu_memory_fraction": (
        Annotated[
            float | None,
            typer.Option(
                min=0.0, max=1.0, help="trtllm: share of free GPU memory for the KV cache."
            ),
        ],
        None,
    ),
    "guided_decoding_backend": _text("trtllm: xgrammar or llguidance."),
    "extra_engine_args": (
        Annotated[
            Path | None,
            typer.Option(metavar="FILE", help="trtllm: engine arguments, YAML, over the options."),
        ],
        None,
    ),
    "override_engine_args": _text("trtllm: engine arguments over all others.", metavar="JSON"),
    "allow_unknown_engine_args": _flag(
        "allow-unknown-engine-args", "trtllm: pass on arguments that slagate does not know."
    ),
    "print_engine_args": _flag(
        "print-engine-args", "trtllm: print the arguments and where each came from, and end."
    ),
    "publish_kv_events": _flag("publish-kv-events", "trtllm: keep KV events for subscribers."),
    "end_id": (
        Annotated[
            int | None,
            typer.Option(min=0, max=1 << 31, help="trtllm: end of text; default: the tokenizer's."),
        ],
        None,
    ),
    "warm_up_timeout": _seconds("trtllm: for the first request of each rank.", WARM_UP_LIMIT_S),
    "start_progress": _seconds("trtllm: between log lines while the engine starts.", PROGRESS_S),
    "health_check_interval": _seconds(
        "trtllm: between looks at whether the engine is alive; 0: none.",
        _WATCH.interval_s,
        least=0.0,
    ),
    "health_check_timeout": _seconds(
        "trtllm: after which a look that got no answer failed.", _WATCH.check_limit_s
    ),
    "shutdown_timeout": _seconds("trtllm: for the engine to end by itself.", SHUTDOWN_LIMIT_S),
}


def with_trtllm_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command these options; they reach it as `trtllm`, by name."""
    return with_options(command, OPTIONS, "trtllm", lambda options, _: options)


def check_engine(engine: str, given: Sequence[str]) -> None:
    """End the command unless there is such an engine, and it has the options that were given."""
    if engine not in ("sim", "trtllm"):
        fail(f"--engine must be sim or trtllm (got {engine!r})")
    for name in SIM_ONLY if engine == "trtllm" else OPTIONS:
        if name in given:
            fail(f"--{name.replace('_', '-')} is not an option of --engine {engine}")


def trtllm_drain_s(role: str) -> float:
    """What `--drain` is where it is not given."""
    return PREFILL_DRAIN_S if role == "prefill" else DRAIN_S


def options_of(
    trtllm: Mapping[str, Any],
    shared: Mapping[str, Any],
    *,
    role: str,
    model: str | None,
    handoff_key_file: Path | None,
    log_level: str,
) -> TrtllmOptions:
    """The options of a worker; `shared` are those of both engines that were given.

    A wrong one ends the command, as printing the engine's arguments does.
    """
    if role not in ROLES:
        fail(f"--role must be one of {', '.join(ROLES)} (got {role!r})")
    if model is None:
        fail("--model is missing: a folder with the model, or its Hugging Face id")
    for name, known in (("backend", BACKENDS), ("guided_decoding_backend", GUIDED_BACKENDS)):
        if trtllm[name] is not None and trtllm[name] not in known:
            fail(f"--{name.replace('_', '-')} must be {' or '.join(known)} (got {trtllm[name]!r})")
    options = TrtllmOptions(
        role=role,
        model=model,
        cli={
            "tensor_parallel_size": shared.get("tp"),
            "enable_attention_dp": shared.get("attention_dp"),
            "max_batch_size": shared.get("max_batch_size"),
            "max_seq_len": shared.get("max_seq_len"),
            "stream_interval": shared.get("stream_interval"),
            "backend": trtllm["backend"],
            "pipeline_parallel_size": trtllm["pipeline_parallel_size"],
            "moe_expert_parallel_size": trtllm["expert_parallel_size"],
            "gpus_per_node": trtllm["gpus_per_node"],
            "max_num_tokens": trtllm["max_num_tokens"],
            "guided_decoding_backend": trtllm["guided_decoding_backend"],
            "kv_cache_config": {
                "tokens_per_block": trtllm["kv_block_size"],
                "free_gpu_memory_fraction": trtllm["free_gpu_memory_fraction"],
            },
        },
        served_model_name=trtllm["served_model_name"],
        extra=trtllm["extra_engine_args"],
        override=trtllm["override_engine_args"],
        allow_unknown=trtllm["allow_unknown_engine_args"],
        publish_kv_events=trtllm["publish_kv_events"],
        end_id=trtllm["end_id"],
        handoff_key_file=handoff_key_file,
        log_level=log_level,
        warm_up_limit_s=trtllm["warm_up_timeout"],
        shutdown_limit_s=trtllm["shutdown_timeout"],
        progress_s=trtllm["start_progress"],
        watch=WatchTimes(
            interval_s=trtllm["health_check_interval"],
            check_limit_s=trtllm["health_check_timeout"],
            stuck_s=trtllm["shutdown_timeout"],
        ),
    )
    if trtllm["print_engine_args"]:
        _print_engine_args(options)
    return options


def _print_engine_args(options: TrtllmOptions) -> NoReturn:
    try:
        args = engine_args(options)
    except UsageError as error:
        fail(error)
    for key, source in sorted(args.sources.items()):
        value: Any = args.values
        for part in key.split("."):
            value = value[part]
        sys.stdout.write(f"{key}: {value!r}  # {source}\n")
    raise typer.Exit(0)
