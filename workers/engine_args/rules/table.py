"""The codes of all findings about engine arguments, and the rules that look for those from E2 on.

E1 what is written, E2 a role of a disaggregated deployment, E3 the two roles of a pairing, E4 parallelism
and sizes, E5 CUDA graphs, E6 the KV cache, E7 speculative decoding, E8 back-ends and experts.
docs/engines.md has the table.
"""

from collections.abc import Callable, Iterator, Mapping

from slagate.workers.engine_args.rules import cache, decoding, disagg, pair, sizes
from slagate.workers.engine_args.rules.case import EngineCase
from slagate.workers.findings import Finding

CODES: Mapping[str, str] = {
    "E101": "an argument that TensorRT-LLM does not have",
    "E102": "a value of another type",
    "E103": "a value out of its range",
    "E104": "a value that is none of the choices",
    "E105": "a section without a key it needs",
    "E106": "arguments in `build_config`, which is gone",
    "E107": "an option of the command line that a file or an override replaces",
    "E108": "a value in place of which slagate always passes its own",
    "E201": "a disaggregated role without a cache transceiver",
    "E202": "a cache transceiver that is switched off",
    "E203": "a transfer buffer smaller than the longest prompt",
    "E204": "a transfer buffer sized by the longest sequence",
    "E205": "a token limit that is not a multiple of the KV block",
    "E206": "overlap scheduling on a prefill worker",
    "E207": "no overlap scheduling where it helps",
    "E208": "a cache transceiver that nobody uses",
    "E209": "`TRTLLM_USE_UCX_KVCACHE` beside the DEFAULT back-end",
    "E210": "`UCX_TLS` without a transport for GPU memory",
    "E301": "different KV types",
    "E302": "different models",
    "E303": "different KV blocks",
    "E304": "a small transfer buffer between unequal parallelism",
    "E305": "different transports",
    "E306": "different attention windows",
    "E307": "different speculative decoding",
    "E308": "a decode worker with a shorter context than its prefill worker",
    "E309": "transfer buffers of different sizes between unequal parallelism",
    "E401": "expert parallelism that does not divide tensor parallelism",
    "E402": "attention DP of one rank",
    "E403": "settings of attention DP without it",
    "E404": "GPUs that do not fill nodes",
    "E405": "layers for another number of pipeline stages",
    "E406": "a step too small for the batch",
    "E407": "prompts that fit the context and not a step",
    "E408": "a prompt limit above the context",
    "E501": "CUDA-graph sizes that contradict each other",
    "E502": "CUDA graphs for batches that never are",
    "E503": "batches without a CUDA graph",
    "E504": "gaps between CUDA-graph sizes",
    "E601": "no KV events where prefix routing wants them",
    "E602": "no block reuse where prefix routing wants it",
    "E603": "KV events of a back-end without them",
    "E604": "hardly any GPU memory besides the KV cache",
    "E605": "a KV type that the engine only warns about",
    "E606": "the engine's own KV event stream without what it needs",
    "E607": "partial reuse with a KV connector that has none",
    "E608": "a disk tier without a place",
    "E609": "a type that the model does not compute in",
    "E701": "Eagle without a draft length",
    "E702": "drafting without a draft model",
    "E703": "speculative decoding that PyTorch does not have",
    "E704": "Eagle where Eagle3 is meant",
    "E705": "two names for one draft model",
    "E706": "a field of another kind of speculative decoding",
    "E707": "a batch for SaveState",
    "E801": "wide expert parallelism without a load balancer",
    "E802": "a load balancer that is not there",
    "E803": "an argument that AutoDeploy does not take",
    "E804": "a load balancer that nothing uses",
    "E805": "an argument that an encoder does not take",
}

RULES: tuple[Callable[[EngineCase], Iterator[Finding]], ...] = (
    disagg.check_transceiver,
    disagg.check_transfer_buffer,
    disagg.check_block_alignment,
    disagg.check_overlap_scheduler,
    disagg.check_transport,
    sizes.check_expert_parallelism,
    sizes.check_attention_dp,
    sizes.check_gpus,
    sizes.check_step_tokens,
    sizes.check_cuda_graphs,
    cache.check_prefix_routing,
    cache.check_cache_memory,
    cache.check_streaming_events,
    cache.check_tiers,
    cache.check_model_type,
    decoding.check_speculation,
    decoding.check_fields_of_kind,
    decoding.check_save_state,
    decoding.check_experts,
)

PAIR_RULES: tuple[Callable[[EngineCase, EngineCase], Iterator[Finding]], ...] = (
    pair.check_kv_layout,
    pair.check_transports,
    pair.check_longest_prompt,
    pair.check_buffers,
    pair.check_drafting,
    pair.check_contexts,
)
