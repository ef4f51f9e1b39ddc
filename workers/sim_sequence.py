"""One request inside the simulated engine, and the limits it runs under."""

import asyncio
from dataclasses import dataclass
from typing import NamedTuple

from slagate.workers.sim_kv_cache import Allocation, TokenChain
from slagate.workers.sim_request import DisaggregatedParams, RequestOutput


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What bounds an iteration, and the sizes all workers of one model must agree on."""

    max_batch_size: int
    max_num_tokens: int
    block_tokens: int
    vocab_size: int
    kv_block_bytes: int


@dataclass(slots=True, eq=False)
class SimSequence:
    """A request as submitted (first part), and how far the engine is with it.

    `packed` is the prompt as little-endian uint32, `states` the state of each of its blocks.
    `kv_tokens` counts tokens in the cache: the newest generated one is not there yet.
    """

    result: RequestOutput
    packed: bytes
    n_prompt: int
    seed: bytes
    states: list[bytes]
    max_tokens: int
    min_tokens: int
    end_id: int
    stop_ids: frozenset[int]
    keep_stop_token: bool
    request_type: str
    params: DisaggregatedParams | None

    allocation: Allocation | None = None
    chain: TokenChain | None = None
    prefilled_tokens: int = 0
    kv_tokens: int = 0
    n_generated: int = 0
    last_token: int = -1
    done: bool = False
    transfer_timer: asyncio.TimerHandle | None = None

    def stops_at(self, token: int) -> bool:
        """Whether `token`, generated next, ends the request (a stop inside min_tokens does not)."""
        return token in self.stop_ids and self.n_generated >= self.min_tokens

    def start_chain(self, parent: bytes, block_tokens: int) -> None:
        """The whole prompt is in the cache; `parent` is the state of its last full block."""
        whole = self.n_prompt - self.n_prompt % block_tokens
        self.chain = TokenChain(parent, self.packed[whole * 4 :], block_tokens)
        self.kv_tokens = self.n_prompt


class Chunk(NamedTuple):
    """Prompt tokens of one sequence computed in one iteration."""

    sequence: SimSequence
    new_tokens: int


class Iteration(NamedTuple):
    """One running engine iteration."""

    started_s: float
    ends_s: float
    decoding: list[SimSequence]
    chunks: list[Chunk]
    n_new: int
    timer: asyncio.TimerHandle

    def has_work(self) -> bool:
        """Whether anything it computes is still wanted."""
        return any(not one.done for one in self.decoding) or any(
            not chunk.sequence.done for chunk in self.chunks
        )
