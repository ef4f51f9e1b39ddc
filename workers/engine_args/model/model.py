"""The arguments of `tensorrt_llm.LLM` that matter to a worker: names, types, ranges, choices, defaults."""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from slagate.workers.engine_args.model.sections import (
    MAX_RANKS,
    AttentionDpSection,
    CacheTransceiverSection,
    Count,
    CudaGraphSection,
    KvCacheSection,
    KvConnectorSection,
    MoeSection,
    Ranks,
    SchedulerSection,
    Section,
    SpeculativeSection,
    Whole,
)

UNSET_IF_NONE: Mapping[str, int] = MappingProxyType(
    {"max_batch_size": 2048, "max_num_tokens": 8192, "max_input_len": 1024, "max_beam_width": 1}
)
"""Arguments for which the engine reads an explicit null as "not given", and what it then takes."""

# -1 is the engine's own "choose for me".
_Moe = Annotated[int, Field(ge=-1, le=MAX_RANKS)]


def _in_any_case(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


class EngineModel(Section):
    """All arguments at their defaults but for what was given."""

    model: str | None = None
    tokenizer: Any = None
    tokenizer_mode: Literal["auto", "slow"] = "auto"
    custom_tokenizer: str | None = None
    skip_tokenizer_init: bool = False
    trust_remote_code: bool = False
    model_kwargs: dict[str, Any] | None = None
    dtype: str = "auto"
    load_format: Annotated[
        Literal["auto", "dummy", "vision_only"], BeforeValidator(_in_any_case)
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
    cuda_graph_config: CudaGraphSection | None = Field(default_factory=CudaGraphSection)

    guided_decoding_backend: Literal["xgrammar", "llguidance"] | None = None
    batched_logits_processor: Any = None
    enable_lora: bool = False
    lora_config: Any = None
    peft_cache_config: Any = None
    reasoning_parser: str | None = None
    gather_generation_logits: bool = False

    disable_overlap_scheduler: bool = False
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

    @property
    def world_size(self) -> int:
        """GPUs that the engine spans."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.context_parallel_size

    @property
    def parallelism(self) -> tuple[int, int, int, bool]:
        """What decides which part of the KV cache a rank has."""
        return (
            self.tensor_parallel_size,
            self.pipeline_parallel_size,
            self.context_parallel_size,
            self.enable_attention_dp,
        )

    @property
    def step_tokens_of_a_request(self) -> int:
        """Tokens that one decoding request takes of a step: its own and its drafts."""
        return 1 + (self.speculative_config.draft_tokens if self.speculative_config else 0)

    def up_to_blocks(self, n_tokens: int) -> int:
        """The number of tokens rounded up to whole KV blocks."""
        block = self.kv_cache_config.tokens_per_block
        return math.ceil(n_tokens / block) * block
