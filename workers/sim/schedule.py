"""Which sequences run on one rank of the simulated engine, which blocks they hold, and what runs next.

    admit -> prefilling ----> decoding -> gone
       `---> transferring ------^           (generation_only)

A sequence is in one group at a time, and in none once removed. No clock and no loop: the engine says
when, this says who.
"""

from slagate.workers.sim.kv_cache.cache import SimKvCache
from slagate.workers.sim.sequence import CacheContent, Chunk, EngineLimits, SimSequence


class SimSchedule:
    """The groups, and the allocation of every sequence in them.

    `decoding` is to be read only; it is in order of admission to decode.
    """

    def __init__(self, cache: SimKvCache, limits: EngineLimits) -> None:
        self._cache = cache
        self._limits = limits
        self.decoding: dict[SimSequence, None] = {}
        self._prefilling: dict[SimSequence, None] = {}
        self._transferring: dict[SimSequence, None] = {}

    @property
    def n_running(self) -> int:
        """Sequences admitted and not finished."""
        return len(self._prefilling) + len(self._transferring) + len(self.decoding)

    def is_full(self) -> bool:
        """Whether the batch has no place left."""
        return self.n_running >= self._limits.max_batch_size

    def is_ready(self) -> bool:
        """Whether an iteration has something to do; a transfer alone gives it nothing."""
        return bool(self._prefilling or self.decoding)

    def sequences(self) -> list[SimSequence]:
        """Everything that runs."""
        return [*self._prefilling, *self._transferring, *self.decoding]

    def admit(self, sequence: SimSequence) -> bool:
        """Let a sequence in, with blocks for all it may become; False when it must wait."""
        if self.is_full():
            return False
        n_blocks = len(sequence.prompt.states)
        # The newest token is never in the cache, hence - 1; rounded up to whole blocks.
        n_tokens_at_end = sequence.n_prompt + sequence.max_tokens - 1
        n_blocks_at_end = -(-n_tokens_at_end // self._limits.block_tokens)
        allocation = self._cache.allocate(
            sequence.prompt,
            n_blocks=n_blocks,
            reserve_blocks=n_blocks_at_end - n_blocks,
            # The last prompt token is always computed: its logits are the first output.
            reusable_tokens=0 if sequence.is_pull else sequence.n_prompt - 1,
        )
        if allocation is None:
            return False
        sequence.allocation = allocation
        sequence.prefilled_tokens = allocation.reused_tokens
        (self._transferring if sequence.is_pull else self._prefilling)[sequence] = None
        return True

    def plan_chunks(self, budget_tokens: int) -> list[Chunk]:
        """Prefill work of one iteration, in order of admission.

        Without chunked prefill the first prompt that does not fit whole ends the plan: what came later
        must not overtake it for ever.
        """
        chunks = []
        for sequence in self._prefilling:
            if budget_tokens <= 0:
                break
            n = sequence.n_prompt - sequence.prefilled_tokens
            if n > budget_tokens:
                if not self._limits.chunked_prefill:
                    break
                n = budget_tokens
            chunks.append(Chunk(sequence, n))
            budget_tokens -= n
        return chunks

    def start_decoding(self, sequence: SimSequence) -> None:
        """The whole prompt is in the cache: make it reusable and let the sequence decode."""
        del (self._transferring if sequence.is_pull else self._prefilling)[sequence]
        self.decoding[sequence] = None
        # TensorRT-LLM stores a prompt of L tokens as L - 1 reusable ones.
        block_tokens = self._limits.block_tokens
        n_full_tokens = (sequence.n_prompt - 1) // block_tokens * block_tokens
        self._store(sequence, sequence.leading(n_full_tokens, block_tokens), ended=False)

    def grow(self, sequence: SimSequence) -> None:
        """Give a decoding sequence the next of the blocks reserved for it."""
        assert sequence.allocation is not None
        self._cache.grow(sequence.allocation)

    def remove(self, sequence: SimSequence) -> None:
        """Take a sequence out of its group; it keeps its blocks until `free`."""
        for group in (self._prefilling, self._transferring, self.decoding):
            group.pop(sequence, None)

    def free(self, sequence: SimSequence) -> None:
        """Give a removed sequence's blocks back; what it has computed stays reusable.

        Once its prompt is complete that includes a last, partly filled block.
        """
        allocation = sequence.allocation
        if allocation is None:
            return
        complete = sequence.chain is not None
        if complete or not sequence.is_pull:
            content = sequence.cached(self._limits.block_tokens)
            self._store(sequence, content, ended=complete)
        self._cache.release(allocation)
        sequence.allocation = None

    def _store(self, sequence: SimSequence, content: CacheContent, *, ended: bool) -> None:
        assert sequence.allocation is not None
        self._cache.store(sequence.allocation, content.states, content.packed, partial=ended)
