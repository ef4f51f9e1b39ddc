"""The subject of the rules: an engine's arguments, its role, and its intended use."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from slagate.workers.engine_args.model.facts import EngineFacts
from slagate.workers.engine_args.model.model import EngineModel, Section
from slagate.workers.kv_transfer.nixl.ucx import reaches_gpu

Version = tuple[int, int]
"""TensorRT-LLM's, major and minor."""

_BACKENDS = ("NIXL", "UCX", "MOONCAKE", "MPI")
"""What DEFAULT is if TRTLLM_USE_..._KVCACHE is 1, the first one first: kv_cache_transceiver.py, ids
616290201 (1.1), 59975471404 (1.4)."""

_NEWER_KINDS = {"DraftTarget": "Draft_Target", "UserProvided": "User_Provided"}
"""Types of drafting as 1.3 calls them; before, see `DecodingBaseConfig.from_dict`, id 1090804222."""


@dataclass(frozen=True, slots=True)
class IntendedUse:
    """What the engine is for, and where it is to run, as far as that is known."""

    prefix_routing: bool = False
    """Whether requests are to be routed to where their prefix is cached."""
    longest_prompt_tokens: int | None = None
    kv_bytes_per_token: int | None = None
    """KV cache of one token on one rank."""
    engine_version: Version | None = None
    facts: EngineFacts | None = None
    """Of its arguments; None: those that are known of the version."""
    allows_unknown: bool = False
    """Whether names and choices that are not known are to be taken for a newer engine's."""
    environ: Mapping[str, str] = field(default_factory=dict)  # of the worker's process


@dataclass(frozen=True, slots=True)
class EngineCase:
    """Arguments that are each valid alone; `given` has the dotted keys that were set."""

    role: str
    args: EngineModel
    given: frozenset[str]
    wanted: IntendedUse

    @property
    def cache(self) -> Section:
        """The section of the KV cache."""
        return self.args.kv_cache_config

    @property
    def drafting(self) -> Section | None:
        """The section of speculative decoding; None where nothing is drafted."""
        return self.args.speculative_config

    @property
    def draft_kind(self) -> str:
        """The type of speculative decoding, by its newer name; empty where nothing is drafted."""
        kind = self.drafting.decoding_type if self.drafting else ""
        return _NEWER_KINDS.get(kind, kind)

    @property
    def transceiver(self) -> Section | None:
        """The section of the cache transceiver; None where there is none, or it is switched off."""
        section = self.args.cache_transceiver_config
        return section if section is not None and section.backend is not None else None

    @property
    def transport(self) -> str | None:
        """The transceiver's back-end, DEFAULT as the environment has it; None without a transceiver."""
        backend = self.transceiver.backend if self.transceiver else None
        return self.default_transport or "NIXL" if backend == "DEFAULT" else backend

    @property
    def default_transport(self) -> str | None:
        """The back-end that a variable says DEFAULT is; None where none does."""
        env = self.env
        chosen = (one for one in _BACKENDS if env.get(f"TRTLLM_USE_{one}_KVCACHE") == "1")
        return next(chosen, None)

    @property
    def ucx_reaches_gpu(self) -> bool:
        """Whether UCX_TLS leaves UCX a transport for GPU memory."""
        return reaches_gpu(self.env.get("UCX_TLS") or "all")

    @property
    def runtime(self) -> str | None:
        """CPP, PYTHON, which moves blocks without a buffer, or auto; None without a transceiver."""
        return None if self.transceiver is None else self.transceiver.transceiver_runtime or "CPP"

    @property
    def context_kind(self) -> str:
        """The type of context parallelism, in capitals."""
        return str(self.args.cp_config.cp_type if self.args.cp_config else "ULYSSES").upper()

    @property
    def moe_ranks(self) -> int:
        """Ranks that experts are spread over: Mapping, mapping.py id 2561868716."""
        of_context = 1 if self.context_kind == "ULYSSES" else self.args.context_parallel_size
        return self.args.tensor_parallel_size * of_context

    @property
    def batch_tokens(self) -> int:
        """Tokens of a step in which every request of a full batch decodes."""
        return self.args.max_batch_size * self.args.step_tokens_of_a_request

    @property
    def longest_prompt_tokens(self) -> int | None:
        """The longest prompt that may come, in tokens; None where the model, or prefill, decides."""
        if self.wanted.longest_prompt_tokens is not None or self.role == "decode":
            return self.wanted.longest_prompt_tokens
        bounds = [self.args.max_seq_len]
        if self.role == "prefill" and not self.args.enable_chunked_prefill:
            bounds.append(self.args.max_num_tokens)
        return min((bound for bound in bounds if bound is not None), default=None)

    @property
    def has_different_windows(self) -> bool:
        """Whether there are different attention windows, of which none is longer than the context."""
        windows = self.cache.max_attention_window or []
        return len({min(window, self.args.max_seq_len or window) for window in windows}) > 1

    @property
    def env(self) -> Mapping[str, str]:
        """The environment variables, as the engine will have them."""
        return {**self.wanted.environ, **(self.args.env_overrides or {})}

    def has(self, key: str) -> bool:
        """Whether the key, or one below it, was set."""
        return any(name == key or name.startswith(f"{key}.") for name in self.given)

    def is_within(self, since: Version | None, before: Version | None) -> bool | None:
        """Whether the engine's version is one of these; None if that is not known, and it matters."""
        version = self.wanted.engine_version
        if version is None:
            return True if since is None and before is None else None
        return (since is None or version >= since) and (before is None or version < before)

    def is_known_since(self, version: Version) -> bool:
        """Whether the engine is known to be of this version, or of a newer one."""
        return self.is_within(version, None) is True

    def is_known_before(self, version: Version) -> bool:
        """Whether the engine is known to be older than this version."""
        return self.is_within(None, version) is True
