"""How to run a TensorRT-LLM worker."""

from dataclasses import dataclass, field
from pathlib import Path

from slagate.workers.engine_args.build import EngineArgs
from slagate.workers.logits.processors import LogitsProcessors
from slagate.workers.trtllm.watch import WatchTimes

WARM_UP_LIMIT_S = 300.0
"""For the first request of each rank: kernels are tuned and graphs captured in it."""

SHUTDOWN_LIMIT_S = 60.0
"""For the engine to end by itself."""

PROGRESS_S = 5.0
"""Between two log lines of a start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrtllmOptions:
    """As on the command line; `args` are the engine's, without errors."""

    args: EngineArgs
    served_name: str
    end_id: int | None = None  # None: the tokenizer's
    handoff_key_file: Path | None = None
    log_level: str = "info"
    warm_up_limit_s: float = WARM_UP_LIMIT_S
    shutdown_limit_s: float = SHUTDOWN_LIMIT_S
    progress_s: float = PROGRESS_S
    watch: WatchTimes = field(default_factory=WatchTimes)
    logits: LogitsProcessors = field(default_factory=LogitsProcessors)

    @property
    def role(self) -> str:
        """What the worker is for."""
        return self.args.role
