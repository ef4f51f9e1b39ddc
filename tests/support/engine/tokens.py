"""What the simulated engine must answer: prompts to send and their continuations."""

from collections.abc import Sequence

from slagate.workers.sim.kv_cache.blocks import continuation
from support.gateway.processes import MODEL

BLOCK_TOKENS = 32
VOCABULARY = 128_256
EOS = 128_001

PROMPT_BEFORE_EOS = [2603]
"""The model's continuation of this prompt has the end-of-text id as its fifth token."""


def prompt(n_tokens: int, *, seed: int = 1) -> list[int]:
    """Token ids; prompts of different seeds share no prefix."""
    return [(i * 7919 + seed * 104_729) % 100_000 for i in range(n_tokens)]


def expected(tokens: Sequence[int], n_tokens: int, salt: str = "") -> list[int]:
    """The first `n_tokens` that any right stream has after these."""
    return continuation(
        tokens,
        n_tokens,
        model=MODEL,
        block_tokens=BLOCK_TOKENS,
        vocab_size=VOCABULARY,
        cache_salt=salt,
    )
