"""Constructor arguments of the simulated engine, with TensorRT-LLM's names and defaults, and its settings.

`TorchLlmArgs` has the fields that a worker sets or reads, whether or not they change what is simulated. Any
other keyword is refused, as TensorRT-LLM refuses it. Nested configurations are strict, and may come as a
dict. `SimSettings` has what a real engine has no argument for.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PositiveInt

from slagate.workers.kv_transfer.transport import KvTransport
from slagate.workers.profiles.profile import TpProfile
from slagate.workers.sim.sampling import LogprobForm

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
    use_kv_cache_manager_v2: bool | Literal["auto"] = False
    max_util_for_resume: float = 0.95


class CacheTransceiverConfig(_Strict):
    """`cache_transceiver_config`: handoffs need one that names a back-end."""

    backend: Literal["DEFAULT", "UCX", "NIXL", "MOONCAKE", "MPI"] | None = None
    transceiver_runtime: Literal["CPP", "PYTHON"] | None = None
    max_tokens_in_buffer: PositiveInt | None = None
    kv_transfer_timeout_ms: PositiveInt | None = None
    kv_transfer_sender_future_timeout_ms: PositiveInt = 1000


class DynamicBatchConfig(_Strict):
    """`scheduler_config.dynamic_batch_config`; without effect on this back-end."""

    enable_batch_size_tuning: bool
    enable_max_num_tokens_tuning: bool
    dynamic_batch_moving_average_window: int


class SchedulerConfig(_Strict):
    """`scheduler_config`: which requests are admitted."""

    capacity_scheduler_policy: Literal["GUARANTEED_NO_EVICT", "MAX_UTILIZATION", "STATIC_BATCH"] = (
        "GUARANTEED_NO_EVICT"
    )
    context_chunking_policy: Literal["FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS"] | None = None
    dynamic_batch_config: DynamicBatchConfig | None = None
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
    speculative_config: Any = None
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
    moe_config: dict[str, Any] | None = None
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


def parse_args(model: object, **values: Any) -> TorchLlmArgs:
    """Validated arguments. Raises `ValueError` naming the class and an unknown keyword or the field."""
    for name in values:
        if name not in TorchLlmArgs.model_fields:
            raise ValueError(f"{TorchLlmArgs.__name__} has no argument {name!r}")
    return TorchLlmArgs(model=str(model), **values)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimSettings:
    """The simulated machine and model, and the faults of the engine.

    `transport` serves one engine only, and only when `cache_transceiver_config` is given. `end_id` None is
    `END_ID`, or the last token of a smaller vocabulary. `instance_salt` makes this engine's block hashes
    differ from those of others. The constructor waits `init_s` seconds by `pause`, then raises `fail_init`
    if that is set. With `handoff_on_stop` a context_only request whose first token ends it still gives a
    handoff. Raises `ValueError` naming the field.
    """

    profile: TpProfile
    transport: KvTransport | None = None
    vocab_size: int = VOCAB_SIZE
    end_id: int | None = None
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

    def __post_init__(self) -> None:
        if not self.vocab_size > 0:
            raise ValueError(f"vocab_size must be > 0, got {self.vocab_size}")
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
