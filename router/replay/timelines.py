"""Workers that compute one prompt after the other, and where in what they do a further prompt fits."""

import math
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence, Set
from typing import NamedTuple

import numpy as np

from slagate.router.loadgen.trace import BLOCK_TOKENS
from slagate.workers.profiles.profile import TpProfile
from slagate.workers.profiles.table import Floats
from slagate.workers.serving.sim import BLOCK_TOKENS as ENGINE_BLOCK_TOKENS

TINY_S = 1e-6
"""Less than anything takes: sums of seconds in another order may differ in the last digits."""


class WorkerPace(NamedTuple):
    """A worker's true speed: `factor` times the profile's seconds; from a time on `slow` times those."""

    factor: float = 1.0
    slow: float = 1.0
    slow_from_s: float = math.inf

    def end_s(self, start_s: float, work_s: float) -> float:
        """When work ends that is so many seconds of the profile."""
        end_s = start_s + work_s * self.factor
        if end_s > self.slow_from_s:
            end_s += (end_s - max(start_s, self.slow_from_s)) * (self.slow - 1)
        return end_s

    def ends_s(self, start_s: float, work_s: Floats) -> Floats:
        """The same of f64[n]."""
        ends_s = start_s + work_s * self.factor
        if self.slow_from_s < math.inf:
            late_s = np.maximum(ends_s - max(start_s, self.slow_from_s), 0.0)
            ends_s += late_s * (self.slow - 1)
        return ends_s


class DuePrompt(NamedTuple):
    """One prompt, and when it must be computed."""

    number: int  # of its request
    release_s: float  # no worker has it before
    due_s: float  # all of it must be computed by then
    n_tokens: int
    blocks: tuple[int, ...] = ()  # of each full block, a number for all up to its end


class Span(NamedTuple):
    """When one prompt is computed."""

    start_s: float
    end_s: float


class Place(NamedTuple):
    """Where a prompt fits in a timeline. Of two in one timeline the lesser is better."""

    gpu_s: float  # that it takes
    delay_s: float  # of all prompts behind it together
    number: int  # of prompts before it
    spans: list[Span]  # of it, and of those behind it that it delays


class Timeline:
    """The prompts of one worker in order, each with its span, and each in time.

    What an earlier prompt has in common with a later one is not computed again, unless as much as the KV
    cache holds was computed in between.
    """

    def __init__(self, profile: TpProfile, pace: WorkerPace, gpus: float) -> None:
        self.prompts: list[DuePrompt] = []
        self._profile, self._pace, self._gpus = profile, pace, gpus
        self._starts_s: list[float] = []
        self._ends_s: list[float] = []
        self._start_of: dict[int, float] = {}
        self._holders: dict[int, list[int]] = {}  # by block, of prompts by number
        self._seconds: dict[tuple[int, int], float] = {}

    def work_s(self, prompt: DuePrompt, cached_tokens: int) -> float:
        """Seconds of the profile to compute it alone."""
        at = prompt.n_tokens, cached_tokens
        seconds = self._seconds.get(at)
        if seconds is None:
            seconds = self._profile.prefill_s(prompt.n_tokens - cached_tokens, cached_tokens)
            self._seconds[at] = seconds
        return seconds

    def place(self, prompt: DuePrompt) -> Place | None:
        """The best place for it; None where it, or one behind it, would be late."""
        ends_s = self._ends_s
        least_s = self.work_s(prompt, self._most_cached_tokens(prompt))
        best: Place | None = None
        for index in range(bisect_right(ends_s, prompt.release_s), len(ends_s) + 1):
            start_s = max(prompt.release_s, ends_s[index - 1] if index else 0.0)
            if self._pace.end_s(start_s, least_s) > prompt.due_s:
                break
            work_s = self.work_s(prompt, self._cached_tokens(prompt, index))
            span = Span(start_s, self._pace.end_s(start_s, work_s))
            if span.end_s > prompt.due_s:
                continue
            place = self._delaying(index, span)
            if place is not None and (best is None or place < best):
                best = place
                if work_s == least_s and not place.delay_s:
                    break
        return best

    def _delaying(self, index: int, span: Span) -> Place | None:
        """The place at `index`, unless it makes one of those behind it late."""
        starts_s, ends_s = self._starts_s, self._ends_s
        start_s, end_s = span
        gpu_s = (end_s - start_s) * self._gpus
        spans, delay_s = [span], 0.0
        for i in range(index, len(starts_s)):
            if starts_s[i] >= end_s:
                break
            start_s, end_s = end_s, end_s + (ends_s[i] - starts_s[i])
            if end_s > self.prompts[i].due_s:
                return None
            delay_s += start_s - starts_s[i]
            spans.append(Span(start_s, end_s))
        return Place(gpu_s, delay_s, index, spans)

    def _most_cached_tokens(self, prompt: DuePrompt) -> int:
        """How many of its tokens are cached behind all the prompts here, if none was dropped."""
        n_blocks = 0
        for block in prompt.blocks:
            if block not in self._holders:
                break
            n_blocks += 1
        return _reusable_tokens(prompt, n_blocks)

    def _cached_tokens(self, prompt: DuePrompt, index: int) -> int:
        """How many of its tokens are cached if it becomes the prompt at `index`."""
        if not index:
            return 0
        before_s, start_of = self._starts_s[index - 1], self._start_of
        n_blocks, held_s = 0, 0.0
        for block in prompt.blocks:
            for holder in reversed(self._holders.get(block, ())):
                if start_of[holder] <= before_s:
                    held_s = start_of[holder]
                    break
            else:
                break
            n_blocks += 1
        if n_blocks:
            left_tokens = self._profile.kv_capacity_tokens
            while index and self._starts_s[index - 1] > held_s:
                index -= 1
                left_tokens -= self.prompts[index].n_tokens
                if left_tokens < 0:
                    return 0
        return _reusable_tokens(prompt, n_blocks)

    def insert(self, prompt: DuePrompt, place: Place) -> None:
        """Put it there."""
        begin, end = place.number, place.number + len(place.spans) - 1
        self.prompts.insert(begin, prompt)
        self._starts_s[begin:end] = [span.start_s for span in place.spans]
        self._ends_s[begin:end] = [span.end_s for span in place.spans]
        for moved, span in zip(self.prompts[begin : end + 1], place.spans, strict=True):
            self._start_of[moved.number] = span.start_s
        for block in prompt.blocks:
            self._holders.setdefault(block, []).append(prompt.number)

    def append(self, prompt: DuePrompt, span: Span) -> None:
        """Put it behind all others."""
        self.insert(prompt, Place(0.0, 0.0, len(self.prompts), [span]))

    def in_time(self) -> Iterator[tuple[DuePrompt, float]]:
        """The prompts and when each has been computed, with all that is cached by then.

        One that is late after all, for what the cache has dropped, is left out.
        """
        cache, now_s = PrefixCache(self._profile.kv_capacity_tokens), 0.0
        for prompt in self.prompts:
            work_s = self.work_s(prompt, cache.cached_tokens(prompt))
            end_s = self._pace.end_s(max(now_s, prompt.release_s), work_s)
            if end_s <= prompt.due_s + TINY_S:
                cache.add_prompt(prompt)
                now_s = end_s
                yield prompt, end_s


def insert_cheapest(
    timelines: Sequence[Timeline],
    prompt: DuePrompt,
    *,
    never: Set[int] = frozenset(),
    rather_not: Set[int] = frozenset(),
) -> int | None:
    """Put it where it takes the least GPU seconds; the index of that timeline, None if it fits nowhere.

    Of equal ones the first: so some are full, and others have long gaps left for long prompts.
    """
    found = [
        (i in rather_not, place.gpu_s, i, place)
        for i, timeline in enumerate(timelines)
        if i not in never and (place := timeline.place(prompt)) is not None
    ]
    if not found:
        return None
    _, _, i, place = min(found)
    timelines[i].insert(prompt, place)
    return i


class PrefixCache:
    """What one worker has computed, in blocks; the least recently used ones are dropped."""

    def __init__(self, capacity_tokens: int) -> None:
        self._capacity = capacity_tokens // BLOCK_TOKENS
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def cached_tokens(self, prompt: DuePrompt) -> int:
        """How many of its tokens need not be computed."""
        n_blocks = 0
        for block in prompt.blocks:
            if block not in self._blocks:
                break
            n_blocks += 1
        return _reusable_tokens(prompt, n_blocks)

    def add_prompt(self, prompt: DuePrompt) -> None:
        """It was computed. Of its blocks the last ones are dropped first."""
        for block in reversed(prompt.blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)


def _reusable_tokens(prompt: DuePrompt, n_blocks: int) -> int:
    """Of so many cached blocks. The last token of a prompt is always computed, and its engine block."""
    last = (prompt.n_tokens - 1) // ENGINE_BLOCK_TOKENS * ENGINE_BLOCK_TOKENS
    return min(n_blocks * BLOCK_TOKENS, last)
