"""How to run a TensorRT-LLM engine, and the engine's arguments that come of it."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slagate.workers.engine_args import EngineArgs, build_engine_args
from slagate.workers.errors import UsageError
from slagate.workers.sim_worker import KV_EVENTS
from slagate.workers.trtllm_watch import WatchTimes

log = logging.getLogger(__name__)

WARM_UP_LIMIT_S = 300.0
"""For the first request of each rank: kernels are tuned and graphs captured in it."""

SHUTDOWN_LIMIT_S = 60.0
"""For the engine to end by itself."""

PROGRESS_S = 5.0
"""Between two log lines of a start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrtllmOptions:
    """As on the command line.

    `cli` has the engine arguments that options set, nested as `LLM` takes them, None where an option was
    not given.
    """

    role: str
    model: str
    cli: Mapping[str, Any]
    served_model_name: str | None = None
    extra: Path | None = None
    override: str | None = None
    allow_unknown: bool = False
    publish_kv_events: bool = False
    end_id: int | None = None  # None: the tokenizer's
    handoff_key_file: Path | None = None
    log_level: str = "info"
    warm_up_limit_s: float = WARM_UP_LIMIT_S
    shutdown_limit_s: float = SHUTDOWN_LIMIT_S
    progress_s: float = PROGRESS_S
    watch: WatchTimes = field(default_factory=WatchTimes)

    @property
    def served_name(self) -> str:
        """What clients call the model."""
        return self.served_model_name or self.model


def engine_args(options: TrtllmOptions) -> EngineArgs:
    """The merged arguments. Raises `UsageError` naming an option, or an argument that is an error."""
    # Statistics are what the gateway's view of the load is made of.
    cli = {"enable_iter_perf_stats": True, **options.cli, "model": options.model}
    buffer = {"event_buffer_max_size": KV_EVENTS}
    if options.publish_kv_events:
        cli["kv_cache_config"] = {**cli.get("kv_cache_config", {}), **buffer}
    made = _merged(options, cli, forced={})
    if options.publish_kv_events and not _buffer(made):
        # A file says 0, or null: for one that says how many, that is how many.
        made = _merged(options, cli, forced={"kv_cache_config": buffer})
    made.refuse_errors()
    for finding in made.findings:
        log.warning("engine_args.finding", extra={"code": finding.code, "finding": str(finding)})
    return made


def _merged(
    options: TrtllmOptions, cli: Mapping[str, Any], forced: Mapping[str, Any]
) -> EngineArgs:
    return build_engine_args(
        role=options.role,
        cli=cli,
        extra=options.extra,
        override=options.override,
        forced=forced,
        allow_unknown=options.allow_unknown,
    )


def _buffer(args: EngineArgs) -> Any:
    cache = args.values.get("kv_cache_config")
    if cache is not None and not isinstance(cache, Mapping):
        raise UsageError("kv_cache_config: must be a mapping")
    return (cache or {}).get("event_buffer_max_size")
