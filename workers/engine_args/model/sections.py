"""The sections of TensorRT-LLM's arguments: names, types, ranges and choices, as its own models have them.

They stand apart from `sim/args.py`, which plays the engine: what a double accepts must not come from the
checker that is tried against it. A test compares the two.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

POWER_OF_TWO = "power_of_two"
"""The kind of error of a number that is none."""


def _power_of_two(number: int) -> int:
    if number & (number - 1):
        raise PydanticCustomError(POWER_OF_TWO, "a power of two")
    return number


INT32_MAX = (1 << 31) - 1
MAX_RANKS = 4096
"""More GPUs than one engine has ever spanned; a larger number is a slip."""

# The engine's C++ has 32 bits for counts, and 64 for bytes.
Count = Annotated[int, Field(gt=0, le=INT32_MAX)]
Whole = Annotated[int, Field(ge=0, le=INT32_MAX)]
Bytes = Annotated[int, Field(ge=0, le=(1 << 63) - 1)]
Ranks = Annotated[int, Field(gt=0, le=MAX_RANKS)]

Fraction = Annotated[float, Field(gt=0, le=1)]
Sizes = Annotated[list[Count], Field(min_length=1)]


class Section(BaseModel):
    """Refuses unknown keys, text for numbers, and what is not finite."""

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
    use_kv_cache_manager_v2: Literal[False, True, "auto"] = False
    max_util_for_resume: Fraction = 0.95
    disk_cache_size: Bytes | None = None  # bytes
    disk_cache_path: str | None = None
    kv_events_config: KvEventsSection | None = None
    iteration_stats_interval: Count = 1


class CacheTransceiverSection(Section):
    """`cache_transceiver_config`: how the KV cache leaves a prefill worker and reaches a decode worker."""

    backend: Literal["DEFAULT", "UCX", "NIXL", "MOONCAKE", "MPI"] | None = None
    transceiver_runtime: Literal["CPP", "PYTHON", "auto"] | None = None
    max_tokens_in_buffer: Count | None = None
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
    """`scheduler_config`: which requests are let in."""

    capacity_scheduler_policy: Literal["GUARANTEED_NO_EVICT", "MAX_UTILIZATION", "STATIC_BATCH"] = (
        "GUARANTEED_NO_EVICT"
    )
    context_chunking_policy: Literal["FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS"] | None = None
    dynamic_batch_config: DynamicBatchSection | None = None
    waiting_queue_policy: Literal["fcfs", "priority"] = "fcfs"


class AttentionDpSection(Section):
    """`attention_dp_config`: how attention-DP ranks share out requests."""

    enable_balance: bool = False
    timeout_iters: Whole = 50
    batching_wait_iters: Whole = 10
    kv_cache_routing_conversation_affinity: bool = False


class CudaGraphSection(Section):
    """`cuda_graph_config`: the decode batches that are recorded once and replayed."""

    batch_sizes: Sizes | None = None
    max_batch_size: Whole = 0
    enable_padding: bool = False

    @property
    def largest(self) -> int:
        """The largest recorded batch; 128 where nothing says it."""
        return max(self.batch_sizes) if self.batch_sizes else self.max_batch_size or 128


class MoeSection(Section):
    """`moe_config`: kernels of the experts, and where the experts are."""

    backend: Literal[
        "AUTO", "CUTLASS", "CUTEDSL", "WIDEEP", "TRTLLM", "DEEPGEMM", "VANILLA", "TRITON"
    ] = "AUTO"
    max_num_tokens: Count | None = None
    load_balancer: Any = None  # a path, or the file's content
    disable_finalize_fusion: bool = False
    use_low_precision_moe_combine: bool = False


class KvConnectorSection(Section):
    """`kv_connector_config`: a KV cache outside of the engine, such as KVBM."""

    connector_module: str
    connector_scheduler_class: str
    connector_worker_class: str


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
    "SA",
    "AUTO",
]


class SpeculativeSection(Section):
    """`speculative_config`: tokens drafted ahead. Which fields a type has: `FIELDS_OF_TYPE`."""

    decoding_type: DecodingType
    max_draft_len: Whole | None = None
    max_total_draft_tokens: Count | None = None
    speculative_model: str | None = None
    speculative_model_dir: str | None = None  # the older name of the same
    max_concurrency: Count | None = None
    draft_len_schedule: Any = (
        None  # batch size to draft length; YAML's keys are ints, JSON's are text
    )
    load_format: str | None = None
    acceptance_window: Whole | None = None
    acceptance_length_threshold: Annotated[float, Field(ge=0)] | None = None
    allow_advanced_sampling: bool = False
    eagle3_one_model: bool | None = True
    eagle3_layers_to_capture: Any = None  # a list or a set
    eagle3_model_arch: Literal["llama3", "mistral_large3"] = "llama3"
    num_nextn_predict_layers: Count = 1
    use_relaxed_acceptance_for_thinking: bool = False
    relaxed_topk: Count = 1
    relaxed_delta: Annotated[float, Field(ge=0)] = 0.0
    max_matching_ngram_size: Count = 2
    is_keep_all: bool = True
    is_use_oldest: bool = True
    is_public_pool: bool = True
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
        """The draft model, under either name."""
        return self.speculative_model or self.speculative_model_dir

    @property
    def draft_tokens(self) -> int:
        """Tokens that a request may have besides its own in one step."""
        if self.decoding_type == "MTP":
            return self.max_draft_len or self.num_nextn_predict_layers
        return self.max_total_draft_tokens or self.max_draft_len or 0


_EAGLE = frozenset({"eagle3_one_model", "eagle3_layers_to_capture", "eagle3_model_arch"})
FIELDS_OF_TYPE: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "Eagle": _EAGLE,
        "Eagle3": _EAGLE,
        "MTP": frozenset(
            {
                "num_nextn_predict_layers",
                "use_relaxed_acceptance_for_thinking",
                "relaxed_topk",
                "relaxed_delta",
            }
        ),
        "NGram": frozenset(
            {"max_matching_ngram_size", "is_keep_all", "is_use_oldest", "is_public_pool"}
        ),
        "Lookahead": frozenset({"max_window_size", "max_ngram_size", "max_verification_set_size"}),
        "Medusa": frozenset({"medusa_choices", "num_medusa_heads"}),
        "User_Provided": frozenset({"drafter", "resource_manager"}),
        "SaveState": frozenset(
            {"output_directory", "write_interval", "file_prefix", "eagle3_layers_to_capture"}
        ),
    }
)
"""What each type has besides the fields of all; a type that is not here has no others."""
