"""Two logits processors: one that needs no state, and one that says where an answer is.

Both work on whatever holds the logits: a tensor of the engine's, or an array.
"""

import math
from collections.abc import Sequence
from typing import Any


class Temperature:
    """Divides the logits: over 1 evens chances out, under 1 sharpens them."""

    def __init__(self, temperature: float) -> None:
        """Raises `ValueError` unless the temperature is a finite number over 0."""
        is_number = isinstance(temperature, int | float) and not isinstance(temperature, bool)
        if not is_number or not math.isfinite(temperature) or temperature <= 0:
            raise ValueError(f"temperature must be a finite number over 0: {temperature!r}")
        self._temperature = temperature

    def __call__(self, input_ids: Sequence[int], logits: Any, /) -> None:
        """As `LogitsProcessor`."""
        logits /= self._temperature


class ForcedResponse:
    """Lets the model say these tokens, then the end of text, and nothing else."""

    def __init__(self, token_ids: Sequence[int], *, end_id: int, n_prompt_tokens: int) -> None:
        """Raises `ValueError` unless `token_ids` are token ids."""
        if not isinstance(token_ids, list | tuple) or not all(map(_is_token_id, token_ids)):
            raise ValueError("token_ids must be a list of token ids")
        self._token_ids = (*token_ids, end_id)
        self._n_prompt_tokens = n_prompt_tokens

    def __call__(self, input_ids: Sequence[int], logits: Any, /) -> None:
        """As `LogitsProcessor`."""
        # Not by counting calls: the first token of a handoff was another worker's.
        n_said = len(input_ids) - self._n_prompt_tokens
        token_id = self._token_ids[min(n_said, len(self._token_ids) - 1)]
        logits[:] = -math.inf
        logits[token_id] = 0.0


def _is_token_id(value: object) -> bool:
    return type(value) is int and value >= 0
