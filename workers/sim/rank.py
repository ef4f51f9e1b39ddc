"""Attention-DP ranks of the simulated engine, and which sequence runs on which of them.

With attention data parallelism every rank has a KV cache and a batch of its own, and all ranks step
together. An engine without it is one rank. Sequences that wait for a rank are in one `WaitingQueue`.
"""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import msgspec

from slagate.workers.sim.kv_cache.cache import SimKvCache
from slagate.workers.sim.kv_cache.events import KvEventRecorder
from slagate.workers.sim.sequence import CacheContent, Chunk, EngineLimits, SimSequence
from slagate.workers.sim.timing import EngineTiming, PrefillChunk


class Queued(NamedTuple):
    """How many sequences wait for a rank, and the tokens of their prompts, to compute or to pull."""

    n_prefills: int
    prefill_tokens: int
    n_pulls: int
    pull_tokens: int


NONE_QUEUED = Queued(0, 0, 0, 0)


class WaitingQueue:
    """Sequences that wait for a rank, in order of arrival.

    They are counted as they come and go: every iteration asks for the counts, and visits no more of the
    queue than it must.
    """

    def __init__(self) -> None:
        # Removal at the front is cheap here, and not in a plain dict.
        self._line: OrderedDict[SimSequence, None] = OrderedDict()
        self._n_bound: Counter[int | None] = Counter()
        self._n_pulls = self._n_tokens = self._pull_tokens = 0

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[SimSequence]:
        return iter(self._line)

    @property
    def totals(self) -> Queued:
        """The counts of all that waits."""
        if not self._line:
            return NONE_QUEUED
        n_pulls, pull_tokens = self._n_pulls, self._pull_tokens
        return Queued(
            n_prefills=len(self._line) - n_pulls,
            prefill_tokens=self._n_tokens - pull_tokens,
            n_pulls=n_pulls,
            pull_tokens=pull_tokens,
        )

    def append(self, sequence: SimSequence) -> None:
        """Put a sequence at the end."""
        self._line[sequence] = None
        self._count(sequence, 1)

    def discard(self, sequence: SimSequence) -> None:
        """Take a sequence out. No-op when it does not wait."""
        if sequence in self._line:
            del self._line[sequence]
            self._count(sequence, -1)

    def wants(self, rank: int) -> bool:
        """Whether any waiting sequence may go to this rank."""
        return self._n_bound[rank] + self._n_bound[None] > 0

    def walk(self) -> Iterator[SimSequence]:
        """The queue from its front. Meanwhile the caller may remove the sequence given last, no other."""
        n_passed, n_part = 0, 8
        while part := list(islice(self._line, n_passed, n_passed + n_part)):
            for sequence in part:
                yield sequence
                n_passed += sequence in self._line
            # Passed sequences are skipped again to reach the next part.
            n_part *= 2

    def _count(self, sequence: SimSequence, n: int) -> None:
        self._n_bound[sequence.rank_wanted if sequence.rank_strict else None] += n
        self._n_tokens += n * sequence.n_prompt
        if sequence.is_pull:
            self._n_pulls += n
            self._pull_tokens += n * sequence.n_prompt


class RankStep(msgspec.Struct, frozen=True):
    """The work of one rank in one iteration. `n_new` and `n_active` are as of its start.

    `context_kv_tokens` are the tokens already in the cache of the prompts whose chunks it computes.
    """

    decoding: list[SimSequence]
    chunks: list[Chunk]
    n_new: int
    n_active: int
    context_kv_tokens: int
    onboarded_tokens: int

    def seconds(self, timing: EngineTiming) -> float:
        """How long it takes, in seconds."""
        chunks = []
        for sequence, new_tokens in self.chunks:
            assert sequence.allocation is not None
            reused = sequence.allocation.reused_tokens
            earlier = sequence.prefilled_tokens - reused
            chunks.append(PrefillChunk(new_tokens, earlier, reused))
        batch_size = len(self.decoding)
        context_tokens = sum([one.kv_tokens for one in self.decoding])
        return timing.iteration_s(
            chunks,
            batch_size=batch_size,
            context_tokens=context_tokens / batch_size if batch_size else 0.0,
            onboarded_tokens=self.onboarded_tokens,
        )

    def has_work(self) -> bool:
        """Whether anything it computes is still wanted."""
        return any(not one.done for one in self.decoding) or any(
            not chunk.sequence.done for chunk in self.chunks
        )


class Iteration(msgspec.Struct, frozen=True):
    """One running engine iteration; `steps` has one entry a rank."""

    started_s: float
    ends_s: float
    steps: list[RankStep]
    timer: asyncio.TimerHandle


class SimRank:
    """One rank: its cache, the sequences on it with their blocks, and its event recorder.

        admit -> prefilling ----> decoding -> gone
           `---> transferring ------^           (generation_only)

    A sequence is in one group at a time, and in none once removed. A rank has no clock and no loop: the
    engine calls it. `decoding` is to be read only, and in order of admission to decode. `recorder` None is
    a cache without events.
    """

    def __init__(
        self,
        index: int,
        cache: SimKvCache,
        limits: EngineLimits,
        *,
        recorder: KvEventRecorder | None = None,
    ) -> None:
        self.index = index
        self.cache = cache
        self.decoding: dict[SimSequence, None] = {}
        self._prefilling: dict[SimSequence, None] = {}
        self._transferring: dict[SimSequence, None] = {}
        self._limits = limits
        self._recorder = recorder
        self._n_new = 0
        self._n_completed = 0
        self._onboarded_blocks = 0

    @property
    def n_running(self) -> int:
        """Sequences admitted and not finished."""
        return len(self._prefilling) + len(self._transferring) + len(self.decoding)

    @property
    def n_prefilling(self) -> int:
        """Sequences whose prompt is not whole in the cache, and is computed here."""
        return len(self._prefilling)

    def is_full(self) -> bool:
        """Whether the batch has no place left."""
        return self.n_running >= self._limits.max_batch_size

    def is_ready(self) -> bool:
        """Whether an iteration has something to do; a transfer alone gives it nothing."""
        return bool(self._prefilling or self.decoding)

    def sequences(self) -> list[SimSequence]:
        """All sequences on this rank."""
        return [*self._prefilling, *self._transferring, *self.decoding]

    def admit(self, sequence: SimSequence) -> bool:
        """Let a sequence in, with blocks for all it may become; False when it must wait."""
        if self.is_full():
            return False
        n_blocks = len(sequence.prompt.states)
        # The newest token is never in the cache, hence - 1; rounded up to whole blocks. After a pull
        # another token is always drawn.
        n_drawn = max(sequence.max_tokens, 2) if sequence.is_pull else sequence.max_tokens
        n_tokens_at_end = sequence.n_prompt + n_drawn - 1
        n_blocks_at_end = -(-n_tokens_at_end // self._limits.block_tokens)
        allocation = self.cache.allocate(
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
        sequence.rank = self.index
        (self._transferring if sequence.is_pull else self._prefilling)[sequence] = None
        self._n_new += 1
        self._onboarded_blocks += allocation.onboarded_blocks
        return True

    def plan(self) -> RankStep:
        """The next iteration of this rank, with what was admitted since the last plan."""
        decoding = list(self.decoding)
        # A decoding request takes one token of the budget each.
        chunks = self._plan_chunks(self._limits.max_num_tokens - len(decoding))
        step = RankStep(
            decoding,
            chunks,
            n_new=self._n_new,
            n_active=self.n_running,
            context_kv_tokens=sum([chunk.sequence.prefilled_tokens for chunk in chunks]),
            onboarded_tokens=self._onboarded_blocks * self._limits.block_tokens,
        )
        self._n_new = self._onboarded_blocks = 0
        return step

    def _plan_chunks(self, budget_tokens: int) -> list[Chunk]:
        """Prefill work of one iteration, in order of admission.

        Without chunked prefill the first prompt that does not fit whole ends the plan: a later one must
        not overtake it for ever.
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

    def remove(self, sequence: SimSequence) -> None:
        """Count a sequence of this rank as ended and take it out; it keeps its blocks until `free`."""
        self._n_completed += 1
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
        self.cache.release(allocation)
        sequence.allocation = None

    def _store(self, sequence: SimSequence, content: CacheContent, *, ended: bool) -> None:
        assert sequence.allocation is not None
        self.cache.store(sequence.allocation, content.states, content.packed, partial=ended)

    def take_completed(self) -> int:
        """How many sequences have ended since the last call."""
        n_completed, self._n_completed = self._n_completed, 0
        return n_completed

    def flush(self) -> None:
        """Publish the KV events of its cache."""
        if self._recorder is not None:
            self._recorder.flush()


class RankGroup:
    """All ranks of an engine, and the sequences that wait for one.

    No sequence is overtaken on a rank that it could go to: once one finds no room there, those behind it
    do not get there in the same round. `waiting.append` adds a sequence, `remove` ends it.
    """

    def __init__(self, ranks: Sequence[SimRank], limits: EngineLimits) -> None:
        self.ranks = ranks
        self.waiting = WaitingQueue()
        self._buffer_tokens = limits.max_tokens_in_buffer

    @property
    def n_running(self) -> int:
        """Sequences admitted and not finished."""
        return sum([rank.n_running for rank in self.ranks])

    def sequences(self) -> list[SimSequence]:
        """All sequences, waiting and running."""
        running = [one for rank in self.ranks for one in rank.sequences()]
        return [*self.waiting, *running]

    def is_ready(self) -> bool:
        """Whether an iteration may have something to do."""
        return len(self.waiting) > 0 or any(rank.is_ready() for rank in self.ranks)

    def flush(self) -> None:
        """Publish the KV events of all caches."""
        for rank in self.ranks:
            rank.flush()

    def remove(self, sequence: SimSequence, *, keeps_blocks: bool) -> None:
        """Take a sequence out, wherever it is, and free its blocks unless it `keeps_blocks`."""
        self.waiting.discard(sequence)
        rank = self.ranks[sequence.rank or 0]
        rank.remove(sequence)
        if not keeps_blocks:
            rank.free(sequence)

    def admit(self) -> Iterator[SimSequence]:
        """Admit what fits, one at a time, so that room which the caller frees meanwhile counts."""
        if not len(self.waiting):
            return
        closed = {rank.index for rank in self.ranks if rank.is_full()}
        closed.update([rank.index for rank in self.ranks if not self.waiting.wants(rank.index)])
        if len(closed) == len(self.ranks):
            return
        for sequence in self.waiting.walk():
            if self._must_wait(sequence):
                continue
            choices = self._choices(sequence)
            for rank in choices:
                if rank.index not in closed and rank.admit(sequence):
                    self.waiting.discard(sequence)
                    yield sequence
                    break
            else:
                closed.update([rank.index for rank in choices])
                if len(closed) == len(self.ranks):
                    return

    def _must_wait(self, sequence: SimSequence) -> bool:
        """Whether no room would help: a branch whose prompt is not computed, a pull beyond the buffer."""
        if sequence.is_pull:
            # TensorRT-LLM never starts such a transfer and says nothing.
            return self._buffer_tokens is not None and sequence.n_prompt > self._buffer_tokens
        first = sequence.first
        return first is not None and first.chain is None and not first.done

    def _choices(self, sequence: SimSequence) -> Sequence[SimRank]:
        """Ranks that may take a sequence, best first."""
        ranks = self.ranks
        if len(ranks) == 1:
            return ranks
        if sequence.first is not None and sequence.first.rank is not None:
            # Its prompt is in that cache.
            return ranks[sequence.first.rank : sequence.first.rank + 1]
        by_load = sorted(ranks, key=lambda rank: (rank.n_running, rank.cache.used_blocks))
        wanted = sequence.rank_wanted
        if wanted is None:
            return by_load
        if sequence.rank_strict:
            return [ranks[wanted]]
        return [ranks[wanted], *(rank for rank in by_load if rank.index != wanted)]
