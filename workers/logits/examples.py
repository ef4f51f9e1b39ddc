"""Two examples of logits processors: one without state, and one that depends on the place in the answer.

Both work on tensors and on NumPy arrays.
"""

import math
import sys
from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from slagate.workers.logits.processors import LogitsProcessor

MIN_TEMPERATURE = 0.01
"""Makes logits of a hundred ten thousand, which fits half precision. Much less would overflow, and the
difference of two infinities is not a number."""


class Temperature(LogitsProcessor):
    """Divides the logits: a temperature over 1 evens probabilities out, one under 1 sharpens them."""

    def __init__(self, temperature: float) -> None:
        """Raises `ValueError` unless the temperature is finite and `MIN_TEMPERATURE` or more."""
        is_number = isinstance(temperature, int | float) and not isinstance(temperature, bool)
        if not is_number or not MIN_TEMPERATURE <= temperature <= sys.float_info.max:
            raise ValueError(
                f"temperature must be a finite number, {MIN_TEMPERATURE} or more: {temperature!r}"
            )
        self._temperature = temperature

    @override
    def __call__(self, input_ids: Sequence[int], logits: Any, /) -> None:
        logits /= self._temperature


class ForcedResponse(LogitsProcessor):
    """Makes the model generate these tokens and then the end of text."""

    def __init__(
        self,
        token_ids: Sequence[int],
        *,
        end_id: int,
        n_prompt_tokens: int,
        vocab_size: int | None,
    ) -> None:
        """Raises `ValueError` for what is not a token id, or outside the vocabulary, if that is known."""
        if not isinstance(token_ids, list | tuple) or not all(map(_is_token_id, token_ids)):
            raise ValueError("token_ids must be a list of token ids")
        if vocab_size is not None and token_ids and max(token_ids) >= vocab_size:
            raise ValueError(
                f"token_ids: {max(token_ids)} is outside the vocabulary of {vocab_size}"
            )
        self._token_ids = (*token_ids, end_id)
        self._n_prompt_tokens = n_prompt_tokens

    @override
    def __call__(self, input_ids: Sequence[int], logits: Any, /) -> None:
        # Counting calls would be wrong: on a decode worker, another one generated the first token.
        n_said = len(input_ids) - self._n_prompt_tokens
        token_id = self._token_ids[min(n_said, len(self._token_ids) - 1)]
        logits[:] = -math.inf
        logits[token_id] = 0.0


def _is_token_id(value: object) -> bool:
    return type(value) is int and value >= 0
