"""Rules of speculative decoding, and of experts.

TensorRT-LLM's own rules were read in `llmapi/llm_args.py`, ids 55143598664 (a late candidate of 1.3),
7019226376 (an early one) and 1090804222 (1.2), in the validators of the classes that are named.
"""

from collections.abc import Iterator
from pathlib import Path

from slagate.workers.engine_args.model.model import FIELDS_OF_TYPE, SpeculativeSection
from slagate.workers.engine_args.rules.case import EngineCase
from slagate.workers.findings import Finding, error, warning

SECTION = "speculative_config"
BALANCER = "moe_config.load_balancer"
SCHEDULE = f"{SECTION}.draft_len_schedule"
_DRAFTED_BY_A_MODEL = ("Draft_Target", "Eagle", "Eagle3", "PARD")
_NEEDS_A_LENGTH = (*_DRAFTED_BY_A_MODEL, "NGram", "SA", "DFlash")
_MTP_BY_DRAFT_LENGTH_SINCE = (1, 3)
"""MTP's length is `max_draft_len` since pull request #12341 (1.3.0rc9); earlier engines overwrite that."""

_LONGEST_POOLED_NGRAM = 64
_NOT_ON_PYTORCH = ("Medusa", "Lookahead")


def check_speculation(case: EngineCase) -> Iterator[Finding]:
    """Yields E701 to E705 for speculative decoding that the PyTorch back-end refuses or alters.

    E701 by `validate_ngram_config`, `validate_sa_config`, `validate_draft_target_config`,
    `validate_eagle_config`, `MTPDecodingConfig` and, for PARD and DFlash, `TorchLlmArgs`; E702 by
    `EagleDecodingConfig.validate_speculative_model`, and for PARD by us.
    """
    section = case.args.speculative_config
    if section is None:
        return
    kind = section.decoding_type
    if kind in _NOT_ON_PYTORCH:
        yield error(
            "E703",
            f"{SECTION}.decoding_type",
            f"is {kind}, which the PyTorch back-end refuses",
            "use Eagle3, MTP, NGram or Draft_Target",
        )
        return
    is_mtp_of_none = kind == "MTP" and section.max_draft_len == 0
    if (kind in _NEEDS_A_LENGTH and not section.max_draft_len) or (
        is_mtp_of_none and not case.is_known_before(_MTP_BY_DRAFT_LENGTH_SINCE)
    ):
        yield error(
            "E701",
            f"{SECTION}.max_draft_len",
            f"must be above 0 for {kind} (got {section.max_draft_len or 0})",
            "set it to the tokens drafted ahead, 3 to begin with",
        )
    if kind in _DRAFTED_BY_A_MODEL and section.draft_model is None:
        yield error(
            "E702",
            f"{SECTION}.speculative_model",
            f"is missing, and {kind} drafts with a model of its own",
            "name the draft model: a folder, or a Hugging Face id",
        )
    if kind == "Eagle":
        yield warning(
            "E704",
            f"{SECTION}.decoding_type",
            "is Eagle, which the PyTorch back-end runs as Eagle3, with a warning of its own",
            "write Eagle3",
        )
    if section.speculative_model is not None and section.speculative_model_dir is not None:
        yield error(
            "E705",
            f"{SECTION}.speculative_model_dir",
            "is the older name of speculative_model, and both are there",
            "keep speculative_model",
        )


def check_fields_of_kind(case: EngineCase) -> Iterator[Finding]:
    """Yields E706 for each field of another decoding type, which the engine refuses."""
    section = case.args.speculative_config
    if section is None:
        return
    kind = section.decoding_type
    special = {name for fields in FIELDS_OF_TYPE.values() for name in fields}
    for name in sorted(special - FIELDS_OF_TYPE.get(kind, frozenset())):
        if case.has(f"{SECTION}.{name}"):
            owners = [owner for owner, fields in FIELDS_OF_TYPE.items() if name in fields]
            yield error(
                "E706",
                f"{SECTION}.{name}",
                f"is of {' and '.join(owners)}, and decoding_type is {kind}",
                "take it out",
            )


def check_save_state(case: EngineCase) -> Iterator[Finding]:
    """Yields E707 for each argument in whose place SaveState has a value of its own.

    `TorchLlmArgs.validate_speculative_config`, where the type is `SaveHiddenStatesDecodingConfig`.
    """
    section, args = case.args.speculative_config, case.args
    if section is None or section.decoding_type != "SaveState":
        return
    for key, is_other, given, becomes in (
        ("max_batch_size", args.max_batch_size > 1, f"{args.max_batch_size:,}", "1"),
        ("disable_overlap_scheduler", not args.disable_overlap_scheduler, "false", "true"),
        ("cuda_graph_config", args.cuda_graph_config is not None, "there", "null"),
    ):
        if is_other and case.has(key):
            yield warning(
                "E707", key, f"is {given}, and SaveState makes it {becomes}", f"set it to {becomes}"
            )


def check_mtp_length(case: EngineCase) -> Iterator[Finding]:
    """Yields E708 if MTP's draft length has the name of another version, or two values.

    `MTPDecodingConfig`: since pull request #12341 `num_nextn_predict_layers` is an older name of
    `max_draft_len`, which counts if both are there; before, `max_draft_len` had no effect.
    """
    section = case.args.speculative_config
    if section is None or section.decoding_type != "MTP":
        return
    older, length = f"{SECTION}.num_nextn_predict_layers", section.max_draft_len
    n_layers = section.num_nextn_predict_layers
    if length is not None and length != n_layers and case.has(older):
        yield warning(
            "E708",
            older,
            f"is {n_layers} and max_draft_len is {length}: the first counts before TensorRT-LLM 1.3, the "
            "second since",
            "write one number, under both names where both versions run",
        )
    elif (
        length is not None
        and length != n_layers
        and case.is_known_before(_MTP_BY_DRAFT_LENGTH_SINCE)
    ):
        yield warning(
            "E708",
            f"{SECTION}.max_draft_len",
            f"is {length}, and has no effect before TensorRT-LLM 1.3: one token is drafted",
            f"write num_nextn_predict_layers: {length}" if length else f"take {SECTION} out",
        )
    elif length is None and case.has(older) and case.is_known_since(_MTP_BY_DRAFT_LENGTH_SINCE):
        yield warning(
            "E708",
            older,
            "is the older name of max_draft_len, and TensorRT-LLM will drop it",
            f"write max_draft_len: {n_layers}",
        )


def check_draft_schedule(case: EngineCase) -> Iterator[Finding]:
    """Yields E709 for a schedule of draft lengths that the engine refuses, E102 if it is none.

    `DecodingBaseConfig.validate_draft_len_schedule_and_sort`.
    """
    section = case.args.speculative_config
    if section is None or section.draft_len_schedule is None:
        return
    try:
        lengths = {int(key): int(value) for key, value in section.draft_len_schedule.items()}
    except (AttributeError, TypeError, ValueError, OverflowError):
        yield error(
            "E102",
            SCHEDULE,
            "must be whole numbers by whole numbers",
            "write batch: length, as in 4: 3",
        )
        return
    longest = _draft_length(case, section)
    if not lengths:
        wrong = "is empty"
    elif min(lengths) < 1:
        wrong = f"has a batch of {min(lengths)}"
    elif min(lengths.values()) < 0:
        wrong = f"has a length of {min(lengths.values())}"
    elif longest is not None and lengths[min(lengths)] != longest:
        wrong = f"begins with {lengths[min(lengths)]}, and max_draft_len is {longest}"
    elif longest is not None and max(lengths.values()) > longest:
        wrong = f"goes to {max(lengths.values())}, and max_draft_len is {longest}"
    else:
        return
    yield error(
        "E709",
        SCHEDULE,
        wrong,
        "begin with max_draft_len for the smallest batch, and go down from there",
    )


def _draft_length(case: EngineCase, section: SpeculativeSection) -> int | None:
    """`max_draft_len` as the engine has it when it looks at the schedule; None where it is not given."""
    if section.max_draft_len is None and case.has(f"{SECTION}.num_nextn_predict_layers"):
        return section.num_nextn_predict_layers
    return section.max_draft_len


def check_ngrams(case: EngineCase) -> Iterator[Finding]:
    """Yields E710 for n-gram or suffix matching, or its pool, that the engine refuses.

    `NGramDecodingConfig`, `SADecodingConfig.validate_sa_config`, and for the pool's size `TorchLlmArgs`.
    """
    section = case.args.speculative_config
    if section is None or section.decoding_type not in ("NGram", "SA"):
        return
    kind, size, pool = (
        section.decoding_type,
        section.max_matching_ngram_size,
        section.global_pool_size,
    )
    is_longest = kind == "SA" and size == -1
    if size is not None and size < 1 and not is_longest:
        yield error(
            "E710",
            f"{SECTION}.max_matching_ngram_size",
            f"is {size}, which {kind} does not match by",
            "set it to 2" + (", or to -1 for the longest match" if kind == "SA" else ""),
        )
    elif (
        kind == "SA"
        and size is not None
        and section.enable_global_pool
        and size > _LONGEST_POOLED_NGRAM
    ):
        yield error(
            "E710",
            f"{SECTION}.max_matching_ngram_size",
            f"is {size}, and a global pool matches {_LONGEST_POOLED_NGRAM} tokens at most",
            "set it to -1 for the longest match",
        )
    if kind == "SA" and pool is not None and not section.enable_global_pool:
        yield error(
            "E710",
            f"{SECTION}.global_pool_size",
            f"is {pool}, and enable_global_pool is false",
            "set enable_global_pool: true, or take it out",
        )
    elif kind == "SA" and pool is not None and pool < case.args.max_batch_size:
        yield error(
            "E710",
            f"{SECTION}.global_pool_size",
            f"is {pool}, less than max_batch_size {case.args.max_batch_size:,}",
            f"set it to {case.args.max_batch_size} at least, or take it out",
        )


def check_draft_trees(case: EngineCase) -> Iterator[Finding]:
    """Yields E711 for a tree of drafts that Eagle refuses: `EagleDecodingConfig.validate_eagle_config`."""
    section = case.args.speculative_config
    if section is None or not section.is_eagle:
        return
    top, total, length = (
        section.dynamic_tree_max_topK,
        section.max_total_draft_tokens,
        section.max_draft_len or 0,
    )
    is_dynamic = section.use_dynamic_tree or top is not None
    if not is_dynamic:
        return
    if section.eagle_choices is not None:
        yield error(
            "E711",
            f"{SECTION}.eagle_choices",
            "is a fixed tree, and a dynamic one is asked for too",
            "take it out, or use_dynamic_tree and dynamic_tree_max_topK",
        )
    elif top is None or top < 1:
        yield error(
            "E711",
            f"{SECTION}.dynamic_tree_max_topK",
            f"must be above 0 for a dynamic tree (got {top or 0})",
            "set it to the branches of each step, 4 to begin with",
        )
    elif total is not None and not length <= total <= top * length:
        yield error(
            "E711",
            f"{SECTION}.max_total_draft_tokens",
            f"is {total}, and a tree of {length} steps with {top} branches has {length} to {top * length}",
            "bring it within that, or take it out",
        )


def check_drafter(case: EngineCase) -> Iterator[Finding]:
    """Yields E712 for pipeline parallelism with a drafter outside of the model, where a start fails.

    `PyExecutor.__init__` (py_executor.py ids 736889464, 57354091563), where `drafter` meets
    `_executor_loop_pp`; which types have one: `get_spec_drafter` in `_torch/speculative/utils.py`, ids
    40163558784 (1.2) and 57358327182 (1.4).
    """
    section, stages = case.args.speculative_config, case.args.pipeline_parallel_size
    if section is None or stages == 1:
        return
    kind = section.decoding_type
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
        yield put(
            "E712",
            "pipeline_parallel_size",
            f"is {stages}, and {kind} drafts outside of the model{doubt}: the engine does not start",
            "set it to 1, or draft with Eagle3 or MTP in one model",
        )


def check_experts(case: EngineCase) -> Iterator[Finding]:
    """Yields E801, E802, E804 or E102 for an experts' load balancer that is missing or wrong."""
    moe = case.args.moe_config
    balancer = moe.load_balancer
    if moe.backend == "WIDEEP" and balancer is None:
        yield error(
            "E801",
            BALANCER,
            "is missing, and moe_config.backend is WIDEEP",
            "name a balancer file, or write its content here (num_slots, layer_updates_per_iter)",
        )
    if moe.backend != "WIDEEP" and balancer is not None:
        yield warning(
            "E804",
            BALANCER,
            f"is there, and moe_config.backend is {moe.backend}",
            "set moe_config.backend: WIDEEP, or take it out",
        )
    if isinstance(balancer, str) and not Path(balancer).is_file():
        yield warning(
            "E802",
            BALANCER,
            f"names {balancer}, which is no file here; the engine does not start without it",
            "name a file that the worker's machine has, by its full path",
        )
    elif balancer is not None and not isinstance(balancer, str | dict):
        yield error("E102", BALANCER, "must be a path or a mapping", "name the balancer's file")
