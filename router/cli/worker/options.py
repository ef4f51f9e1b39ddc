"""The options that `slagate worker` has for TensorRT-LLM alone, those for logits processors among them."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from slagate.router.cli.command import fail, seconds, with_options, wrong_use_told
from slagate.router.cli.worker.engine_args import TRTLLM_ONLY, TRTLLM_OPTIONS, text
from slagate.workers.engine_args.build import EngineArgs
from slagate.workers.logits.processors import LogitsProcessors, wanted_of
from slagate.workers.serving.start import (
    PROGRESS_S,
    SHUTDOWN_LIMIT_S,
    WARM_UP_LIMIT_S,
    TrtllmOptions,
)
from slagate.workers.trtllm.package import check_installed
from slagate.workers.trtllm.watch import WatchTimes

DRAIN_S = 10.0
PREFILL_DRAIN_S = 30.0
"""Others read a prefill worker's memory until they have fetched what it parked."""

SIM_ONLY = (
    "profile",
    "time_scale",
    "kv_blocks",
    "kv_block_bytes",
    "kv_host_blocks",
    "transport",
    "kv_transfer_timeout",
    "handoff_timeout",
    "api",
)
"""Options of the simulated engine alone: TensorRT-LLM's arguments say such things in its own words."""

_WATCH = WatchTimes()


def _seconds(about: str, default: float, *, least: float = 0.1) -> tuple[object, object]:
    return Annotated[float, seconds(about, least=least)], default


OPTIONS: dict[str, tuple[object, object]] = {
    "served_model_name": text("trtllm: what clients call the model; default: --model."),
    **TRTLLM_OPTIONS,
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


def option(parameter: str) -> str:
    """How a parameter is spelt on the command line."""
    return f"--{parameter.replace('_', '-')}"


def check_engine(engine: str, given: Sequence[str]) -> None:
    """End the command unless there is such an engine, and it has the options that were given."""
    if engine not in ("sim", "trtllm"):
        fail(f"--engine must be sim or trtllm (got {engine!r})")
    for name in SIM_ONLY if engine == "trtllm" else (*TRTLLM_ONLY, *OPTIONS):
        if name in given:
            other = "sim" if engine == "trtllm" else "trtllm"
            fail(f"{option(name)} is for --engine {other}, not for {engine}")


def check_package() -> None:
    """End the command, and say what to install, unless TensorRT-LLM is there."""
    with wrong_use_told():
        check_installed()


def trtllm_drain_s(role: str) -> float:
    """What `--drain` is where it is not given."""
    return PREFILL_DRAIN_S if role == "prefill" else DRAIN_S


def options_of(
    args: EngineArgs,
    trtllm: Mapping[str, Any],
    *,
    handoff_key_file: Path | None,
    log_level: str,
    logits: LogitsProcessors,
) -> TrtllmOptions:
    """The options of a worker over an engine of these arguments; a wrong one ends the command."""
    if args.values.get("model") is None:
        fail("--model is missing: a folder with the model, or its Hugging Face id")
    with wrong_use_told():
        args.refuse_errors()
    model = str(args.values["model"])
    return TrtllmOptions(
        args=args,
        served_name=trtllm["served_model_name"] or model,
        end_id=trtllm["end_id"],
        handoff_key_file=handoff_key_file,
        log_level=log_level,
        logits=logits,
        warm_up_limit_s=trtllm["warm_up_timeout"],
        shutdown_limit_s=trtllm["shutdown_timeout"],
        progress_s=trtllm["start_progress"],
        watch=WatchTimes(
            interval_s=trtllm["health_check_interval"],
            check_limit_s=trtllm["health_check_timeout"],
            stuck_s=trtllm["shutdown_timeout"],
        ),
    )


LogitsProcessorOption = Annotated[
    list[str] | None,
    typer.Option(
        "--logits-processor",
        metavar="NAME[=JSON]",
        help="Process the logits of every request with this, and these parameters; repeatable.",
    ),
]
AllowLogitsProcessor = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-logits-processor",
        metavar="NAME",
        help="Requests may ask for this one in extra.logits_processors; repeatable.",
    ),
]


def read_logits_processors(
    every: Sequence[str] | None, allowed: Sequence[str] | None
) -> LogitsProcessors:
    """What these options say; a wrong one ends the command."""
    with wrong_use_told():
        return LogitsProcessors([wanted_of(text) for text in every or ()], allowed or ())
