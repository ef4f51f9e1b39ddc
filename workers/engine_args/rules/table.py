"""All rules across engine arguments, in the order of their codes."""

from collections.abc import Callable, Iterator

from slagate.workers.engine_args.model.findings import Finding
from slagate.workers.engine_args.rules import cache, decoding, disagg, pair, sizes
from slagate.workers.engine_args.rules.case import EngineCase

RULES: tuple[Callable[[EngineCase], Iterator[Finding]], ...] = (
    disagg.transceiver,
    disagg.transfer_buffer,
    disagg.block_alignment,
    disagg.overlap_scheduler,
    disagg.transport,
    sizes.expert_parallelism,
    sizes.attention_dp,
    sizes.gpus,
    sizes.step_tokens,
    sizes.cuda_graphs,
    cache.prefix_routing,
    cache.cache_memory,
    cache.streaming_events,
    cache.tiers,
    cache.model_type,
    decoding.speculation,
    decoding.fields_of_kind,
    decoding.save_state,
    decoding.experts,
)

PAIR_RULES: tuple[Callable[[EngineCase, EngineCase], Iterator[Finding]], ...] = (
    pair.kv_layout,
    pair.transports,
    pair.prompts,
    pair.buffers,
    pair.drafting,
    pair.contexts,
)


def findings_of(case: EngineCase) -> list[Finding]:
    """What the rules find in one engine; an encoder has no KV cache and no steps to go by."""
    if case.role == "encode":
        return []
    return [finding for rule in RULES for finding in rule(case)]


def findings_of_pair(prefill: EngineCase, decode: EngineCase) -> list[Finding]:
    """What the rules find in two that hand over, besides what each has by itself."""
    return [finding for rule in PAIR_RULES for finding in rule(prefill, decode)]
