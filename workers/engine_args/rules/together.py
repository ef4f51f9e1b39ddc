"""Arguments that are each valid alone and that TensorRT-LLM does not take together, as one table.

Read in `llmapi/llm_args.py`, ids 55143598664 (a late candidate of 1.3), 7019226376 (an early one) and
1090804222 (1.2), and in `_torch/pyexecutor/py_executor.py`, ids 736889464 (1.2), 67119085479 (1.3) and
57354091563 (1.4). What the engine finds in its own process comes as a RuntimeError: it does not start then.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from slagate.workers.engine_args.model.merge import in_brief
from slagate.workers.engine_args.model.model import EngineModel, KvConnectorSection
from slagate.workers.engine_args.rules.case import EngineCase
from slagate.workers.findings import Finding, error, warning

CONNECTOR = "kv_connector_config"
_CLASSES = ("connector_module", "connector_scheduler_class", "connector_worker_class")
_Test = Callable[[EngineModel], bool]


class RefusedTogether(NamedTuple):
    """One combination of arguments, and what is said of it."""

    code: str
    key: str
    """The argument that is told; it has a value where the combination is there."""
    is_there: _Test
    why: str
    advice: str
    since: tuple[int, int] | None = None
    """The version that refuses it, where earlier ones start; None where all that were read refuse it."""


def _connected(
    key: str, is_there: _Test, why: str, since: tuple[int, int] | None = None
) -> RefusedTogether:
    """A row of what a KV connector does not go with."""
    return RefusedTogether(
        "E611",
        key,
        lambda args: args.kv_connector_config is not None and is_there(args),
        f"a KV connector {why}",
        f"take it out, or {CONNECTOR}",
        since,
    )


def _waiting(name: str) -> RefusedTogether:
    """A row of `AttentionDpConfig.validate_attention_dp_config`."""
    return RefusedTogether(
        "E806",
        f"attention_dp_config.{name}",
        lambda args: (
            args.attention_dp_config is not None
            and args.attention_dp_config.enable_balance
            and bool(getattr(args.attention_dp_config, name) < 0)
        ),
        "enable_balance is true, which waits that many steps",
        "set it to 0 or more",
    )


def _of_ray(key: str) -> RefusedTogether:
    """A row of `validate_ray_worker_extension_cls` or `validate_ray_placement_config`."""
    return RefusedTogether(
        "E806",
        key,
        lambda args: getattr(args, key) is not None and args.orchestrator_type != "ray",
        "orchestrator_type is not ray",
        "set orchestrator_type: ray, or take it out",
    )


def _is_mooncake(args: EngineModel) -> bool:
    """Whether the connector is Mooncake's store, which takes attention DP and sees to the host tier.

    `connectors/mooncake_store/validation.py` @016af0dd.
    """
    return args.kv_connector_config is not None and "mooncake" in args.kv_connector_config.name


def _has_windows(args: EngineModel) -> bool:
    """Whether there are different attention windows, of which none is longer than the context."""
    windows = args.kv_cache_config.max_attention_window or []
    return len({min(window, args.max_seq_len or window) for window in windows}) > 1


def _has_other_blocks(args: EngineModel) -> bool:
    """Whether Helix has blocks of another size than the KV cache: `validate_helix_tokens_per_block`."""
    config = args.cp_config or {}
    is_helix = str(config.get("cp_type")).upper() == "HELIX" and args.context_parallel_size > 1
    return is_helix and config.get("tokens_per_block") not in (
        None,
        args.kv_cache_config.tokens_per_block,
    )


_TOGETHER = (
    # py_executor `_maybe_init_kv_connector_manager`. The policy: py_executor_creator, ids 2399938814 and
    # 4285525045; windows are refused by kvCacheManager.cpp too, ids 126178160 and 51768545988.
    _connected(
        "pipeline_parallel_size",
        lambda args: args.pipeline_parallel_size > 1,
        "reaches the cache of one stage only",
    ),
    _connected(
        "scheduler_config.capacity_scheduler_policy",
        lambda args: args.scheduler_config.capacity_scheduler_policy != "GUARANTEED_NO_EVICT",
        "needs GUARANTEED_NO_EVICT",
    ),
    _connected(
        "kv_cache_config.max_attention_window",
        _has_windows,
        "reaches one pool of blocks, and each window has its own",
    ),
    _connected(
        "context_parallel_size",
        lambda args: args.context_parallel_size > 1,
        "reaches the cache of one rank only",
        (1, 4),
    ),
    _connected(
        "max_beam_width", lambda args: args.max_beam_width > 1, "does not tell beams apart", (1, 4)
    ),
    _connected(
        "enable_attention_dp",
        lambda args: args.enable_attention_dp and not _is_mooncake(args),
        "takes requests that only fill a rank for real ones",
        (1, 4),
    ),
    _connected(
        "kv_cache_config.host_cache_size",
        lambda args: bool(args.kv_cache_config.host_cache_size) and not _is_mooncake(args),
        "reaches blocks on the GPU only",
        (1, 4),
    ),
    # DecodingBaseConfig `validate_max_concurrency_and_draft_len_schedule_mutually_exclusive`
    RefusedTogether(
        "E709",
        "speculative_config.max_concurrency",
        lambda args: (
            args.speculative_config is not None
            and args.speculative_config.max_concurrency is not None
            and args.speculative_config.draft_len_schedule is not None
        ),
        "draft_len_schedule says from which batch on nothing is drafted",
        "keep one of the two",
        (1, 4),
    ),
    _waiting("timeout_iters"),
    _waiting("batching_wait_iters"),
    RefusedTogether(
        "E806",
        "cp_config.tokens_per_block",
        _has_other_blocks,
        "kv_cache_config.tokens_per_block is another: Helix needs equal blocks",
        "set both to one number",
    ),
    # `validate_encoder_modes`
    RefusedTogether(
        "E806",
        "encode_only",
        lambda args: args.encode_only and args.mm_encoder_only,
        "mm_encoder_only is true as well",
        "keep one of the two",
    ),
    # `validate_gms_moe_compat`
    RefusedTogether(
        "E806",
        "moe_config.load_balancer",
        lambda args: args.load_format == "gms" and args.moe_config.load_balancer is not None,
        "load_format is gms: what a balancer allocates would be missing in the shared weights",
        "take it out, or use load_format: auto",
    ),
    _of_ray("ray_worker_extension_cls"),
    _of_ray("ray_placement_config"),
    # BaseLlmArgs `validate_and_init_tokenizer`
    RefusedTogether(
        "E806",
        "post_processor_hook",
        lambda args: args.post_processor_hook is not None and args.skip_tokenizer_init,
        "skip_tokenizer_init is true, so there is no text for it",
        "take one of the two out",
    ),
    # py_executor `PyExecutor.__init__`
    RefusedTogether(
        "E806",
        "dwdp_config.dwdp_size",
        lambda args: (
            args.dwdp_config is not None
            and args.dwdp_config.dwdp_size > 1
            and not args.disable_overlap_scheduler
        ),
        "the overlap scheduler is on, with which weights cannot be fetched ahead",
        "set disable_overlap_scheduler: true",
    ),
)


def check_together(case: EngineCase) -> Iterator[Finding]:
    """Yields E611, E709 or E806 for each combination of the table that is there."""
    for row in _TOGETHER:
        if not row.is_there(case.args):
            continue
        value: object = case.args
        for name in row.key.split("."):
            value = value[name] if isinstance(value, dict) else getattr(value, name)
        text = f"is {in_brief(value)}, and {row.why}"
        if row.since is None or case.is_known_since(row.since):
            yield error(row.code, row.key, f"{text}: the engine does not start", row.advice)
        else:
            major, minor = row.since
            text += f": TensorRT-LLM {major}.{minor} refuses that, and earlier ones start with it"
            yield warning(row.code, row.key, text, row.advice)


def check_connector(case: EngineCase) -> Iterator[Finding]:
    """Yields E105 for a KV connector without preset or class, E612 for one beside a transceiver.

    `KvCacheConnectorConfig._resolve_preset` and `connectors/registry.py` @26bd2ecc; py_executor
    `_maybe_init_kv_connector_manager`, which only warns.
    """
    section, transceiver = case.args.kv_connector_config, case.args.cache_transceiver_config
    if section is None:
        return
    known = {f"{CONNECTOR}.{name}" for name in KvConnectorSection.model_fields}
    is_newer = any(key.startswith(f"{CONNECTOR}.") and key not in known for key in case.given)
    if section.connector is None and not case.has(f"{CONNECTOR}.connector") and not is_newer:
        for name in _CLASSES:
            if getattr(section, name) is None:
                yield error(
                    "E105",
                    f"{CONNECTOR}.{name}",
                    "is required in this section",
                    f"set {CONNECTOR}.{name}, or a preset: connector: kvbm",
                )
    if transceiver is not None and transceiver.backend is not None:
        yield warning(
            "E612",
            CONNECTOR,
            "is there beside a cache transceiver, of which TensorRT-LLM itself warns",
            "take one of the two out, or try the pair before you rely on it",
        )


def check_modes(case: EngineCase) -> Iterator[Finding]:
    """Yields E807 if `encode_only` leaves nothing to serve, E808 for early first tokens without effect.

    `LLM.generate_async` (llmapi/llm.py id 55216765702); `TorchLlmArgs.validate_early_first_token_response`.
    """
    args = case.args
    if args.encode_only:
        yield error(
            "E807",
            "encode_only",
            "is true, and such an engine refuses every request of a worker",
            "take it out",
        )
    transceiver = args.cache_transceiver_config
    is_split = transceiver is not None and transceiver.backend is not None
    if args.enable_early_first_token_response and (args.disable_overlap_scheduler or is_split):
        beside = "a cache transceiver" if is_split else "disable_overlap_scheduler"
        yield warning(
            "E808",
            "enable_early_first_token_response",
            f"is true, and the engine switches it off beside {beside}",
            "take it out",
        )
