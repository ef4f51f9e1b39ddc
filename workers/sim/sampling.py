"""Sampling in the simulated engine: log probabilities, and the conditions that end a sequence.

Log probabilities are a function of the context, as the tokens are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from slagate.workers.sim.kv_cache.blocks import TokenChain

LogprobForm = Literal["dict", "flat", "dict_without_chosen"]

# The distance between two ranks of one position, so that a better rank always has the higher number.
_RANK_STEP = 0.75
_WORST_CHOSEN_RANK = 3


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural logarithm of a token's probability, and its place among all tokens (1 = most likely)."""

    logprob: float
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class LogprobMaker:
    """Makes the log probabilities of the `n_top` most likely tokens and of the chosen one.

    dict                 {token id: Logprob}, the chosen token always among them
    flat                 the chosen token's number alone
    dict_without_chosen  the most likely tokens alone, the chosen one not among them
    """

    n_top: int
    form: LogprobForm
    vocab_size: int

    def of(self, token: int, state: bytes) -> Any:
        """The entry of `token`, chosen after the context in `state`."""
        if self.form == "flat":
            return chosen_logprob(token, state)
        best, chosen_rank = _best(token, state), _chosen_rank(token, state)
        hides_chosen = self.form == "dict_without_chosen"
        entry: dict[int, Logprob] = {}
        for rank in range(1, min(self.n_top, self.vocab_size - 1) + 1):
            is_chosen = rank == chosen_rank and not hides_chosen
            # Steps of one from the chosen token: never itself, and all different.
            one = token if is_chosen else (token + rank) % self.vocab_size
            entry[one] = Logprob(best - _RANK_STEP * (rank - 1), rank)
        if not hides_chosen and token not in entry:
            entry[token] = Logprob(chosen_logprob(token, state), chosen_rank)
        return entry

    def of_prompt(self, tokens: Sequence[int], *, seed: bytes, block_tokens: int) -> list[Any]:
        """One entry for each prompt token, in the context of the tokens before it."""
        chain = TokenChain(seed, b"", block_tokens)
        entries = []
        for token in tokens:
            entries.append(self.of(token, chain.state))
            chain.append(token)
        return entries


def chosen_logprob(token: int, state: bytes) -> float:
    """The chosen token's log probability, which is the same in every form."""
    return _best(token, state) - _RANK_STEP * (_chosen_rank(token, state) - 1)


def _best(token: int, state: bytes) -> float:
    # Parallel sequences start from one context, so the token takes part.
    return -0.01 - ((state[8] ^ token) & 0xFF) / 512


def _chosen_rank(token: int, state: bytes) -> int:
    return 1 + (state[9] + token) % _WORST_CHOSEN_RANK


class Stop(NamedTuple):
    """Why and how a sequence ends; `n_trim` tokens at its end are not part of the answer."""

    reason: str
    stop_reason: int | str | None  # None: end-of-text
    n_trim: int


class StopWord(NamedTuple):
    """Tokens that end a sequence, and the cause that the answer names."""

    cause: int | str
    tokens: tuple[int, ...]


class StopRules:
    """The stop conditions of one request.

    End-of-text is checked first and stays in the answer, then the budget, then stop words, which are cut
    off unless `include_stop`: a stop word that ends with the last token of the budget ends nothing. Source:
    _torch/pyexecutor/sampler.py id 1555942117, `_handle_stop_criteria`. Without `end_id` there is no end of
    text.

    Among the first `min_tokens` tokens the end of text ends nothing. Stop words do: sampler/token_ban.py id
    57105158218, `_add_min_length_bans`, and sampler.py id 440197692, `_apply_min_length_penalty`, ban the
    end of text alone, and issue #4776 saw the same. A banned token is not drawn, so one that is let pass
    here is part of no stop word.
    """

    __slots__ = ("_end_id", "_include_stop", "_last_tokens", "_min_tokens", "_words")

    def __init__(
        self,
        *,
        end_id: int | None,
        stop_words: Sequence[StopWord] = (),
        min_tokens: int = 0,
        include_stop: bool = False,
    ) -> None:
        self._end_id = end_id
        self._min_tokens = min_tokens
        self._include_stop = include_stop
        self._words = tuple(word for word in stop_words if word.tokens)
        # Nearly every token is none of these, so nearly every check is one look-up.
        self._last_tokens = frozenset(word.tokens[-1] for word in self._words)

    def check(self, generated: Sequence[int], *, max_tokens: int | None = None) -> Stop | None:
        """Whether the newest of all generated tokens, at the end of the list, ends the sequence."""
        newest = generated[-1]
        is_end = newest == self._end_id
        if is_end and len(generated) > self._min_tokens:
            return Stop("stop", None, 0)
        if max_tokens is not None and len(generated) >= max_tokens:
            return Stop("length", None, 0)
        if is_end or newest not in self._last_tokens:
            return None
        for word in self._words:
            n = len(word.tokens)
            if tuple(generated[-n:]) == word.tokens:
                return Stop("stop", word.cause, 0 if self._include_stop else n)
        return None
