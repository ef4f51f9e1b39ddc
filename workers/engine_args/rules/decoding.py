"""Rules of speculative decoding, and of experts."""

from collections.abc import Iterator
from pathlib import Path

from slagate.workers.engine_args.model.model import FIELDS_OF_TYPE
from slagate.workers.engine_args.rules.case import EngineCase
from slagate.workers.findings import Finding, error, warning

SECTION = "speculative_config"
BALANCER = "moe_config.load_balancer"
_DRAFTED_BY_A_MODEL = ("Draft_Target", "Eagle", "Eagle3", "PARD")
_NOT_ON_PYTORCH = ("Medusa", "Lookahead")


def check_speculation(case: EngineCase) -> Iterator[Finding]:
    """Yields E701 to E705 for speculative decoding that the PyTorch back-end refuses or alters."""
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
    if kind in _DRAFTED_BY_A_MODEL:
        if not section.max_draft_len:
            yield error(
                "E701",
                f"{SECTION}.max_draft_len",
                f"must be above 0 for {kind} (got {section.max_draft_len or 0})",
                "set it to the tokens drafted ahead, 3 to begin with",
            )
        if section.speculative_model is None and section.speculative_model_dir is None:
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
    """Yields E707 for SaveState with a `max_batch_size` over 1, which the engine makes 1."""
    section = case.args.speculative_config
    if (
        section is not None
        and section.decoding_type == "SaveState"
        and case.has("max_batch_size")
        and case.args.max_batch_size > 1
    ):
        yield warning(
            "E707",
            "max_batch_size",
            f"is {case.args.max_batch_size:,}, and SaveState makes it 1",
            "set it to 1",
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
