"""The arguments of `tensorrt_llm.LLM` that matter to a worker: names, types, ranges, choices, defaults.

A section is the model of a nested argument. This model stands apart from `sim/args.py`, which belongs to
the double of the engine: what a double accepts must not come from the checker that is tried against it.
A test compares the two.
"""

import math
from collections.abc import Mapping, Set
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

POWER_OF_TWO = "power_of_two"
"""The kind of the validation error of a number that is no power of two."""


def _power_of_two(number: int) -> int:
    """The number, if it is one: `KVBlockArray`, kvCacheUtils.h id 703465850, takes no other."""
    if number & (number - 1):
        raise PydanticCustomError(POWER_OF_TWO, "a power of two")
    return number


INT32_MAX = (1 << 31) - 1
MAX_RANKS = 4096
"""More GPUs than one engine has ever spanned: a larger number is a mistake."""

# In the engine's C++ counts have 32 bits, sizes in bytes 64.
Count = Annotated[int, Field(gt=0, le=INT32_MAX)]
Whole = Annotated[int, Field(ge=0, le=INT32_MAX)]
Bytes = Annotated[int, Field(ge=0, le=(1 << 63) - 1)]
Ranks = Annotated[int, Field(gt=0, le=MAX_RANKS)]

Int32 = Annotated[int, Field(ge=-INT32_MAX, le=INT32_MAX)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Sizes = Annotated[list[Count], Field(min_length=1)]


class Section(BaseModel):
    """The model of a section: refuses unknown keys, text for numbers, and numbers that are not finite."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, protected_namespaces=()
    )


class KvEventsSection(Section):
    """`kv_cache_config.kv_events_config`: the engine's own stream of KV events over ZMQ."""

    enable_kv_cache_events: bool = False
    publisher: Literal["zmq", "null"] | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: Count = 10_000
    hwm: Whole = 100_000
    max_queue_size: Whole = 100_000
    topic: str = ""


class KvCacheSection(Section):
    """`kv_cache_config`: sizes, types and reuse of the KV cache."""

    enable_block_reuse: bool = True
    max_tokens: Count | None = None
    max_attention_window: Sizes | None = None
    sink_token_length: Whole | None = None
    free_gpu_memory_fraction: Fraction = 0.9
    host_cache_size: Bytes | None = None  # bytes
    onboard_blocks: bool = True
    cross_kv_cache_fraction: Fraction | None = None
    secondary_offload_min_priority: Annotated[int, Field(ge=0, le=100)] | None = None
    event_buffer_max_size: Whole = 0
    attention_dp_events_gather_period_ms: Count = 5
    enable_partial_reuse: bool = True
    copy_on_partial_reuse: bool = True
    use_uvm: bool = False
    max_gpu_total_bytes: Bytes = 0
    dtype: str = "auto"
    mamba_ssm_cache_dtype: str = "auto"
    tokens_per_block: Annotated[Count, AfterValidator(_power_of_two)] = 32
    use_kv_cache_manager_v2: Literal[False, True, "auto"] = "auto"
    kv_cache_event_hash_algo: Literal["auto", "v1_block_key", "v2_sha256", "v2_sha256_64"] = "auto"
    max_util_for_resume: Fraction = 0.95
    disk_cache_size: Bytes | None = None  # bytes
    disk_cache_path: str | None = None
    pool_ratio: Annotated[list[float], Field(min_length=1)] | None = None
    kv_events_config: KvEventsSection | None = None
    iteration_stats_interval: Count = 1


class CacheTransceiverSection(Section):
    """`cache_transceiver_config`: how the KV cache leaves a prefill worker and reaches a decode worker."""

    backend: Literal["DEFAULT", "UCX", "NIXL", "MOONCAKE", "MPI"] | None = None
    transceiver_runtime: Literal["CPP", "PYTHON", "auto"] | None = "auto"
    max_tokens_in_buffer: Whole | None = None
    kv_transfer_timeout_ms: Count | None = None
    kv_transfer_sender_future_timeout_ms: Count | None = 1000
    kv_transfer_poll_interval_ms: Count | None = None
    kv_cache_bounce_size_mb: Whole = 0
    enable_pipelined_transfer: bool = False


class DynamicBatchSection(Section):
    """`scheduler_config.dynamic_batch_config`; takes effect on the old TensorRT back-end only."""

    enable_batch_size_tuning: bool
    enable_max_num_tokens_tuning: bool
    dynamic_batch_moving_average_window: Count


class SchedulerSection(Section):
    """`scheduler_config`: which requests are admitted."""

    capacity_scheduler_policy: Literal["GUARANTEED_NO_EVICT", "MAX_UTILIZATION", "STATIC_BATCH"] = (
        "GUARANTEED_NO_EVICT"
    )
    context_chunking_policy: Literal["FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS"] | None = None
    dynamic_batch_config: DynamicBatchSection | None = None
    waiting_queue_policy: Literal["fcfs", "priority"] = "fcfs"


class AttentionDpSection(Section):
    """`attention_dp_config`: how attention-DP ranks share out requests."""

    enable_balance: bool = False
    timeout_iters: Int32 = 50
    batching_wait_iters: Int32 = 10
    kv_cache_routing_conversation_affinity: bool = False


class CudaGraphSection(Section):
    """`cuda_graph_config`: the decode batches that are recorded once and replayed."""

    batch_sizes: Sizes | None = None
    max_batch_size: Whole = 0
    enable_padding: bool = False

    @property
    def largest(self) -> int:
        """The largest recorded batch; 128 by default."""
        return max(self.batch_sizes) if self.batch_sizes else self.max_batch_size or 128


class MoeSection(Section):
    """`moe_config`: kernels of the experts, and where the experts are."""

    backend: Literal[
        "AUTO", "CUTLASS", "CUTEDSL", "WIDEEP", "TRTLLM", "DEEPGEMM", "VANILLA", "TRITON"
    ] = "AUTO"
    max_num_tokens: Count | None = None
    load_balancer: Any = None  # a path, or the content of the file
    disable_finalize_fusion: bool = False
    use_low_precision_moe_combine: bool = False


class KvConnectorSection(Section):
    """`kv_connector_config`: a KV cache outside of the engine, by a preset or by module and classes."""

    connector: Literal["kvbm", "lmcache", "lmcache-mp", "mooncake-store"] | None = None
    connector_module: str | None = None
    connector_scheduler_class: str | None = None
    connector_worker_class: str | None = None
    server_url: str | None = None

    @property
    def name(self) -> str:
        """The preset, or the module in its place; empty for neither."""
        return self.connector or self.connector_module or ""


class DwdpSection(Section):
    """`dwdp_config`: experts' weights fetched from the other workers of a group, instead of sent tokens."""

    dwdp_size: Whole = 1
    num_groups: Whole = 1
    num_experts_per_worker: Whole = 0
    num_prefetch_experts: Whole = 0
    contention_opt: bool = False


class TelemetrySection(Section):
    """`telemetry_config`: what newer engines report to NVIDIA, of themselves, unless it is disabled."""

    disabled: bool = False
    usage_context: str = "unknown"


DecodingType = Literal[
    "Draft_Target",
    "Eagle",
    "Eagle3",
    "Lookahead",
    "Medusa",
    "MTP",
    "NGram",
    "User_Provided",
    "SaveState",
    "PARD",
    "DFlash",
    "SA",
    "AUTO",
]


class SpeculativeSection(Section):
    """`speculative_config`: tokens drafted ahead. `FIELDS_OF_TYPE` says which fields a type has."""

    decoding_type: DecodingType
    max_draft_len: Whole | None = None
    max_total_draft_tokens: Count | None = None
    speculative_model: str | None = None
    speculative_model_dir: str | None = None  # the older name of the same
    max_concurrency: Count | None = None
    # Batch size to draft length; the keys are ints in YAML, text in JSON.
    draft_len_schedule: Any = None
    load_format: str | None = None
    acceptance_window: Whole | None = None
    acceptance_length_threshold: Annotated[float, Field(ge=0)] | None = None
    allow_advanced_sampling: bool = False
    eagle3_one_model: bool | None = True
    eagle3_layers_to_capture: Any = None  # a list or a set
    eagle3_model_arch: Literal["llama3", "mistral_large3"] = "llama3"
    eagle_choices: Any = None  # lists of numbers, or text of those
    use_dynamic_tree: bool | None = False
    dynamic_tree_max_topK: Int32 | None = None
    num_nextn_predict_layers: Count = 1
    use_mtp_vanilla: bool = False
    mtp_eagle_one_model: bool = True
    use_relaxed_acceptance_for_thinking: bool = False
    relaxed_topk: Count = 1
    relaxed_delta: Annotated[float, Field(ge=0)] = 0.0
    max_matching_ngram_size: Int32 | None = None  # 2 for NGram, -1 for SA
    is_keep_all: bool = True
    is_use_oldest: bool = True
    is_public_pool: bool = True
    enable_global_pool: bool = False
    global_pool_size: Int32 | None = None
    mask_token_id: Int32 | None = None
    target_layer_ids: list[Int32] | None = None
    max_window_size: Count = 4
    max_ngram_size: Count = 3
    max_verification_set_size: Count = 4
    medusa_choices: Any = None
    num_medusa_heads: Count | None = None
    drafter: Any = None
    resource_manager: Any = None
    output_directory: str | None = None
    write_interval: Count = 20
    file_prefix: str = "data"

    @property
    def draft_model(self) -> str | None:
        """The draft model, under the newer name or the older one."""
        return self.speculative_model or self.speculative_model_dir

    @property
    def draft_tokens(self) -> int:
        """Drafted tokens that one step may have for a request, besides the request's own."""
        length = self.max_draft_len or 0
        if self.decoding_type == "MTP":
            return length or self.num_nextn_predict_layers
        if self.decoding_type == "PARD":
            return max(0, 2 * length - 1)  # the drafts, and masks for all but one of them
        if self.is_eagle and isinstance(self.eagle_choices, list):
            return len(self.eagle_choices)
        if self.is_eagle:
            return self.max_total_draft_tokens or length * max(1, self.dynamic_tree_max_topK or 1)
        return length

    @property
    def is_eagle(self) -> bool:
        """Whether the type is Eagle3, or Eagle, which the PyTorch back-end takes for Eagle3."""
        return self.decoding_type in ("Eagle", "Eagle3")


_TREE = {"use_dynamic_tree", "dynamic_tree_max_topK"}
_EAGLE = {
    "eagle3_one_model",
    "eagle3_layers_to_capture",
    "eagle3_model_arch",
    "eagle_choices",
} | _TREE
_RELAXED = {"use_relaxed_acceptance_for_thinking", "relaxed_topk", "relaxed_delta"}
FIELDS_OF_TYPE: Mapping[str, Set[str]] = {
    "Eagle": _EAGLE,
    "Eagle3": _EAGLE,
    "MTP": {"num_nextn_predict_layers", "use_mtp_vanilla", "mtp_eagle_one_model"}
    | _TREE
    | _RELAXED,
    "PARD": {"mask_token_id"},
    "DFlash": {"mask_token_id", "target_layer_ids"},
    "SA": {"max_matching_ngram_size", "enable_global_pool", "global_pool_size"},
    "NGram": {"max_matching_ngram_size", "is_keep_all", "is_use_oldest", "is_public_pool"},
    "Lookahead": {"max_window_size", "max_ngram_size", "max_verification_set_size"},
    "Medusa": {"medusa_choices", "num_medusa_heads"},
    "User_Provided": {"drafter", "resource_manager"},
    "SaveState": {"output_directory", "write_interval", "file_prefix", "eagle3_layers_to_capture"},
}
"""The fields of one type alone; a type that is not here has only the fields of all types."""


UNSET_IF_NONE: Mapping[str, int] = {
    "max_batch_size": 2048,
    "max_num_tokens": 8192,
    "max_input_len": 1024,
    "max_beam_width": 1,
}
"""Arguments for which the engine reads an explicit null as "not given", and their defaults."""

# -1 is the engine's own "choose for me".
_Moe = Annotated[int, Field(ge=-1, le=MAX_RANKS)]


def _in_any_case(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


class EngineModel(Section):
    """All arguments of the engine, at their defaults where not given."""

    model: str | None = None
    tokenizer: Any = None
    tokenizer_mode: Literal["auto", "slow"] = "auto"
    custom_tokenizer: str | None = None
    skip_tokenizer_init: bool = False
    post_processor_hook: str | None = None
    trust_remote_code: bool = False
    model_kwargs: dict[str, Any] | None = None
    dtype: str = "auto"
    load_format: Annotated[
        Literal["auto", "dummy", "vision_only", "gms"], BeforeValidator(_in_any_case)
    ] = "auto"
    revision: str | None = None
    tokenizer_revision: str | None = None
    backend: Literal["pytorch", "_autodeploy"] = "pytorch"
    orchestrator_type: Literal["rpc", "ray"] | None = None
    ray_worker_extension_cls: str | None = None
    ray_placement_config: dict[str, Any] | None = None
    ray_worker_nsight_options: dict[str, str] | None = None
    env_overrides: dict[str, str] | None = None

    tensor_parallel_size: Ranks = 1
    pipeline_parallel_size: Ranks = 1
    context_parallel_size: Ranks = 1
    gpus_per_node: Ranks | None = None
    moe_cluster_parallel_size: _Moe | None = None
    moe_tensor_parallel_size: _Moe | None = None
    moe_expert_parallel_size: _Moe | None = None
    enable_attention_dp: bool = False
    enable_lm_head_tp_in_adp: bool = False
    attention_dp_config: AttentionDpSection | None = None
    pp_partition: list[Count] | None = None
    cp_config: dict[str, Any] | None = None

    max_batch_size: Count = UNSET_IF_NONE["max_batch_size"]
    max_num_tokens: Count = UNSET_IF_NONE["max_num_tokens"]
    max_seq_len: Count | None = None
    max_input_len: Count = UNSET_IF_NONE["max_input_len"]
    max_beam_width: Count = UNSET_IF_NONE["max_beam_width"]
    enable_chunked_prefill: bool = False

    kv_cache_config: KvCacheSection = Field(default_factory=KvCacheSection)
    scheduler_config: SchedulerSection = Field(default_factory=SchedulerSection)
    cache_transceiver_config: CacheTransceiverSection | None = None
    speculative_config: SpeculativeSection | None = None
    sparse_attention_config: dict[str, Any] | None = None
    kv_connector_config: KvConnectorSection | None = None
    moe_config: MoeSection = Field(default_factory=MoeSection)
    dwdp_config: DwdpSection | None = None
    cuda_graph_config: CudaGraphSection | None = Field(default_factory=CudaGraphSection)

    guided_decoding_backend: Literal["xgrammar", "llguidance"] | None = None
    batched_logits_processor: Any = None
    enable_lora: bool = False
    lora_config: Any = None
    peft_cache_config: Any = None
    reasoning_parser: str | None = None
    gather_generation_logits: bool = False

    disable_overlap_scheduler: bool = False
    enable_early_first_token_response: bool = False
    attn_backend: str = "TRTLLM"
    sampler_type: str = "auto"
    nvfp4_gemm_config: dict[str, Any] | None = None
    torch_compile_config: dict[str, Any] | None = None
    enable_autotuner: bool = True
    enable_min_latency: bool = False
    enable_layerwise_nvtx_marker: bool = False
    force_dynamic_quantization: bool = False
    allreduce_strategy: Literal[
        "AUTO",
        "NCCL",
        "UB",
        "MINLATENCY",
        "ONESHOT",
        "TWOSHOT",
        "LOWPRECISION",
        "MNNVL",
        "NCCL_SYMMETRIC",
    ] = "AUTO"
    checkpoint_loader: Any = None
    checkpoint_format: str | None = None
    mm_encoder_only: bool = False
    encode_only: bool = False
    disable_flashinfer_sampling: bool = False
    garbage_collection_gen0_threshold: Count = 20_000
    enable_sleep: bool = False
    sleep_config: dict[str, Any] | None = None

    stream_interval: Count = 1
    batch_wait_timeout_ms: Annotated[float, Field(ge=0)] = 0
    batch_wait_timeout_iters: Whole = 0
    batch_wait_max_tokens_ratio: Annotated[float, Field(ge=0, le=1)] = 0
    num_postprocess_workers: Whole = 0
    postprocess_tokenizer_dir: str | None = None

    return_perf_metrics: bool = False
    perf_metrics_max_requests: Whole = 0
    iter_stats_max_iterations: Count | None = None
    request_stats_max_iterations: Count | None = None
    enable_iter_perf_stats: bool = False
    enable_iter_req_stats: bool = False
    print_iter_log: bool = False
    max_stats_len: Count = 1000
    otlp_traces_endpoint: str | None = None
    telemetry_config: TelemetrySection = Field(default_factory=TelemetrySection)

    @property
    def world_size(self) -> int:
        """GPUs that the engine spans."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.context_parallel_size

    @property
    def parallelism(self) -> tuple[int, int, int, bool]:
        """TP, PP and CP size and whether attention DP is on: they decide which KV a rank has."""
        return (
            self.tensor_parallel_size,
            self.pipeline_parallel_size,
            self.context_parallel_size,
            self.enable_attention_dp,
        )

    @property
    def step_tokens_of_a_request(self) -> int:
        """Tokens of a step for one decoding request: its own and its drafts."""
        return 1 + (self.speculative_config.draft_tokens if self.speculative_config else 0)

    def up_to_blocks(self, n_tokens: int) -> int:
        """The number of tokens rounded up to whole KV blocks."""
        block = self.kv_cache_config.tokens_per_block
        return math.ceil(n_tokens / block) * block
