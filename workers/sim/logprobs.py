"""Log probabilities of the simulated engine: a function of the context, as its tokens are."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from slagate.workers.sim.kv_cache.blocks import TokenChain

LogprobForm = Literal["dict", "flat", "dict_without_chosen"]

# Ranks of one position follow each other at this distance, so that a better rank always has more.
_RANK_STEP = 0.75
_WORST_CHOSEN_RANK = 3


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural logarithm of a token's probability, and its place among all tokens (1 = most likely)."""

    logprob: float
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class LogprobMaker:
    """Makes what one request asked for: the `n_top` most likely tokens and the chosen one.

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
        """One entry a prompt position, each after the tokens in front of it."""
        chain = TokenChain(seed, b"", block_tokens)
        entries = []
        for token in tokens:
            entries.append(self.of(token, chain.state))
            chain.append(token)
        return entries


def chosen_logprob(token: int, state: bytes) -> float:
    """What the chosen token's entry says, whatever the form."""
    return _best(token, state) - _RANK_STEP * (_chosen_rank(token, state) - 1)


def _best(token: int, state: bytes) -> float:
    # Parallel sequences start from one context, so the token takes part.
    return -0.01 - ((state[8] ^ token) & 0xFF) / 512


def _chosen_rank(token: int, state: bytes) -> int:
    return 1 + (state[9] + token) % _WORST_CHOSEN_RANK
