"""Options of a command line that are engine arguments, one table for every command that takes them.

`slagate worker` has some of them for the simulated engine too, with defaults of its own.
"""

from typing import Annotated

import typer

from slagate.workers.engine_args_sections import INT32_MAX, MAX_RANKS

MODEL = typer.Option(
    help="trtllm: folder or Hugging Face id. sim: served name; default: the profile's."
)
TP = typer.Option(
    "--tp", "--tensor-parallel-size", min=1, max=MAX_RANKS, help="Tensor parallel size."
)
MAX_BATCH_SIZE = typer.Option(min=1, max=1_000_000, help="Requests a step may run.")
MAX_SEQ_LEN = typer.Option(min=2, max=INT32_MAX, help="Context window, tokens.")
ATTENTION_DP = typer.Option(
    "--attention-dp",
    "--enable-attention-dp",
    help="One KV cache per rank; as many ranks as --tp.",
)
KV_EVENTS = typer.Option(
    min=0,
    max=100_000_000,
    help="KV events the engine keeps until they are read; 0: it makes none.",
)
STREAM_INTERVAL = typer.Option(
    min=1, max=INT32_MAX, help="Tokens between two responses of a stream."
)


def count(about: str, most: int = INT32_MAX) -> tuple[object, object]:
    """An option that is a number from 1, unset by default."""
    return Annotated[int | None, typer.Option(min=1, max=most, help=about)], None


def text(about: str) -> tuple[object, object]:
    """An option that is text, unset by default."""
    return Annotated[str | None, typer.Option(help=about)], None


TRTLLM_OPTIONS: dict[str, tuple[object, object]] = {
    "backend": text("trtllm: pytorch or _autodeploy."),
    "pipeline_parallel_size": count("trtllm: pipeline parallel size.", MAX_RANKS),
    "expert_parallel_size": count("trtllm: expert parallel size of MoE layers.", MAX_RANKS),
    "gpus_per_node": count("trtllm: GPUs of a node; default: those visible.", MAX_RANKS),
    "kv_block_size": count("trtllm: tokens of a KV block."),
    "max_num_tokens": count("trtllm: tokens a step may run."),
    "free_gpu_memory_fraction": (
        Annotated[
            float | None,
            typer.Option(
                min=0.0, max=1.0, help="trtllm: share of free GPU memory for the KV cache."
            ),
        ],
        None,
    ),
    "guided_decoding_backend": text("trtllm: xgrammar or llguidance."),
}
"""Those that the simulated engine has not: name to annotation and default."""

OPTIONS: dict[str, tuple[object, object]] = {
    "model": (Annotated[str | None, MODEL], None),
    "tp": (Annotated[int | None, TP], None),
    "max_batch_size": (Annotated[int | None, MAX_BATCH_SIZE], None),
    "max_seq_len": (Annotated[int | None, MAX_SEQ_LEN], None),
    "attention_dp": (Annotated[bool, ATTENTION_DP], False),
    "kv_events": (Annotated[int | None, KV_EVENTS], None),
    "stream_interval": (Annotated[int | None, STREAM_INTERVAL], None),
    **TRTLLM_OPTIONS,
}
"""All, unset by default: for commands that run no engine."""
