"""Rules of parallelism, of token and batch limits, and of CUDA-graph sizes."""

import math
from collections.abc import Callable, Iterator

from slagate.workers.engine_args.rules.case import EngineCase
from slagate.workers.engine_args.rules.row import RuleRow, value_at
from slagate.workers.findings import Finding, error, note

GRAPHS = "cuda_graph_config"


def _of_attention_dp(key: str) -> RuleRow:
    """A row of a setting that attention DP alone has."""
    return RuleRow(
        f"note E403 {key}",
        lambda case: value_at(case, key) and not case.args.enable_attention_dp,
        "does nothing without enable_attention_dp",
        "set enable_attention_dp: true, or take it out",
    )


def _may_be_half_answer(case: EngineCase) -> bool:
    """Whether prompts of a step's length fit, with answers as long: public recipes have such sizes."""
    is_said = case.wanted.longest_prompt_tokens is not None
    return not is_said and (case.args.max_seq_len or 0) <= 2 * case.args.max_num_tokens


def _too_long(severity: str, applies: Callable[[EngineCase], object]) -> RuleRow:
    """A row of prompts that fit the context and not a step."""
    return RuleRow(
        f"{severity} E407 max_num_tokens",
        lambda case: (
            applies(case)
            and case.role in ("agg", "prefill")
            and not case.args.enable_chunked_prefill
            and (case.wanted.longest_prompt_tokens or case.args.max_seq_len or 0)
            > case.args.max_num_tokens
        ),
        "is {args.max_num_tokens:,} without chunked prefill: longer prompts are refused",
        "set enable_chunked_prefill: true, or raise max_num_tokens to the longest prompt",
    )


ROWS = (
    RuleRow(
        "note E402 enable_attention_dp",
        lambda case: case.args.enable_attention_dp and case.args.tensor_parallel_size == 1,
        "is true, and with tensor_parallel_size 1 there is one rank",
        "take it out",
    ),
    _of_attention_dp("attention_dp_config"),
    _of_attention_dp("enable_lm_head_tp_in_adp"),
    RuleRow(
        "error E405 pp_partition",
        lambda case: (
            case.args.pp_partition is not None
            and len(case.args.pp_partition) != case.args.pipeline_parallel_size
        ),
        "is {value}, and pipeline_parallel_size {args.pipeline_parallel_size}: one entry a stage",
        "give the layers of each stage, or take it out",
    ),
    RuleRow(
        "warning E406 max_num_tokens",
        lambda case: (
            case.role != "prefill"
            and (case.has("max_batch_size") or case.has("max_num_tokens"))
            and case.batch_tokens > case.args.max_num_tokens
        ),
        "is {args.max_num_tokens:,}, less than max_batch_size {args.max_batch_size:,} x "
        "{args.step_tokens_of_a_request} (a token and its drafts): a full batch does not fit into a step",
        "set max_num_tokens to {case.batch_tokens} at least, or lower max_batch_size",
    ),
    _too_long("warning", lambda case: not _may_be_half_answer(case)),
    _too_long("note", _may_be_half_answer),
)


def check_expert_parallelism(case: EngineCase) -> Iterator[Finding]:
    """Yields E401 if the experts' parallel sizes do not go into the ranks that they are spread over.

    `Mapping.__init__`, mapping.py id 2561868716, which takes clusters of experts only whole.
    """
    names = ("moe_tensor_parallel_size", "moe_expert_parallel_size", "moe_cluster_parallel_size")
    given = {name: getattr(case.args, name) for name in names}
    sizes = {name: size for name, size in given.items() if size not in (None, -1)}
    product, ranks = math.prod(sizes.values()), case.moe_ranks
    is_both = names[0] in sizes and names[1] in sizes
    is_clustered = sizes.get(names[2], 1) > 1 and sizes.get(names[1], 1) > 1
    if not product or ranks % product or (is_both and product != ranks) or is_clustered:
        listed = " x ".join(f"{name} {size}" for name, size in sizes.items())
        spread = "tensor_parallel_size"
        if ranks != case.args.tensor_parallel_size:
            spread += " x context_parallel_size"
        yield error(
            "E401",
            next(iter(sizes)),
            f"does not fit: {listed} does not go into {spread} {ranks}",
            f"set moe_expert_parallel_size to a divisor of {ranks}, and leave moe_tensor_parallel_size out",
        )


def check_cuda_graphs(case: EngineCase) -> Iterator[Finding]:
    """Yields E501 if CUDA-graph sizes contradict, E503 or E504 if batches go without a graph.

    Sizes above the batch cost nothing: the engine drops them (`_filter_cuda_graph_batch_sizes`).
    """
    graphs, batch = case.args.cuda_graph_config, case.args.max_batch_size
    if graphs is None:
        return
    sizes, longest = graphs.batch_sizes, graphs.largest
    if sizes and graphs.max_batch_size not in (0, max(sizes)):
        yield error(
            "E501",
            f"{GRAPHS}.max_batch_size",
            f"is {graphs.max_batch_size}, and the largest of batch_sizes is {max(sizes)}; "
            "the engine refuses the two",
            "leave max_batch_size out, the list says it",
        )
    elif case.role != "prefill" and case.has(GRAPHS):
        if longest < batch and case.has("max_batch_size"):
            text = f"goes to {longest}: larger batches, up to {batch:,}, are slower"
            name = f"{GRAPHS}.{'batch_sizes' if sizes else 'max_batch_size'}"
            yield note("E503", name, text, f"add {batch}")
        # A schedule of draft lengths switches padding on: `TorchLlmArgs.validate_speculative_config`.
        is_padded = graphs.enable_padding or (case.drafting and case.drafting.draft_len_schedule)
        if sizes and not is_padded and len(set(sizes)) < max(sizes):
            text = "is false: a batch between two of batch_sizes has no graph"
            yield note("E504", f"{GRAPHS}.enable_padding", text, "set it to true")
