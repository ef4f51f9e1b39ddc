"""All rules across engine arguments, in the order of their codes."""

from collections.abc import Callable, Iterator

from slagate.workers import (
    engine_rules_cache,
    engine_rules_decoding,
    engine_rules_disagg,
    engine_rules_pair,
    engine_rules_sizes,
)
from slagate.workers.engine_case import EngineCase
from slagate.workers.engine_findings import Finding

RULES: tuple[Callable[[EngineCase], Iterator[Finding]], ...] = (
    engine_rules_disagg.transceiver,
    engine_rules_disagg.transfer_buffer,
    engine_rules_disagg.block_alignment,
    engine_rules_disagg.overlap_scheduler,
    engine_rules_disagg.transport,
    engine_rules_sizes.expert_parallelism,
    engine_rules_sizes.attention_dp,
    engine_rules_sizes.gpus,
    engine_rules_sizes.step_tokens,
    engine_rules_sizes.cuda_graphs,
    engine_rules_cache.prefix_routing,
    engine_rules_cache.cache_memory,
    engine_rules_cache.streaming_events,
    engine_rules_cache.tiers,
    engine_rules_cache.model_type,
    engine_rules_decoding.speculation,
    engine_rules_decoding.fields_of_kind,
    engine_rules_decoding.save_state,
    engine_rules_decoding.experts,
)

PAIR_RULES: tuple[Callable[[EngineCase, EngineCase], Iterator[Finding]], ...] = (
    engine_rules_pair.kv_layout,
    engine_rules_pair.transports,
    engine_rules_pair.prompts,
    engine_rules_pair.buffers,
    engine_rules_pair.drafting,
    engine_rules_pair.contexts,
)


def findings_of(case: EngineCase) -> list[Finding]:
    """What the rules find in one engine; an encoder has no KV cache and no steps to go by."""
    if case.role == "encode":
        return []
    return [finding for rule in RULES for finding in rule(case)]


def findings_of_pair(prefill: EngineCase, decode: EngineCase) -> list[Finding]:
    """What the rules find in two that hand over, besides what each has by itself."""
    return [finding for rule in PAIR_RULES for finding in rule(prefill, decode)]
