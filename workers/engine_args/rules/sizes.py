"""Rules of parallelism, of token and batch limits, and of CUDA-graph sizes."""

from collections.abc import Iterator

from slagate.workers.engine_args.rules.case import EngineCase
from slagate.workers.findings import Finding, error, warning

GRAPHS = "cuda_graph_config"


def check_expert_parallelism(case: EngineCase) -> Iterator[Finding]:
    """Yields E401 if the experts' parallel sizes do not go into the tensor-parallel size."""
    args = case.args
    sizes = {
        name: size
        for name in ("moe_tensor", "moe_expert", "moe_cluster")
        if (size := getattr(args, f"{name}_parallel_size")) is not None and size > 0
    }
    product = 1
    for size in sizes.values():
        product *= size
    tp = args.tensor_parallel_size
    named = {"moe_tensor", "moe_expert"} <= sizes.keys()
    if product > tp or tp % product or (named and product != tp):
        listed = " x ".join(f"{name}_parallel_size {size}" for name, size in sizes.items())
        yield error(
            "E401",
            f"{next(iter(sizes))}_parallel_size",
            f"does not fit: {listed} does not go into tensor_parallel_size {tp}",
            f"set moe_expert_parallel_size to a divisor of {tp}, and leave moe_tensor_parallel_size out",
        )


def check_attention_dp(case: EngineCase) -> Iterator[Finding]:
    """Yields E402 for attention DP of one rank, E403 for settings of attention DP without it."""
    args = case.args
    if args.enable_attention_dp:
        if args.tensor_parallel_size == 1:
            yield warning(
                "E402",
                "enable_attention_dp",
                "is true with tensor_parallel_size 1: one rank has everything, as without it",
                "raise tensor_parallel_size, or take it out",
            )
        return
    for key in ("attention_dp_config", "enable_lm_head_tp_in_adp"):
        if getattr(args, key):
            yield warning(
                "E403",
                key,
                "does nothing without enable_attention_dp",
                "set enable_attention_dp: true, or take it out",
            )


def check_gpus(case: EngineCase) -> Iterator[Finding]:
    """Yields E404 if GPUs do not fill nodes, E405 if `pp_partition` does not fit the stages."""
    args = case.args
    per_node, world = args.gpus_per_node, args.world_size
    if per_node is not None and world > per_node and world % per_node:
        yield error(
            "E404",
            "gpus_per_node",
            f"is {per_node}, and the engine spans {world} GPUs, which do not fill nodes of that",
            "let tensor x pipeline x context parallel size be a multiple of it",
        )
    if args.pp_partition is not None and len(args.pp_partition) != args.pipeline_parallel_size:
        yield error(
            "E405",
            "pp_partition",
            f"has {len(args.pp_partition)} entries for {args.pipeline_parallel_size} stages",
            "give the layers of each stage, or take it out",
        )


def check_step_tokens(case: EngineCase) -> Iterator[Finding]:
    """Yields E406 if a batch exceeds a step, E407 or E408 if a prompt is too long."""
    args = case.args
    per_request = args.step_tokens_of_a_request
    needed = args.max_batch_size * per_request
    if case.role != "prefill" and needed > args.max_num_tokens:
        drafts = f" x {per_request} (one and its drafts)" if per_request > 1 else ""
        yield warning(
            "E406",
            "max_num_tokens",
            f"is {args.max_num_tokens:,}, less than max_batch_size {args.max_batch_size:,}{drafts}: "
            "a full batch does not fit into a step",
            f"set max_num_tokens to {needed} at least, or lower max_batch_size",
        )
    longest = case.wanted.longest_prompt_tokens or args.max_seq_len
    if (
        case.role in ("agg", "prefill")
        and not args.enable_chunked_prefill
        and longest is not None
        and longest > args.max_num_tokens
    ):
        yield warning(
            "E407",
            "max_num_tokens",
            f"is {args.max_num_tokens:,} without chunked prefill: longer prompts are refused, "
            f"and they may have {longest:,}",
            "set enable_chunked_prefill: true, or raise max_num_tokens",
        )
    if (
        case.has("max_input_len")
        and args.max_seq_len is not None
        and args.max_input_len > args.max_seq_len
    ):
        yield warning(
            "E408",
            "max_input_len",
            f"is {args.max_input_len:,}, above max_seq_len {args.max_seq_len:,}",
            "a prompt and its answer share max_seq_len; lower max_input_len",
        )


def check_cuda_graphs(case: EngineCase) -> Iterator[Finding]:
    """Yields E501 if CUDA-graph sizes contradict, E502 to E504 if they do not fit the batches."""
    graphs, batch = case.args.cuda_graph_config, case.args.max_batch_size
    if graphs is None:
        return
    sizes = graphs.batch_sizes
    if sizes and graphs.max_batch_size not in (0, max(sizes)):
        yield error(
            "E501",
            f"{GRAPHS}.max_batch_size",
            f"is {graphs.max_batch_size}, and the largest of batch_sizes is {max(sizes)}; "
            "the engine refuses the two",
            "leave max_batch_size out, the list says it",
        )
        return
    if case.role == "prefill" or not case.has(GRAPHS):
        return
    if graphs.largest > batch:
        yield warning(
            "E502",
            f"{GRAPHS}.{'batch_sizes' if sizes else 'max_batch_size'}",
            f"goes to {graphs.largest}, and max_batch_size is {batch}: memory for graphs that never run",
            f"end at {batch}",
        )
    elif graphs.largest < batch and case.has("max_batch_size"):
        yield warning(
            "E503",
            f"{GRAPHS}.{'batch_sizes' if sizes else 'max_batch_size'}",
            f"goes to {graphs.largest}, and max_batch_size is {batch:,}: larger batches run without "
            "a graph, and slower",
            f"add {batch}, or lower max_batch_size",
        )
    drafting = case.args.speculative_config
    # A schedule of draft lengths switches padding on: llm_args `TorchLlmArgs.validate_speculative_config`.
    is_padded = graphs.enable_padding or (drafting and drafting.draft_len_schedule is not None)
    if sizes and not is_padded and len(set(sizes)) < max(sizes):
        yield warning(
            "E504",
            f"{GRAPHS}.enable_padding",
            "is false and batch_sizes has gaps: a batch between two of them runs without a graph",
            "set enable_padding: true",
        )
