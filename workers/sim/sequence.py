"""One sequence inside the simulated engine, and the limits it runs under."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from slagate.workers.sim.kv_cache.blocks import (
    TOKEN_BYTES,
    AnswerLength,
    CachePrompt,
    TokenChain,
    next_token,
    token_bytes,
)
from slagate.workers.sim.kv_cache.cache import Allocation
from slagate.workers.sim.outputs import OutputFeed
from slagate.workers.sim.request import DisaggregatedParams12, SimLogitsProcessor
from slagate.workers.sim.sampling import StopRules

_OTHER_LOGIT = -10.0
"""The logit of every token but the one that the context gives, which has 0."""


class KvLayout(NamedTuple):
    """What a transceiver must find on the other side as on its own, beside the size of a block.

    The C++ transceiver refuses another type itself (cacheFormatter.cpp id 52388011155 `inquireSupport`),
    the Python one another size of an element (peer.py id 36372961593); neither understands what the other
    one, another back-end or another cache manager sends.
    """

    backend: str  # NIXL, UCX, MOONCAKE or MPI
    runtime: str  # CPP or PYTHON
    dtype: str
    manager: str  # V1 or V2


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """The bounds of one rank's iteration, and the sizes that all workers of a model must agree on.

    `max_tokens_in_buffer` bounds the prompt that a decode worker can receive; None is no bound. An
    iteration gives a decoding sequence up to `tokens_per_step` tokens, as accepted drafts do. The first of
    them that ends the sequence is the last: _torch/pyexecutor/sampler.py id 1555942117,
    `process_draft_tokens`.
    """

    max_batch_size: int
    max_num_tokens: int
    block_tokens: int
    vocab_size: int
    kv_block_bytes: int
    kv_layout: KvLayout
    chunked_prefill: bool = True
    max_tokens_in_buffer: int | None = None
    tokens_per_step: int = 1


class CacheContent(NamedTuple):
    """Tokens in the cache, packed, and the states of the full blocks that they fill."""

    states: Sequence[bytes]
    packed: bytes


@dataclass(slots=True, eq=False)
class SimSequence:
    """One output of a request: first as it was submitted, then how far the engine is with it.

    `branch` is its index among the parallel outputs of the request. The others have the sequence of branch
    0 in `first`, run on its rank and reuse its prompt. `rank_wanted` without `rank_strict` is a preference.
    With an `answer` the end of text is its last token and no other one.
    `kv_tokens` counts tokens in the cache, where the newest generated one is not yet.
    """

    feed: OutputFeed
    prompt: CachePrompt
    n_prompt: int
    max_tokens: int
    stop: StopRules
    request_type: str
    params: DisaggregatedParams12 | None
    branch: int = 0
    first: "SimSequence | None" = None
    rank_wanted: int | None = None
    rank_strict: bool = False
    processors: tuple[SimLogitsProcessor, ...] = ()
    answer: AnswerLength | None = None

    rank: int | None = None
    allocation: Allocation | None = None
    chain: TokenChain | None = None
    prefilled_tokens: int = 0
    kv_tokens: int = 0
    generated: list[int] = field(default_factory=list)
    done: bool = False

    @property
    def request_id(self) -> int:
        """The id of its request."""
        return self.feed.result.request_id

    @property
    def is_pull(self) -> bool:
        """Whether its prompt comes from another worker."""
        return self.request_type == "generation_only"

    def start_chain(self, parent: bytes, block_tokens: int) -> None:
        """Begin the output's context, once the prompt is whole in the cache.

        `parent` is the state of the prompt's last full block.
        """
        whole = self.n_prompt - self.n_prompt % block_tokens
        tail = self.prompt.packed[whole * TOKEN_BYTES :]
        self.chain = TokenChain(parent, tail, block_tokens)
        self.kv_tokens = self.n_prompt

    def leading(self, n_tokens: int, block_tokens: int) -> CacheContent:
        """The first `n_tokens` of the prompt."""
        states = self.prompt.states[: n_tokens // block_tokens]
        return CacheContent(states, self.prompt.packed[: n_tokens * TOKEN_BYTES])

    def cached(self, block_tokens: int) -> CacheContent:
        """Its tokens in the cache: while it prefills, those computed so far."""
        if self.chain is None:
            return self.leading(self.prefilled_tokens, block_tokens)
        full = self.prompt.states[: self.n_prompt // block_tokens]
        # The newest token is never in the cache.
        generated = token_bytes(self.generated[:-1])
        return CacheContent([*full, *self.chain.filled], self.prompt.packed + generated)

    def draw(self, state: bytes, vocab_size: int) -> int:
        """The token after the context in `state`. Raises what a logits processor raises.

        Logits are made for processors only. The largest is that of the token which the context gives, so
        a processor that changes nothing, or all of them alike, changes no answer.
        """
        token = next_token(state, vocab_size, self.branch)
        if self.answer is not None:
            token = self.answer.token(token, len(self.generated))
        if not self.processors:
            return token
        # As the engine passes them: f32[1, beams, vocabulary].
        logits = np.full((1, 1, vocab_size), _OTHER_LOGIT, dtype=np.float32)
        logits[0, 0, token] = 0.0
        token_ids = [*self.feed.result.prompt_token_ids, *self.generated]
        for processor in self.processors:
            processor(self.request_id, logits, [token_ids], None, self.request_id)
        return int(np.argmax(logits[0, 0]))


class Chunk(NamedTuple):
    """Prompt tokens of one sequence computed in one iteration."""

    sequence: SimSequence
    new_tokens: int
