"""Sequences of the simulated engine that wait for a rank: their order, and how much they are."""

from collections import Counter, OrderedDict
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from slagate.workers.sim_sequence import SimSequence


class Queued(NamedTuple):
    """Sequences that wait for a rank, and the tokens of their prompts: to compute, or to pull."""

    n_prefills: int
    prefill_tokens: int
    n_pulls: int
    pull_tokens: int


NONE_QUEUED = Queued(0, 0, 0, 0)


class WaitingLine:
    """Sequences that wait for a rank, in order of arrival, counted as they come and go.

    An iteration asks for the counts each time, and looks at no more of the line than it must.
    """

    def __init__(self) -> None:
        # Ordered for cheap removal at the front, which a plain dict has not.
        self._line: OrderedDict[SimSequence, None] = OrderedDict()
        self._n_bound: Counter[int | None] = Counter()
        self._n_pulls = self._n_tokens = self._pull_tokens = 0

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[SimSequence]:
        return iter(self._line)

    @property
    def totals(self) -> Queued:
        """How much waits."""
        n_pulls, pull_tokens = self._n_pulls, self._pull_tokens
        return Queued(
            n_prefills=len(self._line) - n_pulls,
            prefill_tokens=self._n_tokens - pull_tokens,
            n_pulls=n_pulls,
            pull_tokens=pull_tokens,
        )

    def add(self, sequence: SimSequence) -> None:
        """Put a sequence at the end."""
        self._line[sequence] = None
        self._count(sequence, 1)

    def discard(self, sequence: SimSequence) -> None:
        """Take a sequence out. No-op when it does not wait."""
        if sequence in self._line:
            del self._line[sequence]
            self._count(sequence, -1)

    def wants(self, rank: int) -> bool:
        """Whether any of them may go to this rank."""
        return self._n_bound[rank] + self._n_bound[None] > 0

    def walk(self) -> Iterator[SimSequence]:
        """From the front, while the caller takes out what this gave last, and nothing else."""
        n_passed, n_part = 0, 8
        while part := list(islice(self._line, n_passed, n_passed + n_part)):
            for sequence in part:
                yield sequence
                n_passed += sequence in self._line
            # What was passed is skipped again to get at the next part.
            n_part *= 2

    def _count(self, sequence: SimSequence, n: int) -> None:
        self._n_bound[sequence.rank_wanted if sequence.rank_strict else None] += n
        self._n_tokens += n * sequence.n_prompt
        if sequence.is_pull:
            self._n_pulls += n
            self._pull_tokens += n * sequence.n_prompt
