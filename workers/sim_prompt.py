"""What a caller may give as a prompt, and the token ids it becomes."""

from typing import Any, NamedTuple

from slagate.workers.sim_blocks import token_bytes
from slagate.workers.sim_request import PreprocessedInputs
from slagate.workers.sim_tokenizer import SimTokenizer

_MEDIA = ("multi_modal_data", "multi_modal_embeddings")


class PromptTokens(NamedTuple):
    """A prompt as a list and packed as uint32; `text` is None unless it was given."""

    tokens: list[int]
    packed: bytes
    text: str | None


def prompt_tokens(
    inputs: Any, *, tokenizer: SimTokenizer | None, vocab_size: int, pulls: bool
) -> PromptTokens:
    """Reads a string, token ids (also as an int32 array), a dict of either, or preprocessed inputs.

    `pulls` is true for a request whose prompt comes from another worker. Raises `TypeError`, `ValueError`,
    or `NotImplementedError` for media, which this engine does not have.
    """
    if isinstance(inputs, PreprocessedInputs):
        inputs = inputs.prompt_token_ids
    text = None
    if isinstance(inputs, dict):
        _check_media(inputs, pulls=pulls)
        text = inputs.get("prompt")
        inputs = inputs.get("prompt_token_ids", text)
    if isinstance(inputs, str):
        if tokenizer is None:
            raise ValueError("text prompts need a tokenizer; give prompt_token_ids")
        text, inputs = inputs, tokenizer.encode(inputs)
    # An int32 array, as newer TensorRT-LLM takes. Bytes must not pass as a list of ints.
    if hasattr(inputs, "tolist"):
        inputs = inputs.tolist()
    if not isinstance(inputs, list):
        raise TypeError(f"inputs must be text, token ids or a dict, not {type(inputs).__name__}")
    if not inputs:
        raise ValueError("prompt_token_ids is empty")
    packed = token_bytes(inputs)
    if max(inputs) >= vocab_size:
        raise ValueError(f"prompt_token_ids: {max(inputs)} is outside the vocabulary")
    return PromptTokens(inputs, packed, text)


def _check_media(inputs: dict[str, Any], *, pulls: bool) -> None:
    if "mm_processor_kwargs" in inputs and not isinstance(inputs["mm_processor_kwargs"], dict):
        raise TypeError("mm_processor_kwargs must be a dict")
    for name in _MEDIA:
        if inputs.get(name):
            if pulls:
                raise ValueError(f"{name} must not come with a generation_only request")
            raise NotImplementedError(f"{name} is not simulated")
