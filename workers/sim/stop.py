"""When a generated sequence ends by its content: end-of-text, stop token ids, stop words."""

from collections.abc import Sequence
from typing import NamedTuple


class Stop(NamedTuple):
    """Why and how a sequence ends; `n_trim` tokens at its end are not part of the answer."""

    reason: str
    stop_reason: int | str | None  # None: end-of-text
    n_trim: int


class StopWord(NamedTuple):
    """Tokens that end a sequence, and what the answer names as the cause."""

    cause: int | str
    tokens: tuple[int, ...]


class StopRules:
    """The stop conditions of one request.

    End-of-text is looked at first and stays in the answer; a stop word is cut off unless `include_stop`.
    `ignore_eos` switches stop words off too, and the first `min_tokens` tokens end nothing, as in
    TensorRT-LLM.
    """

    __slots__ = ("_end_id", "_include_stop", "_last_tokens", "_min_tokens", "_words")

    def __init__(
        self,
        *,
        end_id: int,
        stop_token_ids: Sequence[int] = (),
        stop_words: Sequence[StopWord] = (),
        min_tokens: int = 0,
        include_stop: bool = False,
        ignore_eos: bool = False,
    ) -> None:
        self._end_id = end_id
        self._min_tokens = min_tokens
        self._include_stop = include_stop
        self._words: tuple[StopWord, ...] = (
            *(StopWord(token, (token,)) for token in stop_token_ids),
            *(word for word in stop_words if word.tokens),
        )
        # Nearly every token is none of these, so nearly every check is one look-up.
        self._last_tokens = frozenset((end_id, *(word.tokens[-1] for word in self._words)))
        if ignore_eos:
            self._last_tokens = frozenset()

    def check(self, generated: Sequence[int]) -> Stop | None:
        """Whether the newest of all generated tokens, at the end of the list, ends the sequence."""
        newest = generated[-1]
        if newest not in self._last_tokens or len(generated) <= self._min_tokens:
            return None
        if newest == self._end_id:
            return Stop("stop", None, 0)
        for word in self._words:
            n = len(word.tokens)
            if tuple(generated[-n:]) == word.tokens:
                return Stop("stop", word.cause, 0 if self._include_stop else n)
        return None
