"""Rules of parallelism, steps and CUDA-graph sizes that have to be computed."""

import math
from collections.abc import Iterator

from slagate.workers.engine_args.model.merge import in_brief
from slagate.workers.engine_args.rules.case import EngineCase
from slagate.workers.findings import Finding, error, note, warning

GRAPHS = "cuda_graph_config"


def check_parallelism(case: EngineCase) -> Iterator[Finding]:
    """Yields E405 unless each pipeline stage has its layers, E401 unless experts go into their ranks.

    `Mapping.__init__`, mapping.py id 2561868716, which takes clusters of experts only whole.
    """
    layers, stages = case.args.pp_partition, case.args.pipeline_parallel_size
    if layers is not None and len(layers) != stages:
        text = f"is {in_brief(layers)}, and pipeline_parallel_size {stages}: one entry a stage"
        yield error("E405", "pp_partition", text, "give the layers of each stage, or take it out")
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


def check_steps(case: EngineCase) -> Iterator[Finding]:
    """Yields E407 for prompts that fit the context and not a step."""
    said, step = case.wanted.longest_prompt_tokens, case.args.max_num_tokens
    longest = said or case.args.max_seq_len or 0
    if case.role in ("agg", "prefill") and not case.args.enable_chunked_prefill and longest > step:
        # Prompts of a step's length, with answers as long, are what public recipes have such sizes for.
        put = note if said is None and longest <= 2 * step else warning
        text = f"is {step:,} without chunked prefill: longer prompts are refused"
        advice = "set enable_chunked_prefill: true, or raise max_num_tokens to the longest prompt"
        yield put("E407", "max_num_tokens", text, advice)


def check_cuda_graphs(case: EngineCase) -> Iterator[Finding]:
    """Yields E501 if CUDA-graph sizes contradict, E503 or E504 if batches go without a graph.

    Sizes above the batch cost nothing: the engine drops them (`_filter_cuda_graph_batch_sizes`).
    """
    graphs, batch = case.args.cuda_graph_config, case.args.max_batch_size
    if graphs is None:
        return
    sizes = graphs.batch_sizes
    longest = max(sizes) if sizes else graphs.max_batch_size or 128
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
