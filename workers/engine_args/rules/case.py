"""The subject of the rules: an engine's arguments, its role, and its intended use."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from slagate.workers.engine_args.model.model import EngineModel


@dataclass(frozen=True, slots=True)
class IntendedUse:
    """What the engine is for, and where it is to run, as far as that is known."""

    prefix_routing: bool = False
    """Whether requests are to be routed to where their prefix is cached."""
    longest_prompt_tokens: int | None = None
    kv_bytes_per_token: int | None = None
    """KV cache of one token on one rank."""
    engine_version: tuple[int, int] | None = None  # TensorRT-LLM's, major and minor
    environ: Mapping[str, str] = field(default_factory=dict)  # of the worker's process


@dataclass(frozen=True, slots=True)
class EngineCase:
    """Arguments that are each valid alone; `given` has the dotted keys that were set."""

    role: str
    args: EngineModel
    given: frozenset[str]
    wanted: IntendedUse

    @property
    def is_disaggregated(self) -> bool:
        """Whether KV caches of requests leave or reach this engine."""
        return self.role in ("prefill", "decode")

    @property
    def longest_prompt_tokens(self) -> int | None:
        """The longest prompt that may come, in tokens; None where only the model knows."""
        if self.wanted.longest_prompt_tokens is not None:
            return self.wanted.longest_prompt_tokens
        bounds = [self.args.max_seq_len]
        if self.role == "prefill" and not self.args.enable_chunked_prefill:
            bounds.append(self.args.max_num_tokens)
        return min((bound for bound in bounds if bound is not None), default=None)

    def has(self, key: str) -> bool:
        """Whether the key, or one below it, was set."""
        return any(name == key or name.startswith(f"{key}.") for name in self.given)

    def is_known_since(self, version: tuple[int, int]) -> bool:
        """Whether the engine is known to be of this version, or of a newer one."""
        return self.wanted.engine_version is not None and self.wanted.engine_version >= version

    def is_known_before(self, version: tuple[int, int]) -> bool:
        """Whether the engine is known to be older than this version."""
        return self.wanted.engine_version is not None and self.wanted.engine_version < version

    def environment(self, name: str) -> str:
        """An environment variable as the engine will have it; empty where it is not set."""
        overrides = self.args.env_overrides or {}
        return overrides.get(name, self.wanted.environ.get(name, ""))
