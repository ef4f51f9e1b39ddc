"""Rules of speculative decoding, and of experts.

TensorRT-LLM's own rules were read in `llmapi/llm_args.py`, ids 55143598664 (a late candidate of 1.3),
7019226376 (an early one) and 1090804222 (1.2), in the validators of the classes that are named.
"""

import os.path
from collections.abc import Iterator, Mapping

from slagate.workers.engine_args.rules.case import EngineCase
from slagate.workers.engine_args.rules.row import RuleRow, value_at
from slagate.workers.findings import Finding, error, warning

SECTION = "speculative_config"
BALANCER = "moe_config.load_balancer"
SCHEDULE = f"{SECTION}.draft_len_schedule"
_DRAFTED_BY_A_MODEL = ("Draft_Target", "Eagle", "Eagle3")
_NEEDS_A_LENGTH = (*_DRAFTED_BY_A_MODEL, "PARD", "NGram", "SA", "DFlash", "DSpark")
_MTP_BY_DRAFT_LENGTH_SINCE = (1, 3)
"""MTP's length is `max_draft_len` since pull request #12341 (1.3.0rc9); earlier engines overwrite that."""

_SAVED = {"max_batch_size": 1, "disable_overlap_scheduler": True, "cuda_graph_config": None}
_LONGEST_POOLED_NGRAM = 64
_UNBALANCED = ("VANILLA", "TRITON", "MARLIN")
"""Kernels of experts that no balancer moves: create_moe.py @01f8de52."""


def _of(case: EngineCase, name: str) -> object:
    """A value of `speculative_config`; None without it."""
    return value_at(case, f"{SECTION}.{name}")


def _size(case: EngineCase, name: str, *kinds: str) -> int | None:
    """A size in `speculative_config`; None where it is not set, or the type is none of these."""
    size = _of(case, name) if case.draft_kind in kinds else None
    return size if isinstance(size, int) else None


def _has_no_model(case: EngineCase) -> bool:
    """Whether the draft model is named neither by its newer name nor by the older one."""
    return case.drafting is not None and case.drafting.draft_model is None


def _slots(case: EngineCase) -> int:
    """Slots that the experts' balancer has; 0 where they are not written here."""
    slots = value_at(case, f"{BALANCER}.num_slots")
    return slots if isinstance(slots, int) else 0


def _expert_ranks(case: EngineCase) -> int:
    """Ranks among which experts are shared out: mapping.py id 2561868716."""
    return max(1, case.args.moe_expert_parallel_size or 1)


def _is_mtp_before_its_length(case: EngineCase) -> bool:
    """Whether MTP's length is given by a name that an engine before 1.3 overwrites."""
    section = case.drafting
    return (
        section is not None
        and case.draft_kind == "MTP"
        and section.max_draft_len not in (None, section.num_nextn_predict_layers)
    )


ROWS = (
    # `validate_ngram_config`, `validate_sa_config`, `validate_draft_target_config`, `validate_eagle_config`
    # and, for PARD and DFlash, `TorchLlmArgs`
    RuleRow(
        "error E701 speculative_config.max_draft_len",
        lambda case: case.draft_kind in _NEEDS_A_LENGTH and not _of(case, "max_draft_len"),
        "must be above 0 for {case.draft_kind} (got {value})",
        "set it to the tokens drafted ahead, 3 to begin with",
    ),
    RuleRow(
        "error E701 speculative_config.max_draft_len",
        lambda case: case.draft_kind == "MTP" and _of(case, "max_draft_len") == 0,
        "must be above 0 for MTP",
        "set it to the tokens drafted ahead, or take it out",
        since=_MTP_BY_DRAFT_LENGTH_SINCE,
    ),
    # `EagleDecodingConfig.validate_speculative_model`; what PARD does without one was not read
    RuleRow(
        "error E702 speculative_config.speculative_model",
        lambda case: case.draft_kind in _DRAFTED_BY_A_MODEL and _has_no_model(case),
        "is missing, and {case.draft_kind} drafts with a model of its own",
        "name the draft model: a folder, or a Hugging Face id",
    ),
    RuleRow(
        "warning E702 speculative_config.speculative_model",
        lambda case: case.draft_kind == "PARD" and _has_no_model(case),
        "is missing, and PARD drafts with a model of its own",
        "name the draft model: a folder, or a Hugging Face id",
    ),
    RuleRow(
        "error E703 speculative_config.decoding_type",
        lambda case: case.draft_kind in ("Medusa", "Lookahead"),
        "is {case.draft_kind}, which the PyTorch back-end refuses",
        "use Eagle3, MTP, NGram or Draft_Target",
    ),
    RuleRow(
        "note E704 speculative_config.decoding_type",
        lambda case: case.draft_kind == "Eagle",
        "is Eagle, which the PyTorch back-end runs as Eagle3, with a warning of its own",
        "write Eagle3",
    ),
    RuleRow(
        "error E105 speculative_config.output_directory",
        lambda case: case.draft_kind == "SaveState" and not _of(case, "output_directory"),
        "is required for SaveState",
        "name the folder for the states",
    ),
    # `TorchLlmArgs.validate_speculative_config`
    RuleRow(
        "note E707 speculative_config.decoding_type",
        lambda case: (
            case.draft_kind == "SaveState"
            and any(case.has(key) and value_at(case, key) != value for key, value in _SAVED.items())
        ),
        "is SaveState, which makes max_batch_size 1, disable_overlap_scheduler true and no CUDA graphs",
        "write that, to see it in the file",
    ),
    # `MTPDecodingConfig`: since 1.3 `num_nextn_predict_layers` is an older name of `max_draft_len`
    RuleRow(
        "warning E708 speculative_config.num_nextn_predict_layers",
        lambda case: (
            case.has(f"{SECTION}.num_nextn_predict_layers") and _is_mtp_before_its_length(case)
        ),
        "is {value} and max_draft_len is {args.speculative_config.max_draft_len}: the first counts before "
        "TensorRT-LLM 1.3, the second since",
        "write one number, under both names where both versions run",
    ),
    RuleRow(
        "warning E708 speculative_config.max_draft_len",
        lambda case: (
            case.is_known_before(_MTP_BY_DRAFT_LENGTH_SINCE)
            and not case.has(f"{SECTION}.num_nextn_predict_layers")
            and _is_mtp_before_its_length(case)
        ),
        "is {value}, and has no effect before TensorRT-LLM 1.3: one token is drafted",
        "write num_nextn_predict_layers, with that number",
    ),
    # `NGramDecodingConfig`, `SADecodingConfig.validate_sa_config`; for the pool's size `TorchLlmArgs`
    RuleRow(
        "error E710 speculative_config.max_matching_ngram_size",
        lambda case: (
            (size := _size(case, "max_matching_ngram_size", "NGram", "SA")) is not None
            and size < 1
            and (case.draft_kind, size) != ("SA", -1)
        ),
        "is {value}, which {case.draft_kind} does not match by",
        "set it to 2, or for SA to -1, the longest match",
    ),
    RuleRow(
        "error E710 speculative_config.max_matching_ngram_size",
        lambda case: (
            _of(case, "enable_global_pool")
            and (_size(case, "max_matching_ngram_size", "SA") or 0) > _LONGEST_POOLED_NGRAM
        ),
        f"is {{value}}, and a global pool matches {_LONGEST_POOLED_NGRAM} tokens at most",
        "set it to -1 for the longest match",
    ),
    RuleRow(
        "error E710 speculative_config.global_pool_size",
        lambda case: (
            (size := _size(case, "global_pool_size", "SA")) is not None
            and (not _of(case, "enable_global_pool") or size < case.args.max_batch_size)
        ),
        "is {value}, with enable_global_pool {args.speculative_config.enable_global_pool} and "
        "max_batch_size {args.max_batch_size:,}",
        "set enable_global_pool: true, and the size to the batch at least, or take it out",
    ),
    # fused_moe_wide_ep.py, ids 2464704954 (1.1) to 3966890195 (1.3)
    RuleRow(
        "error E809 enable_attention_dp",
        lambda case: case.args.moe_config.backend == "WIDEEP" and not case.args.enable_attention_dp,
        "is false, and moe_config.backend WIDEEP needs it: the engine does not start",
        "set it to true, or use another moe_config.backend",
    ),
    RuleRow(
        "error E809 tensor_parallel_size",
        lambda case: case.args.moe_config.backend == "WIDEEP" and case.moe_ranks == 1,
        "is 1, and moe_config.backend WIDEEP spreads experts over ranks: the engine does not start",
        "raise it, or use another moe_config.backend",
    ),
    # `MoeLoadBalancerConfig.setup`, llm_args id 7019226376
    RuleRow(
        "error E810 moe_config.load_balancer.num_slots",
        lambda case: _slots(case) % _expert_ranks(case),
        "is {value}, no multiple of moe_expert_parallel_size {args.moe_expert_parallel_size}: the engine "
        "does not start",
        "let each rank have as many slots",
    ),
    RuleRow(
        "warning E804 moe_config.load_balancer",
        lambda case: (
            case.args.moe_config.load_balancer and case.args.moe_config.backend in _UNBALANCED
        ),
        "is there, and moe_config.backend {args.moe_config.backend} does not move experts",
        "take it out, or use another moe_config.backend",
    ),
    RuleRow(
        "note E802 moe_config.load_balancer",
        lambda case: (
            isinstance(case.args.moe_config.load_balancer, str)
            and not os.path.isfile(case.args.moe_config.load_balancer)
        ),
        "names {value}, which is no file here; the engine does not start without it",
        "name a file that the worker's machine has, by its full path",
    ),
    RuleRow(
        "error E102 moe_config.load_balancer",
        lambda case: not isinstance(case.args.moe_config.load_balancer, str | Mapping | None),
        "must be a path or a mapping",
        "name the balancer's file",
    ),
)


def check_draft_schedule(case: EngineCase) -> Iterator[Finding]:
    """Yields E709 for a schedule of draft lengths that the engine refuses, E102 if it is none.

    `DecodingBaseConfig.validate_draft_len_schedule_and_sort`.
    """
    section = case.drafting
    if section is None or section.draft_len_schedule is None:
        return
    try:
        lengths = {int(key): int(value) for key, value in section.draft_len_schedule.items()}
    except (AttributeError, TypeError, ValueError, OverflowError):
        text = "must be whole numbers by whole numbers"
        yield error("E102", SCHEDULE, text, "write batch: length, as in 4: 3")
        return
    longest = section.max_draft_len
    if longest is None and case.has(f"{SECTION}.num_nextn_predict_layers"):
        longest = section.num_nextn_predict_layers
    least = min(lengths, default=1)
    if not lengths or least < 1 or min(lengths.values()) < 0:
        wrong = f"is {lengths}, and not lengths from 0 on by batches from 1 on"
    elif longest is not None and lengths[least] != longest:
        wrong = f"begins with {lengths[least]}, and max_draft_len is {longest}"
    elif longest is not None and max(lengths.values()) > longest:
        wrong = f"goes to {max(lengths.values())}, and max_draft_len is {longest}"
    else:
        return
    advice = "begin with max_draft_len for the smallest batch, and go down from there"
    yield error("E709", SCHEDULE, wrong, advice)


def check_draft_trees(case: EngineCase) -> Iterator[Finding]:
    """Yields E711 for a tree of drafts that Eagle refuses: `EagleDecodingConfig.validate_eagle_config`."""
    section = case.drafting
    if section is None or not section.is_eagle:
        return
    top, total = section.dynamic_tree_max_topK, section.max_total_draft_tokens
    length = section.max_draft_len or 0
    if not section.use_dynamic_tree and top is None:
        return
    if section.eagle_choices is not None:
        name, text = "eagle_choices", "is a fixed tree, and a dynamic one is asked for too"
        advice = "take it out, or use_dynamic_tree and dynamic_tree_max_topK"
    elif top is None or top < 1:
        name, text = "dynamic_tree_max_topK", f"must be above 0 for a dynamic tree (got {top or 0})"
        advice = "set it to the branches of each step, 4 to begin with"
    elif total is not None and not length <= total <= top * length:
        name, advice = "max_total_draft_tokens", "bring it within that, or take it out"
        text = f"is {total}, and a tree of {length} steps and {top} branches has {length} to {top * length}"
    else:
        return
    yield error("E711", f"{SECTION}.{name}", text, advice)


def check_drafter(case: EngineCase) -> Iterator[Finding]:
    """Yields E712 for pipeline parallelism with a drafter outside of the model, where a start fails.

    `PyExecutor.__init__` (py_executor.py ids 736889464, 57354091563), where `drafter` meets
    `_executor_loop_pp`; which types have one: `get_spec_drafter` in `_torch/speculative/utils.py`, ids
    40163558784 (1.2) and 57358327182 (1.4).
    """
    section, kind = case.drafting, case.draft_kind
    if section is None or case.args.pipeline_parallel_size == 1:
        return
    older = kind in ("Draft_Target", "SaveState")
    put, doubt = error, ""
    if older and not case.is_known_before((1, 3)):
        put, doubt = warning, " before TensorRT-LLM 1.3"
    elif kind == "AUTO":
        put, doubt = warning, " as long as it comes to NGram"
    elif kind == "MTP":
        put, doubt = warning, " if that has one MTP layer"
    is_outside = (
        kind in ("NGram", "User_Provided", "AUTO")
        or (section.is_eagle and not section.eagle3_one_model)
        or (kind == "MTP" and not section.mtp_eagle_one_model and not section.use_mtp_vanilla)
        or (older and not case.is_known_since((1, 4)))
    )
    if is_outside:
        text = (
            f"is {case.args.pipeline_parallel_size}, and {kind} drafts outside of the model{doubt}"
        )
        advice = "set it to 1, or draft with Eagle3 or MTP in one model"
        yield put("E712", "pipeline_parallel_size", f"{text}: the engine does not start", advice)
