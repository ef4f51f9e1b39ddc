"""The arguments of `tensorrt_llm.LLM` that rules read, with the newest version's defaults.

A section is the model of a nested argument. What a name, type or choice may be is not judged here:
`facts.py` has that by version. A value that a rule could not compute with is left out.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)

INT32_MAX = (1 << 31) - 1
MAX_RANKS = 4096
"""More GPUs than one engine has ever spanned: a larger number is a mistake."""

# In the engine's C++ counts have 32 bits, sizes in bytes 64.
Count = Annotated[int, Field(gt=0, le=INT32_MAX)]
Whole = Annotated[int, Field(ge=0, le=INT32_MAX)]
Bytes = Annotated[int, Field(ge=0, le=(1 << 63) - 1)]
Ranks = Annotated[int, Field(gt=0, le=MAX_RANKS)]

Int32 = Annotated[int, Field(ge=-INT32_MAX, le=INT32_MAX)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """The model of a section: of what rules compute with, as lax about types as the engine.

    Fields that rules only compare are there as they were written.
    """

    model_config = ConfigDict(
        extra="allow",
        frozen=True,
        allow_inf_nan=False,
        coerce_numbers_to_str=True,
        protected_namespaces=(),
    )

    @model_validator(mode="before")
    @classmethod
    def _by_names(cls, value: Any) -> Any:
        """The section with text for each key: YAML has numbers, too."""
        is_section = isinstance(value, Mapping)
        return {str(key): one for key, one in value.items()} if is_section else value

    @field_validator("*", mode="wrap")
    @classmethod
    def _or_default(
        cls, value: Any, take: ValidatorFunctionWrapHandler, about: ValidationInfo
    ) -> Any:
        """The default in place of a null that stands for it, and of what no rule could compute with."""
        try:
            return take(value)
        except ValidationError:
            return cls.model_fields[str(about.field_name)].get_default(call_default_factory=True)


class KvEventsSection(Section):
    """`kv_cache_config.kv_events_config`: the engine's own stream of KV events over ZMQ."""

    enable_kv_cache_events: bool = False


class KvCacheSection(Section):
    """`kv_cache_config`: sizes, types and reuse of the KV cache."""

    enable_block_reuse: bool = True
    max_attention_window: list[Count] | None = None
    free_gpu_memory_fraction: Fraction = 0.9
    host_cache_size: Bytes | None = None  # bytes
    event_buffer_max_size: Whole = 0
    enable_partial_reuse: bool = True
    dtype: str = "auto"
    tokens_per_block: Count = 32
    use_kv_cache_manager_v2: bool | Literal["auto"] = "auto"
    disk_cache_size: Bytes | None = None  # bytes
    disk_cache_path: str | None = None
    pool_ratio: Annotated[list[float], Field(min_length=1)] | None = None
    kv_events_config: KvEventsSection | None = None


class CacheTransceiverSection(Section):
    """`cache_transceiver_config`: how the KV cache leaves a prefill worker and reaches a decode worker."""

    backend: str | None = None
    transceiver_runtime: str | None = "auto"
    max_tokens_in_buffer: Whole | None = None
    kv_transfer_timeout_ms: Count | None = 60_000
    kv_cache_bounce_size_mb: Whole = 0
    enable_pipelined_transfer: bool = False


class SchedulerSection(Section):
    """`scheduler_config`: which requests are admitted."""

    capacity_scheduler_policy: str = "GUARANTEED_NO_EVICT"


class AttentionDpSection(Section):
    """`attention_dp_config`: how attention-DP ranks share out requests."""

    enable_balance: bool = False
    timeout_iters: Int32 = 50
    batching_wait_iters: Int32 = 10


class CudaGraphSection(Section):
    """`cuda_graph_config`: the decode batches that are recorded once and replayed."""

    batch_sizes: list[Count] | None = None
    max_batch_size: Whole = 0
    enable_padding: bool = False

    @property
    def largest(self) -> int:
        """The largest recorded batch; 128 by default."""
        return max(self.batch_sizes) if self.batch_sizes else self.max_batch_size or 128


class MoeSection(Section):
    """`moe_config`: kernels of the experts, and where the experts are."""

    backend: str = "AUTO"
    max_num_tokens: Count | None = None
    load_balancer: Any = None  # a path, or the content of the file


class KvConnectorSection(Section):
    """`kv_connector_config`: a KV cache outside of the engine, by a preset or by module and classes."""

    connector: str | None = None
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


def _by_newer_name(value: object) -> object:
    """A type of drafting as 1.3 calls it; before, see `DecodingBaseConfig.from_dict`, id 1090804222."""
    newer = {"DraftTarget": "Draft_Target", "UserProvided": "User_Provided"}
    return newer.get(value, value) if isinstance(value, str) else value


class SpeculativeSection(Section):
    """`speculative_config`: tokens drafted ahead."""

    decoding_type: Annotated[str, BeforeValidator(_by_newer_name)]
    max_draft_len: Whole | None = None
    max_total_draft_tokens: Count | None = None
    speculative_model: str | None = None
    speculative_model_dir: str | None = None  # the older name of the same
    max_concurrency: Count | None = None
    # Batch size to draft length; the keys are ints in YAML, text in JSON.
    draft_len_schedule: Any = None
    load_format: str | None = None
    eagle3_one_model: bool | None = True
    eagle_choices: Any = None  # lists of numbers, or text of those
    use_dynamic_tree: bool | None = False
    dynamic_tree_max_topK: Int32 | None = None
    num_nextn_predict_layers: Count = 1
    use_mtp_vanilla: bool = False
    mtp_eagle_one_model: bool = True
    max_matching_ngram_size: Int32 | None = None  # 2 for NGram, -1 for SA
    enable_global_pool: bool = False
    global_pool_size: Int32 | None = None
    output_directory: str | None = None

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


# -1 is the engine's own "choose for me".
_Moe = Annotated[int, Field(ge=-1, le=MAX_RANKS)]


def _in_any_case(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


class EngineModel(Section):
    """All arguments of the engine, at their defaults where not given."""

    model: str | None = None
    custom_tokenizer: str | None = None
    skip_tokenizer_init: bool = False
    post_processor_hook: str | None = None
    dtype: str = "auto"
    load_format: Annotated[str, BeforeValidator(_in_any_case)] = "auto"
    backend: str = "pytorch"
    orchestrator_type: str | None = None
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

    max_batch_size: Count = 2048
    max_num_tokens: Count = 8192
    max_seq_len: Count | None = None
    max_input_len: Count = 1024
    max_beam_width: Count = 1
    enable_chunked_prefill: bool = False

    kv_cache_config: KvCacheSection = Field(default_factory=KvCacheSection)
    scheduler_config: SchedulerSection = Field(default_factory=SchedulerSection)
    cache_transceiver_config: CacheTransceiverSection | None = None
    speculative_config: SpeculativeSection | None = None
    kv_connector_config: KvConnectorSection | None = None
    moe_config: MoeSection = Field(default_factory=MoeSection)
    dwdp_config: DwdpSection | None = None
    cuda_graph_config: CudaGraphSection | None = Field(default_factory=CudaGraphSection)

    guided_decoding_backend: str | None = None

    disable_overlap_scheduler: bool = False
    enable_early_first_token_response: bool = False
    mm_encoder_only: bool = False
    encode_only: bool = False

    @property
    def world_size(self) -> int:
        """GPUs that the engine spans."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.context_parallel_size

    @property
    def parallelism(self) -> tuple[int, int, int, bool]:
        """TP, PP and CP size and whether attention DP is on: they decide which KV a rank has."""
        pipelines, contexts = self.pipeline_parallel_size, self.context_parallel_size
        return self.tensor_parallel_size, pipelines, contexts, self.enable_attention_dp

    @property
    def step_tokens_of_a_request(self) -> int:
        """Tokens of a step for one decoding request: its own and its drafts."""
        return 1 + (self.speculative_config.draft_tokens if self.speculative_config else 0)

    def up_to_blocks(self, n_tokens: int) -> int:
        """The number of tokens rounded up to whole KV blocks."""
        block = self.kv_cache_config.tokens_per_block
        return math.ceil(n_tokens / block) * block
