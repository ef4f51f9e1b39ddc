"""Constructor arguments of the simulated engine, with TensorRT-LLM's names and defaults, and its settings.

`TorchLlmArgs` has the fields that a worker sets or reads, whether or not they change what is simulated. Any
other keyword is refused, as TensorRT-LLM refuses it, and so is what a version lacks (`LACKS`). Nested
configurations are strict, and may come as a dict. `SimSettings` has what a real engine has no argument for.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from os.path import isdir
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveInt,
    model_validator,
)

from slagate.workers.kv_transfer.transport import KvTransport
from slagate.workers.profiles.profile import TpProfile
from slagate.workers.sim.sampling import LogprobForm
from slagate.workers.sim.timing import Conditions

VOCAB_SIZE = 128_256
"""The default number of tokens in the vocabulary: Llama 3's."""

END_ID = 128_001
"""The end-of-text token of that vocabulary."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_assignment=True)


class KvCacheConfig(_Strict):
    """`kv_cache_config`: sizes and reuse of the KV cache."""

    enable_block_reuse: bool = True
    max_tokens: PositiveInt | None = None
    max_attention_window: Annotated[list[PositiveInt], Field(min_length=1)] | None = None
    sink_token_length: int | None = None
    free_gpu_memory_fraction: float = Field(default=0.9, gt=0, le=1)
    host_cache_size: int | None = Field(default=None, ge=0)
    onboard_blocks: bool = True
    cross_kv_cache_fraction: float | None = None
    secondary_offload_min_priority: int | None = None
    event_buffer_max_size: int = Field(default=0, ge=0)
    attention_dp_events_gather_period_ms: int = 5
    enable_partial_reuse: bool = True
    copy_on_partial_reuse: bool = True
    use_uvm: bool = False
    max_gpu_total_bytes: int = 0
    dtype: str = "auto"
    mamba_ssm_cache_dtype: str = "auto"
    tokens_per_block: PositiveInt = 32
    use_kv_cache_manager_v2: bool | Literal["auto"] = "auto"
    kv_cache_event_hash_algo: Literal["auto", "v1_block_key", "v2_sha256", "v2_sha256_64"] = "auto"
    max_util_for_resume: float = 0.95
    disk_cache_size: int | None = Field(default=None, ge=0)
    disk_cache_path: str | None = None

    @model_validator(mode="after")
    def _disk_has_a_folder(self) -> "KvCacheConfig":
        if self.disk_cache_size and not (self.disk_cache_path and isdir(self.disk_cache_path)):
            raise ValueError("disk_cache_path must be a folder when disk_cache_size is above 0")
        return self


class CacheTransceiverConfig(_Strict):
    """`cache_transceiver_config`: handoffs need one that names a back-end."""

    backend: Literal["DEFAULT", "UCX", "NIXL", "MOONCAKE", "MPI"] | None = None
    transceiver_runtime: Literal["CPP", "PYTHON", "auto"] | None = "auto"
    max_tokens_in_buffer: int | None = Field(default=None, ge=0)
    kv_transfer_timeout_ms: PositiveInt | None = None
    kv_transfer_sender_future_timeout_ms: PositiveInt | None = 1000


class SchedulerConfig(_Strict):
    """`scheduler_config`: which requests are admitted."""

    capacity_scheduler_policy: Literal["GUARANTEED_NO_EVICT", "MAX_UTILIZATION", "STATIC_BATCH"] = (
        "GUARANTEED_NO_EVICT"
    )
    context_chunking_policy: Literal["FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS"] | None = None
    dynamic_batch_config: Any = None
    waiting_queue_policy: Literal["fcfs", "priority"] = "fcfs"


class AttentionDpConfig(_Strict):
    """`attention_dp_config`: how attention-DP ranks share out requests."""

    enable_balance: bool = False
    timeout_iters: int = 50
    batching_wait_iters: int = 10
    kv_cache_routing_conversation_affinity: bool = False


class CudaGraphConfig(_Strict):
    """`cuda_graph_config`; without effect here."""

    batch_sizes: list[PositiveInt] | None = None
    max_batch_size: int = Field(default=0, ge=0)
    enable_padding: bool = False


class MoeLoadBalancerConfig(_Strict):
    """`moe_config.load_balancer`, where it is not the path of a file with the same content."""

    num_slots: int | None = None
    initial_global_assignments: dict[int, list[int]] | None = None
    layer_updates_per_iter: int = 0


class MoeConfig(_Strict):
    """`moe_config`; without effect here."""

    backend: Literal[
        "AUTO", "CUTLASS", "CUTEDSL", "WIDEEP", "TRTLLM", "DEEPGEMM", "VANILLA", "TRITON"
    ] = "AUTO"
    max_num_tokens: int | None = None
    load_balancer: MoeLoadBalancerConfig | str | None = None
    disable_finalize_fusion: bool = False
    use_low_precision_moe_combine: bool = False


class TelemetryConfig(_Strict):
    """`telemetry_config`: what an `LLM` reports to NVIDIA by default (usage/config.py id 56598569176)."""

    disabled: bool = False
    usage_context: str = "unknown"


class EagleDecodingConfig(_Strict):
    """`speculative_config` of Eagle and Eagle3, which are one to this back-end; nothing is drafted."""

    decoding_type: Literal["Eagle", "Eagle3"]
    max_draft_len: PositiveInt
    max_total_draft_tokens: int | None = None
    speculative_model: str = Field(
        validation_alias=AliasChoices("speculative_model", "speculative_model_dir")
    )
    max_concurrency: int | None = None
    draft_len_schedule: dict[int, int] | None = None
    load_format: str | None = None
    acceptance_window: int | None = None
    acceptance_length_threshold: float | None = None
    allow_advanced_sampling: bool = False
    eagle3_one_model: bool | None = True
    eagle3_layers_to_capture: set[int] | None = None
    eagle3_model_arch: Literal["llama3", "mistral_large3"] = "llama3"


class EagleDecodingConfig11(_Strict):
    """`speculative_config` of Eagle in 1.1 and 1.2: an object, as no dict is taken."""

    decoding_type: ClassVar[str] = "Eagle"
    max_draft_len: PositiveInt
    max_total_draft_tokens: int | None = None
    speculative_model_dir: str
    max_concurrency: int | None = None
    load_format: str | None = None
    acceptance_window: int | None = None
    acceptance_length_threshold: float | None = None
    eagle3_one_model: bool | None = True
    eagle3_layers_to_capture: set[int] | None = None


class DecodingSection11:
    """`llmapi.llm_args.DecodingBaseConfig` of 1.1 and 1.2 (id 1090804222); of the types there, Eagle."""

    @staticmethod
    def from_dict(data: dict[str, Any]) -> EagleDecodingConfig11:
        """The section of a YAML file as an object; takes the type out of `data`. Raises `ValueError`."""
        decoding_type = data.get("decoding_type")
        if decoding_type != "Eagle":
            raise ValueError(f"Invalid decoding type: {decoding_type}")
        data.pop("decoding_type")
        return EagleDecodingConfig11(**data)


def _checked_if_eagle(value: Any) -> Any:
    """A section of another type is not looked into."""
    is_eagle = isinstance(value, dict) and value.get("decoding_type") in ("Eagle", "Eagle3")
    return EagleDecodingConfig(**value) if is_eagle else value


def _or_default(default: int) -> BeforeValidator:
    # TensorRT-LLM reads an explicit None as "unset" for these.
    return BeforeValidator(lambda value: default if value is None else value)


class TorchLlmArgs(_Strict):
    """`llm.args`: the arguments of the PyTorch back-end."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    model: str
    tokenizer: Any = None
    tokenizer_mode: Literal["auto", "slow"] = "auto"
    skip_tokenizer_init: bool = False
    trust_remote_code: bool = False
    tensor_parallel_size: PositiveInt = 1
    dtype: str = "auto"
    revision: str | None = None
    tokenizer_revision: str | None = None
    custom_tokenizer: str | None = None
    model_kwargs: dict[str, Any] | None = None
    load_format: str = "auto"
    pipeline_parallel_size: PositiveInt = 1
    context_parallel_size: PositiveInt = 1
    gpus_per_node: PositiveInt | None = None
    moe_cluster_parallel_size: int | None = None
    moe_tensor_parallel_size: int | None = None
    moe_expert_parallel_size: int | None = None
    enable_attention_dp: bool = False
    enable_lm_head_tp_in_adp: bool = False
    attention_dp_config: AttentionDpConfig | None = None
    max_batch_size: Annotated[PositiveInt, _or_default(2048)] = 2048
    max_num_tokens: Annotated[PositiveInt, _or_default(8192)] = 8192
    max_seq_len: PositiveInt | None = None
    max_input_len: Annotated[PositiveInt, _or_default(1024)] = 1024
    max_beam_width: Annotated[PositiveInt, _or_default(1)] = 1
    enable_chunked_prefill: bool = False
    guided_decoding_backend: Literal["xgrammar", "llguidance"] | None = None
    batched_logits_processor: Any = None
    enable_lora: bool = False
    lora_config: Any = None
    peft_cache_config: Any = None
    kv_cache_config: KvCacheConfig = Field(default_factory=KvCacheConfig)
    scheduler_config: SchedulerConfig = Field(default_factory=SchedulerConfig)
    cache_transceiver_config: CacheTransceiverConfig | None = None
    speculative_config: Annotated[Any, BeforeValidator(_checked_if_eagle)] = None
    sparse_attention_config: Any = None
    gather_generation_logits: bool = False
    return_perf_metrics: bool = False
    perf_metrics_max_requests: int = 0
    iter_stats_max_iterations: int | None = None
    request_stats_max_iterations: int | None = None
    num_postprocess_workers: int = 0
    postprocess_tokenizer_dir: str | None = None
    reasoning_parser: str | None = None
    otlp_traces_endpoint: str | None = None
    orchestrator_type: Literal["rpc", "ray"] | None = None
    backend: Literal["pytorch"] = "pytorch"
    env_overrides: dict[str, str] | None = None
    cuda_graph_config: CudaGraphConfig | None = Field(default_factory=CudaGraphConfig)
    disable_overlap_scheduler: bool = False
    moe_config: MoeConfig = Field(default_factory=MoeConfig)
    attn_backend: str = "TRTLLM"
    sampler_type: str = "auto"
    enable_iter_perf_stats: bool = False
    enable_iter_req_stats: bool = False
    print_iter_log: bool = False
    batch_wait_timeout_ms: float = 0
    batch_wait_timeout_iters: int = 0
    batch_wait_max_tokens_ratio: float = 0
    torch_compile_config: Any = None
    enable_autotuner: bool = True
    enable_min_latency: bool = False
    stream_interval: PositiveInt = 1
    allreduce_strategy: str = "AUTO"
    kv_connector_config: Any = None
    mm_encoder_only: bool = False
    enable_sleep: bool = False
    max_stats_len: PositiveInt = 1000
    telemetry_config: TelemetryConfig = Field(default_factory=TelemetryConfig)

    @property
    def world_size(self) -> int:
        """GPUs the engine spans."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.context_parallel_size

    @property
    def attention_dp_size(self) -> int:
        """Attention-DP ranks, each with a KV cache of its own; 1 without attention DP."""
        return self.tensor_parallel_size if self.enable_attention_dp else 1

    @property
    def has_transceiver(self) -> bool:
        """Whether the engine takes disaggregated requests."""
        transceiver = self.cache_transceiver_config
        return transceiver is not None and transceiver.backend is not None


_NOT_IN_13 = frozenset(
    {
        "telemetry_config",
        "attention_dp_config.kv_cache_routing_conversation_affinity",
        "kv_cache_config.use_kv_cache_manager_v2=auto",
        "kv_cache_config.kv_cache_event_hash_algo",
        "kv_cache_config.disk_cache_size",
        "kv_cache_config.disk_cache_path",
        "cache_transceiver_config.transceiver_runtime=auto",
    }
)
DECODING_TYPE = "speculative_config.decoding_type"
_NOT_IN_12 = _NOT_IN_13 | {
    DECODING_TYPE,
    "custom_tokenizer",
    "model_kwargs",
    "env_overrides",
    "enable_sleep",
    "max_stats_len",
    "kv_cache_config.use_kv_cache_manager_v2",
    "kv_cache_config.max_util_for_resume",
    "cache_transceiver_config.backend=MOONCAKE",
    "cache_transceiver_config.transceiver_runtime",
    "cache_transceiver_config.kv_transfer_sender_future_timeout_ms",
    "scheduler_config.waiting_queue_policy",
    "moe_config.backend=AUTO",
}

LACKS: Mapping[str, frozenset[str]] = {
    "1.1": _NOT_IN_12 | {"otlp_traces_endpoint"},
    "1.2": _NOT_IN_12,
    "1.3rc": _NOT_IN_13,
    "1.4rc": frozenset({"enable_sleep", "kv_cache_config.onboard_blocks"}),
}
"""What a version does not have of the arguments here, and of their choices (`name=choice`).

Read in TensorRT-LLM's `llmapi/llm_args.py`: id 1090804222 for 1.1 (a candidate of 1.2, October 2025), id
7019226376 for 1.3rc (after pull request #11158 of February 2026), id 55143598664 for 1.4rc. No file of 1.2
was found: it is taken to have what 1.1 has, and the address for the traces of its `trace_headers`.
"""

EARLIER_DEFAULTS: Mapping[str, object] = {
    "kv_cache_config.use_kv_cache_manager_v2=auto": False,
    "cache_transceiver_config.transceiver_runtime=auto": None,
}
"""Defaults of versions without the choice that is the newest's default (pull request #15823)."""


def parse_args(
    model: object, *, lacks: frozenset[str] = LACKS["1.4rc"], **values: Any
) -> TorchLlmArgs:
    """Validated arguments of a version that `lacks` some; the result does not have these either.

    Raises `ValueError` naming the class and an unknown keyword or the field. 1.1 and 1.2 raise
    `AttributeError` for a `speculative_config` dict with a `decoding_type`, a class variable there, as
    `EagleDecodingConfig.__init__` (id 1090804222) sets whatever it is given.
    """
    for path in _paths(values):
        name = path.partition("=")[0]
        if path in lacks and path == DECODING_TYPE:
            raise AttributeError(
                "'decoding_type' is a ClassVar of `EagleDecodingConfig` and cannot be set on an instance"
            )
        if path in lacks or ("." not in path and name not in TorchLlmArgs.model_fields):
            raise ValueError(f"{TorchLlmArgs.__name__} has no argument {path!r}")
    args = TorchLlmArgs(model=str(model), **values)
    for path in lacks:
        section, _, name = path.rpartition(".")
        of = getattr(args, section) if section else args
        if isinstance(of, BaseModel):
            name, _, choice = name.partition("=")
            if not choice:
                vars(of).pop(name, None)
            elif path in EARLIER_DEFAULTS and vars(of).get(name) == choice:
                vars(of)[name] = EARLIER_DEFAULTS[path]
    return args


def _paths(values: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """The dotted names of all arguments that are given, and `name=text` for those that are texts."""
    for name, value in values.items():
        yield above + name
        if isinstance(value, str):
            yield f"{above}{name}={value}"
        elif isinstance(value, dict):
            yield from _paths(value, f"{above}{name}.")
        elif isinstance(value, BaseModel):
            yield from _paths(value.model_dump(exclude_unset=True), f"{above}{name}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimSettings:
    """The simulated machine and model, and the faults of the engine.

    `transport` serves one engine only, and only when `cache_transceiver_config` is given. `end_id` None is
    `END_ID`, or the last token of a smaller vocabulary. `instance_salt` makes this engine's block hashes
    differ from those of others. `model_end_ids` are the end tokens of the model's generation config. With a
    `speculative_config` an iteration gives up to `tokens_per_step` tokens, fewer where one of them ends the
    output. The constructor waits `init_s` seconds by `pause`, then raises `fail_init` if that is set. With
    `handoff_on_stop` a context_only request whose first token ends it still gives a handoff. With
    `prefers_cache_v2` the model's choice of a KV cache manager is the V2 one, as Llama's is since
    TensorRT-LLM's pull request #19004. Raises `ValueError` naming the field.
    """

    profile: TpProfile
    transport: KvTransport | None = None
    vocab_size: int = VOCAB_SIZE
    end_id: int | None = None
    model_end_ids: tuple[int, ...] = ()
    tokens_per_step: int = 1
    model_max_seq_len: int = 131_072
    kv_block_bytes: int = 4096
    time_scale: float = 1.0
    transfer_bytes_per_s: float = 50e9
    host_link_bytes_per_s: float = 25e9
    node_id: int = 0
    process_id: int = 0
    instance_salt: bytes = b""
    n_gpus: int = 8
    init_s: float = 0.0
    pause: Callable[[float], object] | None = None
    fail_init: Exception | None = None
    logprob_form: LogprobForm = "dict"
    handoff_on_stop: bool = False
    prefers_cache_v2: bool = True
    conditions: Conditions = field(default_factory=Conditions)

    def __post_init__(self) -> None:
        if not self.vocab_size > 0:
            raise ValueError(f"vocab_size must be > 0, got {self.vocab_size}")
        if self.tokens_per_step < 1:
            raise ValueError(f"tokens_per_step must be at least 1: {self.tokens_per_step}")
        if self.kv_block_bytes < 16 or self.kv_block_bytes % 16:
            raise ValueError(
                f"kv_block_bytes must be a positive multiple of 16: {self.kv_block_bytes}"
            )
        if self.init_s > 0 and self.pause is None:
            raise ValueError("init_s needs pause, the function that waits")

    @property
    def tokenizer_end_id(self) -> int:
        """The tokenizer's end-of-text token."""
        return min(END_ID, self.vocab_size - 1) if self.end_id is None else self.end_id
