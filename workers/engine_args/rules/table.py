"""The codes of all findings about engine arguments, and the rules that look for those from E2 on.

E1 what is written, E2 a role of a disaggregated deployment, E3 the two roles of a pairing, E4 parallelism
and sizes, E5 CUDA graphs, E6 the KV cache, E7 speculative decoding, E8 back-ends and experts.
docs/engines.md has the table.
"""

from collections.abc import Callable, Iterator, Mapping

from slagate.workers.engine_args.rules import cache, decoding, disagg, pair, sizes, together
from slagate.workers.engine_args.rules.case import EngineCase
from slagate.workers.engine_args.rules.row import check_rows
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
    "E205": "a transfer buffer that is not a multiple of the KV block",
    "E206": "overlap scheduling on a prefill worker",
    "E207": "no overlap scheduling where it helps",
    "E208": "a cache transceiver that nobody uses",
    "E209": "a variable that says what the DEFAULT back-end is",
    "E210": "`UCX_TLS` without a transport for GPU memory",
    "E211": "a cache manager whose caches the transceiver cannot move",
    "E212": "a Python transceiver without what it needs",
    "E213": "`TRTLLM_KVCACHE_TRANSFER_BUFFER_SIZE` beside a buffer's tokens",
    "E301": "different KV types",
    "E302": "different models",
    "E303": "different KV blocks",
    "E304": "a small transfer buffer between unequal parallelism",
    "E305": "different transports",
    "E306": "different attention windows",
    "E307": "different speculative decoding",
    "E308": "a decode worker with a shorter context than its prefill worker",
    "E309": "transfer buffers of different sizes between unequal parallelism",
    "E310": "different KV cache managers",
    "E401": "expert parallelism that does not divide tensor parallelism",
    "E402": "attention DP of one rank",
    "E403": "settings of attention DP without it",
    "E405": "layers for another number of pipeline stages",
    "E406": "a step too small for the batch",
    "E407": "prompts that fit the context and not a step",
    "E501": "CUDA-graph sizes that contradict each other",
    "E503": "batches without a CUDA graph",
    "E504": "gaps between CUDA-graph sizes",
    "E601": "no KV events where prefix routing wants them",
    "E602": "no block reuse where prefix routing wants it",
    "E603": "KV events of a back-end without them",
    "E604": "hardly any GPU memory besides the KV cache",
    "E605": "a KV type that the engine refuses, or takes no notice of",
    "E606": "the engine's own KV event stream without what it needs",
    "E607": "partial reuse with a KV connector that has none",
    "E608": "a disk tier without a place",
    "E609": "a type that the model does not compute in",
    "E610": "a cache on the host, whose moves break the KV events of early versions",
    "E611": "what a KV connector does not go with",
    "E612": "a KV connector beside a cache transceiver",
    "E613": "shares of pools that do not add up",
    "E701": "drafting without a draft length",
    "E702": "drafting without a draft model",
    "E703": "speculative decoding that PyTorch does not have",
    "E704": "Eagle where Eagle3 is meant",
    "E706": "a field of another kind of speculative decoding",
    "E707": "values in place of which SaveState has its own",
    "E708": "MTP's draft length under the name of another version",
    "E709": "a schedule of draft lengths that the engine refuses",
    "E710": "n-gram or suffix matching that the engine refuses",
    "E711": "a draft tree that Eagle refuses",
    "E712": "pipeline parallelism with a drafter outside of the model",
    "E802": "a load balancer that is not there",
    "E803": "an argument that AutoDeploy does not take",
    "E804": "a load balancer for experts that nothing moves",
    "E805": "an argument that an encoder does not take",
    "E806": "arguments that the engine does not take together",
    "E807": "an engine that only encodes",
    "E808": "early first tokens without effect",
    "E809": "wide expert parallelism without attention DP, or on one rank",
    "E810": "slots of experts that the ranks do not share out",
}

_ROWS = disagg.ROWS + sizes.ROWS + cache.ROWS + decoding.ROWS + together.ROWS

_RULES: tuple[Callable[[EngineCase], Iterator[Finding]], ...] = (
    disagg.check_transfer_buffer,
    sizes.check_expert_parallelism,
    sizes.check_cuda_graphs,
    cache.check_cache_type,
    decoding.check_fields_of_kind,
    decoding.check_draft_schedule,
    decoding.check_draft_trees,
    decoding.check_drafter,
    together.check_connector,
)

PAIR_RULES: tuple[Callable[[EngineCase, EngineCase], Iterator[Finding]], ...] = (
    pair.check_equal,
    pair.check_limits,
    pair.check_drafting,
)


def check_rules(case: EngineCase) -> list[Finding]:
    """The findings of all rules about one engine, by their codes."""
    found = [*check_rows(_ROWS, case), *(one for rule in _RULES for one in rule(case))]
    return sorted(found, key=lambda finding: finding.code)
