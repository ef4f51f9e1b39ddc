"""Schedules of a trace on a fleet by one who knows all of it: who is computed where, in which order."""

import heapq
import math
from bisect import insort
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from slagate.router.replay.batches import BatchMember, DecodeBatch, Stall
from slagate.router.replay.timelines import (
    TINY_S,
    DuePrompt,
    PrefixCache,
    Span,
    Timeline,
    WorkerPace,
    insert_cheapest,
)
from slagate.workers.profiles.profile import TpProfile
from slagate.workers.sim.timing import EngineTiming

ITERATION_TOKENS = 8192
"""What one iteration of an engine takes, of prompts and tokens: `max_num_tokens` by default."""

FEW = 8
"""Members of a batch by which it is said whether a worker is slow for a request."""

TRIES = 50
"""How often a request is offered to decode workers, at most, while its TTFT target is not missed."""


class TimedRequest(NamedTuple):
    """One request, and its times on the trace's clock."""

    prompt: DuePrompt
    member: BatchMember
    first_by_s: float  # when the worker that decodes must have its first token
    is_whole: bool  # its first token is its last one, and comes with the prompt


class TimedWorker(NamedTuple):
    """One worker, and its true speed."""

    profile: TpProfile
    pace: WorkerPace
    gpus: float
    max_requests: int  # that decode at once

    def timeline(self) -> Timeline:
        """Its prompts, to begin with none."""
        return Timeline(self.profile, self.pace, self.gpus)

    def batch(self) -> DecodeBatch:
        """Its batch, to begin with empty."""
        return DecodeBatch(self.profile, self.pace, self.max_requests)

    def is_slow_for(self, job: TimedRequest, step_share: float) -> bool:
        """Whether the steps of a small batch take more than this share of what the request may take.

        It would be in time there, and hardly anything else could be done meanwhile.
        """
        step_s = self.profile.itl_s(FEW, job.prompt.n_tokens) * self.pace.factor
        return step_s > step_share * job.member.step_s


class Schedule(NamedTuple):
    """A schedule that was tried: the numbers of the requests that meet both targets.

    `refused` are those whose prompt could be computed in time, and which nobody could decode in time.
    """

    met: frozenset[int]
    refused: frozenset[int]


class Scheduler(Protocol):
    """One kind of fleet."""

    def attempt(self, jobs: Sequence[TimedRequest], step_share: float) -> Schedule:
        """Schedule requests in this order, each where it takes the least GPU time and makes none late."""


class SplitScheduler:
    """Prefill and decode workers.

    A request that no batch can take waits for one while it is in time; then it takes the place of the one
    that has most steps to go and more than itself, as Moore and Hodgson drop the longest.
    """

    def __init__(
        self,
        jobs: Sequence[TimedRequest],
        prefill: Sequence[TimedWorker],
        decode: Sequence[TimedWorker],
        latency_s: float,
    ) -> None:
        """`jobs` are all requests by number; a message takes `latency_s` each way."""
        self._jobs, self._prefill, self._decode = jobs, prefill, decode
        self._latency_s = latency_s
        self._token_s = min([EngineTiming(worker.profile).transfer_s(1) for worker in decode])

    def attempt(self, jobs: Sequence[TimedRequest], step_share: float) -> Schedule:
        """Compute the prompts in the order of the list, and decode each as soon as a worker can."""
        timelines = [worker.timeline() for worker in self._prefill]
        for job in jobs:
            insert_cheapest(timelines, job.prompt)
        met, ready = set(), []
        for timeline in timelines:
            for prompt, end_s in timeline.in_time():
                if self._jobs[prompt.number].is_whole:
                    met.add(prompt.number)
                else:
                    first_s = end_s + 2 * self._latency_s + self._token_s * prompt.n_tokens
                    ready.append((first_s, prompt.number))
        computed = frozenset([*met, *[number for _, number in ready]])
        met |= self._decoded(ready, step_share)
        return Schedule(frozenset(met), computed - met)

    def _decoded(self, ready: list[tuple[float, int]], step_share: float) -> set[int]:
        """Who ends in time, of requests whose first tokens can be at a decode worker from a time on."""
        batches = [worker.batch() for worker in self._decode]
        heapq.heapify(ready)
        met = set()
        while ready:
            now_s, number = heapq.heappop(ready)
            job = self._jobs[number]
            for batch in batches:
                batch.advance(now_s)
            order = self._in_order(job, batches, step_share)
            if any(batches[i].join(job.member) for i in order):
                met.add(number)
                continue
            ends_s = [end_s for each in batches if (end_s := each.first_end_s) is not None]
            later_s = now_s + (job.first_by_s - job.prompt.release_s) / TRIES
            later_s = max(later_s, min(ends_s, default=math.inf))
            if later_s <= job.first_by_s:
                heapq.heappush(ready, (later_s, number))
                continue
            replaced = (batches[i].replace_longest(job.member) for i in order)
            dropped = next((out for out in replaced if out is not None), None)
            if dropped is not None:
                met.discard(dropped.number)
                met.add(number)
        return met

    def _in_order(
        self, job: TimedRequest, batches: Sequence[DecodeBatch], step_share: float
    ) -> list[int]:
        """Batches, the one to try first first.

        Those of workers that are not slow for it, of the fewest GPUs, with the most members come first.
        """
        order = [
            (worker.is_slow_for(job, step_share), worker.gpus, -len(batch), i)
            for i, (worker, batch) in enumerate(zip(self._decode, batches, strict=True))
        ]
        return [i for *_, i in sorted(order)]


class AggScheduler:
    """Workers that do both: one prompt after the other, and a step of the batch with each part of it.

    A prompt that would make the batch late waits for the next end in it, while it is in time.
    """

    def __init__(self, jobs: Sequence[TimedRequest], workers: Sequence[TimedWorker]) -> None:
        """`jobs` are all requests by number."""
        self._jobs, self._workers = jobs, workers

    def attempt(self, jobs: Sequence[TimedRequest], step_share: float) -> Schedule:
        """Offer each request of the list to the workers, one that a worker refuses to the others."""
        timelines = [worker.timeline() for worker in self._workers]
        slow = {
            job.prompt.number: frozenset(
                i for i, each in enumerate(self._workers) if each.is_slow_for(job, step_share)
            )
            for job in jobs
        }
        tried: dict[int, set[int]] = {job.prompt.number: set() for job in jobs}
        waiting, computed = [job.prompt for job in jobs], set[int]()
        while waiting:
            changed = set()
            for prompt in waiting:
                number = prompt.number
                i = insert_cheapest(timelines, prompt, never=tried[number], rather_not=slow[number])
                if i is not None:
                    changed.add(i)
                    tried[number].add(i)
            computed.update(p.number for i in changed for p in timelines[i].prompts)
            before = [prompt for i in sorted(changed) for prompt in timelines[i].prompts]
            for i in changed:
                timelines[i] = self._served(self._workers[i], timelines[i])
            served = {prompt.number for i in changed for prompt in timelines[i].prompts}
            waiting = sorted(
                [prompt for prompt in before if prompt.number not in served],
                key=lambda prompt: prompt.due_s,
            )
        met = frozenset(prompt.number for each in timelines for prompt in each.prompts)
        return Schedule(met, frozenset(computed) - met)

    def _served(self, worker: TimedWorker, plan: Timeline) -> Timeline:
        """Who of a plan, which knows of no batch, is computed when, and ends in time."""
        batch, cache = worker.batch(), PrefixCache(worker.profile.kv_capacity_tokens)
        served, prompts, now_s = worker.timeline(), plan.prompts, 0.0
        coming = deque(sorted(range(len(prompts)), key=lambda i: prompts[i].release_s))
        here: list[int] = []  # in the order of the plan
        while coming or here:
            batch.advance(now_s)
            while coming and prompts[coming[0]].release_s <= now_s:
                insort(here, coming.popleft())
            for i in list(here):
                prompt = prompts[i]
                cached = cache.cached_tokens(prompt)
                work_s = plan.work_s(prompt, cached)
                if worker.pace.end_s(now_s, work_s) > prompt.due_s + TINY_S:
                    here.remove(i)
                    continue
                n_steps = -(-(prompt.n_tokens - cached) // (ITERATION_TOKENS - len(batch)))
                member = self._jobs[prompt.number].member
                if batch.join(member, Stall(work_s, n_steps), first_by_s=prompt.due_s):
                    here.remove(i)
                    cache.add_prompt(prompt)
                    served.append(prompt, Span(now_s, batch.now_s))
                    now_s = batch.now_s
                    break
            else:
                later_s = [prompts[coming[0]].release_s] if coming else []
                if here and batch.first_end_s is not None:
                    later_s.append(batch.first_end_s)
                if not later_s:
                    break
                now_s = min(later_s)
        return served
