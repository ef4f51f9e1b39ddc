"""Rules of speculative decoding that have to be computed.

TensorRT-LLM's own rules were read in `llmapi/llm_args.py`, ids 55143598664 (a late candidate of 1.3),
7019226376 (an early one) and 1090804222 (1.2), in the validators of the classes that are named.
"""

from collections.abc import Iterator

from slagate.workers.engine_args.rules.case import EngineCase
from slagate.workers.findings import Finding, error, warning

SECTION = "speculative_config"
SCHEDULE, LENGTH = f"{SECTION}.draft_len_schedule", f"{SECTION}.max_draft_len"
LAYERS = f"{SECTION}.num_nextn_predict_layers"
"""MTP's draft length in engines before 1.3; a newer one takes it for `max_draft_len` (pull request #12341,
1.3.0rc9), and an earlier one overwrites that: `MTPDecodingConfig`."""


def check_mtp_length(case: EngineCase) -> Iterator[Finding]:
    """Yields E708 for a draft length of MTP under a name that an engine of another version reads."""
    section = case.drafting
    if section is None or case.draft_kind != "MTP":
        return
    length, layers = section.max_draft_len, section.num_nextn_predict_layers or 1
    if length in (None, layers):
        return
    if case.has(LAYERS):
        text = f"is {layers} and max_draft_len is {length}: the first counts before TensorRT-LLM 1.3, the "
        text += "second since"
        advice = "write one number, under both names where both versions run"
        yield warning("E708", LAYERS, text, advice)
    elif case.is_known_before((1, 3)):
        text = f"is {length}, and has no effect before TensorRT-LLM 1.3: one token is drafted"
        advice = "write num_nextn_predict_layers, with that number"
        yield warning("E708", LENGTH, text, advice)


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
    if longest is None and case.has(LAYERS):
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
    if section is None or not case.args.is_eagle:
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
        or (case.args.is_eagle and not section.eagle3_one_model)
        or (kind == "MTP" and not section.mtp_eagle_one_model and not section.use_mtp_vanilla)
        or (older and not case.is_known_since((1, 4)))
    )
    if is_outside:
        text = (
            f"is {case.args.pipeline_parallel_size}, and {kind} drafts outside of the model{doubt}"
        )
        advice = "set it to 1, or draft with Eagle3 or MTP in one model"
        yield put("E712", "pipeline_parallel_size", f"{text}: the engine does not start", advice)
