"""Two logits processors: one that needs no state, and one that says where an answer is.

Both work on whatever holds the logits: a tensor of the engine's, or an array.
"""

import math
import sys
from collections.abc import Sequence
from typing import Any

MIN_TEMPERATURE = 0.01
"""Logits of a hundred become ten thousand, which half precision holds; much less overflows, and the
difference of two infinities is no number."""


class Temperature:
    """Divides the logits: over 1 evens chances out, under 1 sharpens them."""

    def __init__(self, temperature: float) -> None:
        """Raises `ValueError` unless the temperature is finite and `MIN_TEMPERATURE` or more."""
        is_number = isinstance(temperature, int | float) and not isinstance(temperature, bool)
        if not is_number or not MIN_TEMPERATURE <= temperature <= sys.float_info.max:
            raise ValueError(
                f"temperature must be a finite number, {MIN_TEMPERATURE} or more: {temperature!r}"
            )
        self._temperature = temperature

    def __call__(self, input_ids: Sequence[int], logits: Any, /) -> None:
        """As `LogitsProcessor`."""
        logits /= self._temperature


class ForcedResponse:
    """Lets the model say these tokens, then the end of text, and nothing else."""

    def __init__(
        self,
        token_ids: Sequence[int],
        *,
        end_id: int,
        n_prompt_tokens: int,
        vocab_size: int | None,
    ) -> None:
        """Raises `ValueError` unless `token_ids` are token ids, and of the vocabulary if it is known."""
        if not isinstance(token_ids, list | tuple) or not all(map(_is_token_id, token_ids)):
            raise ValueError("token_ids must be a list of token ids")
        if vocab_size is not None and token_ids and max(token_ids) >= vocab_size:
            raise ValueError(
                f"token_ids: {max(token_ids)} is outside the vocabulary of {vocab_size}"
            )
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
