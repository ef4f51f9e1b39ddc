"""Which requests of the simulated engine wait, run and hold KV blocks, and what runs next.

    add -> waiting -> prefilling ----> decoding -> gone
              `-----> transferring ------^           (generation_only)

A sequence is in one group at a time, and in none once removed. No clock and no loop: the engine says
when, this says who.
"""

from collections import OrderedDict
from collections.abc import Sequence

from slagate.workers.sim_kv_cache import Allocation, SimKvCache
from slagate.workers.sim_sequence import Chunk, EngineLimits, SimSequence


class SimSchedule:
    """The groups, and the allocation of every sequence in them.

    `waiting` and `decoding` are to be read only, in order of arrival and of admission to decode.
    """

    def __init__(self, cache: SimKvCache, limits: EngineLimits) -> None:
        self._cache = cache
        self._limits = limits
        # Ordered for cheap removal at the front, which a plain dict has not.
        self.waiting: OrderedDict[SimSequence, None] = OrderedDict()
        self.decoding: dict[SimSequence, None] = {}
        self._prefilling: dict[SimSequence, None] = {}
        self._transferring: dict[SimSequence, None] = {}

    @property
    def n_running(self) -> int:
        """Requests admitted and not finished."""
        return len(self._prefilling) + len(self._transferring) + len(self.decoding)

    def is_ready(self) -> bool:
        """Whether an iteration may have something to do; a transfer alone gives it nothing."""
        return bool(self.waiting or self._prefilling or self.decoding)

    def sequences(self) -> list[SimSequence]:
        """Everything that waits or runs."""
        return [*self.waiting, *self._prefilling, *self._transferring, *self.decoding]

    def add(self, sequence: SimSequence) -> None:
        """Put a sequence at the end of the queue."""
        self.waiting[sequence] = None

    def admit(self) -> SimSequence | None:
        """Move the head of the queue in, with blocks for all it may become, or None if it must wait."""
        if not self.waiting or self.n_running >= self._limits.max_batch_size:
            return None
        sequence = next(iter(self.waiting))
        pulls = sequence.request_type == "generation_only"
        block_tokens = self._limits.block_tokens
        n_blocks = len(sequence.states)
        # The newest token is never in the cache, hence - 1; rounded up to whole blocks.
        n_blocks_at_end = -(-(sequence.n_prompt + sequence.max_tokens - 1) // block_tokens)
        # The last prompt token is always computed: its logits are the first output.
        reusable = [] if pulls else sequence.states[: (sequence.n_prompt - 1) // block_tokens]
        allocation = self._cache.allocate(
            reusable, n_blocks=n_blocks, reserve_blocks=n_blocks_at_end - n_blocks
        )
        if allocation is None:
            return None
        del self.waiting[sequence]
        sequence.allocation = allocation
        if pulls:
            self._transferring[sequence] = None
        else:
            sequence.prefilled_tokens = len(allocation.shared) * block_tokens
            sequence.result.cached_tokens = sequence.prefilled_tokens
            self._prefilling[sequence] = None
        return sequence

    def plan_chunks(self, budget_tokens: int) -> list[Chunk]:
        """Prefill work of one iteration, in order of admission."""
        chunks = []
        for sequence in self._prefilling:
            if budget_tokens <= 0:
                break
            n = min(budget_tokens, sequence.n_prompt - sequence.prefilled_tokens)
            chunks.append(Chunk(sequence, n))
            budget_tokens -= n
        return chunks

    def start_decoding(self, sequence: SimSequence) -> None:
        """The whole prompt is in the cache: make it reusable and let the sequence decode."""
        pulled = sequence.request_type == "generation_only"
        del (self._transferring if pulled else self._prefilling)[sequence]
        self.decoding[sequence] = None
        # TensorRT-LLM stores a prompt of L tokens as L - 1 reusable ones.
        n_full = (sequence.n_prompt - 1) // self._limits.block_tokens
        self._commit(sequence, sequence.states[:n_full])

    def grow(self, sequence: SimSequence) -> None:
        """Give a decoding sequence the next of the blocks reserved for it."""
        assert sequence.allocation is not None
        self._cache.grow(sequence.allocation)

    def take_blocks(self, sequence: SimSequence) -> Allocation:
        """Pass a decoding sequence's blocks on to the caller, who must release them."""
        allocation, sequence.allocation = self._commit_all(sequence), None
        return allocation

    def remove(self, sequence: SimSequence) -> None:
        """Take a sequence out of its group and free its blocks; full ones stay reusable."""
        if sequence.allocation is not None:
            if sequence in self.decoding:
                self._commit_all(sequence)
            self._cache.release(sequence.allocation)
            sequence.allocation = None
        for group in (self.waiting, self._prefilling, self._transferring, self.decoding):
            group.pop(sequence, None)

    def _commit_all(self, sequence: SimSequence) -> Allocation:
        """Make every full block of a decoding sequence reusable, generated ones too."""
        assert sequence.chain is not None
        n_full = sequence.n_prompt // self._limits.block_tokens
        return self._commit(sequence, sequence.states[:n_full] + sequence.chain.filled)

    def _commit(self, sequence: SimSequence, states: Sequence[bytes]) -> Allocation:
        allocation = sequence.allocation
        assert allocation is not None
        self._cache.commit(allocation, states[len(allocation.shared) :])
        return allocation
