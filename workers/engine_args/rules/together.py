"""Arguments that are each valid alone and that TensorRT-LLM does not take together.

Read in `llmapi/llm_args.py`, ids 66278128801 (1.4), 55143598664 (a late candidate of 1.3), 7019226376 (an
early one) and 1090804222 (1.2), and in `_torch/pyexecutor/py_executor.py`, ids 736889464 (1.2), 67119085479
(1.3) and 57354091563 (1.4). What the engine finds in its own process comes as a RuntimeError: it does not
start then.
"""

from collections.abc import Callable, Iterator

from slagate.workers.engine_args.model.model import KvConnectorSection
from slagate.workers.engine_args.rules.case import EngineCase, Version
from slagate.workers.engine_args.rules.row import RuleRow, value_at
from slagate.workers.findings import Finding, error

CONNECTOR = "kv_connector_config"
CACHE, MAMBA = "kv_cache_config", "kv_cache_config.mamba_state_config"
MANAGER = "kv_cache_config.use_kv_cache_manager_v2"
REJECTION = "speculative_config.use_rejection_sampling"
_CLASSES = ("connector_module", "connector_scheduler_class", "connector_worker_class")
_NO_START = ": the engine does not start"


def _connected(
    key: str, is_there: Callable[[EngineCase], object], why: str, since: Version | None = None
) -> RuleRow:
    """A row of what a KV connector does not go with."""
    return RuleRow(
        f"error E611 {key}",
        lambda case: case.args.kv_connector_config is not None and is_there(case),
        f"is {{value}}, and a KV connector {why}",
        f"take it out, or {CONNECTOR}",
        since,
    )


def _waiting(name: str) -> RuleRow:
    """A row of `AttentionDpConfig.validate_attention_dp_config`."""
    return RuleRow(
        f"error E806 attention_dp_config.{name}",
        lambda case: (
            case.args.attention_dp_config is not None
            and case.args.attention_dp_config.enable_balance
            and getattr(case.args.attention_dp_config, name) < 0
        ),
        f"is {{value}}, and enable_balance is true, which waits that many steps{_NO_START}",
        "set it to 0 or more",
    )


def _clash(one: str, other: str) -> RuleRow:
    """A row of two values that validators of 1.4 refuse together: llm_args id 66278128801.

    Each is a key that is set, and not false, or a key and its value, as in "backend=pytorch".
    """

    def has(case: EngineCase, wanted: str) -> bool:
        key, is_one, value = wanted.partition("=")
        found = value_at(case, key)
        return str(found).lower() == value.lower() if is_one else bool(found)

    key = one.partition("=")[0]
    shown = other.replace("=", " is ") if "=" in other else f"{other} is set"
    return RuleRow(
        f"error E806 {key}",
        lambda case: has(case, one) and has(case, other),
        f"is {{value}}, and {shown}{_NO_START}",
        "keep one of the two",
        (1, 4),
    )


def _of_ray(key: str) -> RuleRow:
    """A row of `validate_ray_worker_extension_cls` or `validate_ray_placement_config`."""
    return RuleRow(
        f"error E806 {key}",
        lambda case: getattr(case.args, key) is not None and case.args.orchestrator_type != "ray",
        f"is {{value}}, and orchestrator_type is not ray{_NO_START}",
        "set orchestrator_type: ray, or take it out",
    )


def _is_mooncake(case: EngineCase) -> bool:
    """Whether the connector is Mooncake's store, which takes attention DP and sees to the host tier.

    `connectors/mooncake_store/validation.py` @016af0dd.
    """
    connector = case.args.kv_connector_config
    return connector is not None and "mooncake" in connector.name


def _has_windows(case: EngineCase) -> bool:
    """Whether there are different attention windows, of which none is longer than the context."""
    windows = case.cache.max_attention_window or []
    return len({min(window, case.args.max_seq_len or window) for window in windows}) > 1


def _has_other_blocks(case: EngineCase) -> bool:
    """Whether Helix has blocks of another size than the KV cache: `validate_helix_tokens_per_block`."""
    block = value_at(case, "cp_config.tokens_per_block")
    return (
        case.context_kind == "HELIX"
        and case.args.context_parallel_size > 1
        and block not in (None, case.cache.tokens_per_block)
    )


ROWS = (
    # py_executor `_maybe_init_kv_connector_manager`. The policy: py_executor_creator, ids 2399938814 and
    # 4285525045; windows are refused by kvCacheManager.cpp too, ids 126178160 and 51768545988.
    _connected(
        "pipeline_parallel_size",
        lambda case: case.args.pipeline_parallel_size > 1,
        f"reaches the cache of one stage only{_NO_START}",
    ),
    _connected(
        "scheduler_config.capacity_scheduler_policy",
        lambda case: case.args.scheduler_config.capacity_scheduler_policy != "GUARANTEED_NO_EVICT",
        f"needs GUARANTEED_NO_EVICT{_NO_START}",
    ),
    _connected(
        "kv_cache_config.max_attention_window",
        _has_windows,
        f"reaches one pool of blocks, and each window has its own{_NO_START}",
    ),
    _connected(
        "context_parallel_size",
        lambda case: case.args.context_parallel_size > 1,
        "reaches the cache of one rank only",
        (1, 4),
    ),
    _connected(
        "max_beam_width",
        lambda case: case.args.max_beam_width > 1,
        "does not tell beams apart",
        (1, 4),
    ),
    _connected(
        "enable_attention_dp",
        lambda case: case.args.enable_attention_dp and not _is_mooncake(case),
        "takes requests that only fill a rank for real ones",
        (1, 4),
    ),
    _connected(
        "kv_cache_config.host_cache_size",
        lambda case: case.cache.host_cache_size and not _is_mooncake(case),
        "reaches blocks on the GPU only",
        (1, 4),
    ),
    RuleRow(
        f"warning E612 {CONNECTOR}",
        lambda case: case.args.kv_connector_config and case.transceiver,
        "is there beside a cache transceiver, of which TensorRT-LLM itself warns",
        "take one of the two out, or try the pair before you rely on it",
    ),
    # DecodingBaseConfig `validate_max_concurrency_and_draft_len_schedule_mutually_exclusive`
    RuleRow(
        "error E709 speculative_config.max_concurrency",
        lambda case: (
            case.drafting is not None
            and case.drafting.max_concurrency is not None
            and case.drafting.draft_len_schedule is not None
        ),
        "is {value}, and draft_len_schedule says from which batch on nothing is drafted",
        "keep one of the two",
        (1, 4),
    ),
    _waiting("timeout_iters"),
    _waiting("batching_wait_iters"),
    RuleRow(
        "error E806 cp_config.tokens_per_block",
        _has_other_blocks,
        "is {value}, and kv_cache_config.tokens_per_block {args.kv_cache_config.tokens_per_block}: Helix "
        "needs equal blocks",
        "set both to one number",
    ),
    # seen in the source of the experts' back-ends, and not run
    RuleRow(
        "warning E806 moe_expert_parallel_size",
        lambda case: (
            case.args.context_parallel_size > 1
            and case.context_kind != "HELIX"
            and (case.args.moe_expert_parallel_size or 1) > 1
        ),
        "is {value}, and with context_parallel_size above 1 experts are spread with Helix only",
        "set cp_config.cp_type: HELIX, or take it out",
    ),
    # `get_guided_decoding_config`
    RuleRow(
        "error E806 guided_decoding_backend",
        lambda case: case.args.guided_decoding_backend and case.args.skip_tokenizer_init,
        f"is {{value}}, and skip_tokenizer_init leaves it no tokenizer{_NO_START}",
        "take one of the two out",
    ),
    # `validate_encoder_modes`
    RuleRow(
        "error E806 encode_only",
        lambda case: case.args.encode_only and case.args.mm_encoder_only,
        f"is true, and mm_encoder_only as well{_NO_START}",
        "keep one of the two",
    ),
    # `LLM.generate_async` (llmapi/llm.py id 55216765702)
    RuleRow(
        "error E807 encode_only",
        lambda case: case.args.encode_only,
        "is true, and such an engine refuses every request of a worker",
        "take it out",
    ),
    # `validate_gms_moe_compat`
    RuleRow(
        "error E806 moe_config.load_balancer",
        lambda case: case.args.load_format == "gms" and case.args.moe_config.load_balancer,
        "is there, and load_format gms: what a balancer allocates would be missing in the shared weights",
        "take it out, or use load_format: auto",
    ),
    _clash("disable_mm_encoder", "mm_encoder_only"),
    _clash("prefill_cuda_graph_backend=breakable", "torch_compile_config"),
    _clash("prefill_cuda_graph_backend=breakable", "lora_config"),
    _clash("prefill_cuda_graph_backend=breakable", "enable_lora"),
    _clash("enable_speculative_beam_history_d2h", "sampler_force_async_worker"),
    _clash(f"{CACHE}.enable_kv_pool_rebalance", f"{CACHE}.dtype=fp8_ds_mla"),
    _clash(f"{MAMBA}.enable_branch_snapshot", f"{MANAGER}=false"),
    _clash(f"{MAMBA}.additional_snapshot_offsets_from_start", f"{MANAGER}=false"),
    _clash(f"{MAMBA}.additional_snapshot_offsets_from_end", f"{MANAGER}=false"),
    _clash(f"{CACHE}.mamba_state_cache_interval", f"{MAMBA}.periodic_snapshot_interval"),
    _clash(REJECTION, "speculative_config.sa_config"),
    _clash(REJECTION, "speculative_config.decoding_type=NGram"),
    _clash(REJECTION, "speculative_config.decoding_type=SA"),
    RuleRow(
        "error E806 encoder_cuda_graph_config",
        lambda case: (
            value_at(case, "encoder_cuda_graph_config") is not None
            and value_at(case, "encoder_max_batch_size") is None
        ),
        "is there, and encoder_max_batch_size is missing",
        "set it, or take the section out",
        (1, 4),
    ),
    RuleRow(
        "error E806 enable_mla_skip_correction",
        lambda case: (
            value_at(case, "enable_mla_skip_correction")
            and str(value_at(case, "attn_backend") or "TRTLLM").upper() != "TRTLLM"
        ),
        "is true, which attn_backend TRTLLM alone has",
        "take it out, or attn_backend",
        (1, 4),
    ),
    _of_ray("ray_worker_extension_cls"),
    _of_ray("ray_placement_config"),
    # BaseLlmArgs `validate_and_init_tokenizer`
    RuleRow(
        "error E806 post_processor_hook",
        lambda case: case.args.post_processor_hook and case.args.skip_tokenizer_init,
        f"is {{value}}, and skip_tokenizer_init leaves it no text{_NO_START}",
        "take one of the two out",
    ),
    # py_executor `PyExecutor.__init__`
    RuleRow(
        "error E806 dwdp_config.dwdp_size",
        lambda case: (
            case.args.dwdp_config is not None
            and case.args.dwdp_config.dwdp_size > 1
            and not case.args.disable_overlap_scheduler
        ),
        f"is {{value}}, and with the overlap scheduler weights cannot be fetched ahead{_NO_START}",
        "set disable_overlap_scheduler: true",
    ),
    # `TorchLlmArgs.validate_early_first_token_response`
    RuleRow(
        "note E808 enable_early_first_token_response",
        lambda case: (
            case.args.enable_early_first_token_response
            and (case.args.disable_overlap_scheduler or case.transceiver)
        ),
        "is true, and the engine switches it off beside disable_overlap_scheduler or a cache transceiver",
        "take it out",
    ),
)


def check_connector(case: EngineCase) -> Iterator[Finding]:
    """Yields E105 for a KV connector without preset or class.

    `KvCacheConnectorConfig._resolve_preset` and `connectors/registry.py` @26bd2ecc.
    """
    section = case.args.kv_connector_config
    if section is None or case.has(f"{CONNECTOR}.connector"):
        return
    known = {f"{CONNECTOR}.{name}" for name in KvConnectorSection.model_fields}
    if any(key.startswith(f"{CONNECTOR}.") and key not in known for key in case.given):
        return  # a newer engine's section
    for name in _CLASSES:
        if getattr(section, name) is None:
            advice = f"set {CONNECTOR}.{name}, or a preset: connector: kvbm"
            yield error("E105", f"{CONNECTOR}.{name}", "is required in this section", advice)
