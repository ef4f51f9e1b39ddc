"""What a fleet could do for a trace: who can be served in time at all, and a schedule that knows it all.

A request counts where it meets both targets as its client measures them: TTFT from its arrival, and the
mean time between tokens. All is worked out from the profiles; neither a gateway nor an engine runs.

The schedule knows every arrival and length, the speed of each worker and what it has cached. It is a list
schedule: requests in order of their due times, those with much work a little later, each put where it
takes the least GPU time and makes none late that is in already, even before those; what fits nowhere is
missed. What was missed comes earlier in the next list. The best of these schedules counts, so it is no
proof that nothing is better.

It leaves out, for the better: steps that run when a request comes to a decode worker (half a step each),
prompts that share an iteration, first transfers between two workers, decode leases of requests in prefill,
ranks that wait for each other, the spread of each step's time (the mean is taken). For the worse: a prompt
is computed without a break, and shares whole blocks of the trace only.
"""

import math
from collections.abc import Generator, Sequence

from slagate.pools.grid.grid import Stage
from slagate.router.loadgen.trace import BLOCK_TOKENS
from slagate.router.replay.batches import BatchMember
from slagate.router.replay.client import Ask
from slagate.router.replay.fleet import Imperfection, SimFleet, SimPool, mean_factor
from slagate.router.replay.schedules import (
    AggScheduler,
    Schedule,
    Scheduler,
    SplitScheduler,
    TimedRequest,
    TimedWorker,
)
from slagate.router.replay.timelines import DuePrompt, WorkerPace
from slagate.workers.sim.timing import EngineTiming

CONTEXT_TOKENS = 131_072
"""A prompt as long as that is refused: the context of a simulated worker, as `SimOptions` has it."""

WORK_WEIGHTS = (0.0, 1.0, 3.0)
"""Seconds by which a second of work puts a request later in the list than its due time does."""

STEP_SHARES = (1.0, 0.8, 0.6, 0.4)
"""How long steps may be, in shares of what a request may take, on workers that are tried first."""

SOONER_S = 0.3
"""By how much a missed request is put earlier in the next list."""

LISTED = 16_000
LEAST_LISTS, MOST_LISTS = 3, 12
"""How many lists are tried: as many as have that many requests in all, within these bounds."""

Way = tuple[SimPool, SimPool]
"""The pools of prefill and decode that can serve a request; twice the same where one does both."""


def feasible(fleet: SimFleet, asks: Sequence[Ask], imperfection: Imperfection) -> list[bool]:
    """Whether the best pools of the fleet serve each request in time: idle, nothing cached, as profiled."""
    ways = _ways(fleet)
    return [any(_meets(way, ask, imperfection.latency_s) for way in ways) for ask in asks]


def scheduled(
    fleet: SimFleet, asks: Sequence[Ask], imperfection: Imperfection, seed: int
) -> list[bool]:
    """Whether each request meets both targets in the best schedule that was found; `seed` is the run's."""
    jobs = _jobs(fleet, asks, imperfection.latency_s)
    workers = {stage: _workers(fleet, stage, imperfection, seed) for stage in Stage}
    scheduler: Scheduler
    if workers[Stage.AGG]:
        computing = workers[Stage.AGG]
        scheduler = AggScheduler(jobs, computing)
    else:
        computing = workers[Stage.PREFILL]
        scheduler = SplitScheduler(jobs, computing, workers[Stage.DECODE], imperfection.latency_s)
    decoding = [decode for _, decode in _ways(fleet)]
    listed = [
        job
        for job, ask in zip(jobs, asks, strict=True)
        if any(_fits(pool, ask) for pool in decoding)
    ]
    work_s = [
        min(
            worker.pace.end_s(0.0, worker.profile.prefill_s(job.prompt.n_tokens, 0))
            for worker in computing
        )
        for job in jobs
    ]
    met = _best(scheduler, listed, work_s).met
    return [number in met for number in range(len(jobs))]


def _best(scheduler: Scheduler, jobs: Sequence[TimedRequest], work_s: Sequence[float]) -> Schedule:
    """The best of the schedules that are tried; `work_s` by number."""
    best = Schedule(frozenset(), frozenset())
    lists = _lists(jobs, work_s)
    keys, step_share = next(lists)
    for _ in range(max(LEAST_LISTS, min(MOST_LISTS, LISTED // max(1, len(jobs))))):
        order = sorted(jobs, key=lambda job: (keys[job.prompt.number], job.prompt.number))
        last = scheduler.attempt(order, step_share)
        if len(last.met) > len(best.met):
            best = last
        keys, step_share = lists.send(last)
    return best


def _lists(
    jobs: Sequence[TimedRequest], work_s: Sequence[float]
) -> Generator[tuple[dict[int, float], float], Schedule, None]:
    """Without end, keys to order requests by and a share of steps; is sent what came of each."""

    def keys_of(weight: float) -> dict[int, float]:
        due_s = {job.prompt.number: job.prompt.due_s for job in jobs}
        return {number: at_s + weight * work_s[number] for number, at_s in due_s.items()}

    weight, share = WORK_WEIGHTS[0], STEP_SHARES[0]
    best = yield keys_of(weight), share
    if best.refused:
        for each in STEP_SHARES[1:]:
            found = yield keys_of(weight), each
            if len(found.met) > len(best.met):
                best, share = found, each
    for each in WORK_WEIGHTS[1:]:
        found = yield keys_of(each), share
        if len(found.met) > len(best.met):
            best, weight = found, each
    keys, last = keys_of(weight), best
    while True:
        for number in keys:
            if number in last.refused:
                keys[number] = math.inf
            elif number not in last.met:
                keys[number] -= SOONER_S
        last = yield keys, share


def _jobs(fleet: SimFleet, asks: Sequence[Ask], latency_s: float) -> list[TimedRequest]:
    """All requests by number, as the schedule sees them."""
    transfers = [EngineTiming(pool.profile) for pool in fleet.pools if pool.stage is Stage.DECODE]
    prefixes: dict[tuple[int, int], int] = {}
    jobs = []
    for number, ask in enumerate(asks):
        n = ask.row.isl_tokens
        blocks, before = [], -1
        for block in ask.row.hash_ids[: n // BLOCK_TOKENS]:
            before = prefixes.setdefault((before, block), len(prefixes))
            blocks.append(before)
        first_by_s = due_s = ask.arrival_s + ask.sla.ttft_ms / 1000 - latency_s
        if transfers and not _is_whole(ask):
            due_s -= 2 * latency_s + min(timing.transfer_s(n) for timing in transfers)
        member = BatchMember(
            number, _answer_tokens(ask) - 1, n, n + ask.max_tokens, ask.sla.itl_ms / 1000
        )
        prompt = DuePrompt(number, ask.arrival_s + latency_s, due_s, n, tuple(blocks))
        jobs.append(TimedRequest(prompt, member, first_by_s, _is_whole(ask)))
    return jobs


def _workers(
    fleet: SimFleet, stage: Stage, imperfection: Imperfection, seed: int
) -> list[TimedWorker]:
    """The workers of a stage, with their true speed; each rank is one, and waits for no other."""
    slow, workers = imperfection.slow, []
    for pool in fleet.pools:
        limit = fleet.config.pools[pool.name].max_inflight
        n = pool.batch if limit is None else min(-(-limit // pool.ranks), pool.batch)
        for address in pool.addresses if pool.stage is stage else ():
            pace = WorkerPace(mean_factor(imperfection, seed, address))
            if slow is not None and slow.pool == pool.name:
                pace = pace._replace(slow=slow.factor, slow_from_s=slow.from_s)
            worker = TimedWorker(pool.profile, pace, pool.gpus / pool.ranks, n)
            workers += [worker] * pool.ranks
    return workers


def _ways(fleet: SimFleet) -> list[Way]:
    pools = {stage: [pool for pool in fleet.pools if pool.stage is stage] for stage in Stage}
    pairs = [(a, b) for a in pools[Stage.PREFILL] for b in pools[Stage.DECODE]]
    return [*pairs, *[(pool, pool) for pool in pools[Stage.AGG]]]


def idle_ttft_s(way: Way, ask: Ask, latency_s: float) -> float:
    """Seconds from arrival to first token on idle workers of these pools, with nothing cached.

    The first token comes with the prompt: the decode worker relays it once it has fetched the KV cache, and
    before its own first step. If it is the last token too, the prefill worker answers.
    """
    prefill, decode = way
    n = ask.row.isl_tokens
    seconds = prefill.profile.prefill_s(n, 0) + 2 * latency_s
    if prefill is not decode and not _is_whole(ask):
        seconds += EngineTiming(decode.profile).transfer_s(n) + 2 * latency_s
    return seconds


def idle_itl_s(pool: SimPool, ask: Ask) -> float:
    """Mean seconds between the tokens of a request that decodes alone; 0 for one token."""
    n_steps = _answer_tokens(ask) - 1
    if not n_steps:
        return 0.0
    return pool.profile.itl_s(1, ask.row.isl_tokens + (n_steps - 1) / 2)


def _meets(way: Way, ask: Ask, latency_s: float) -> bool:
    prefill, decode = way
    seconds = idle_ttft_s(way, ask, latency_s)
    if prefill is not decode and not _is_whole(ask):
        # Counted on the safe side: an engine may send the first token with its own first step.
        seconds += decode.profile.itl_s(1, ask.row.isl_tokens)
    return (
        _fits(decode, ask)
        and seconds * 1000 <= ask.sla.ttft_ms
        and idle_itl_s(decode, ask) * 1000 <= ask.sla.itl_ms
    )


def _fits(pool: SimPool, ask: Ask) -> bool:
    """Whether a worker that decodes would take it at all."""
    n = ask.row.isl_tokens
    return n < CONTEXT_TOKENS and n + ask.max_tokens <= pool.profile.kv_capacity_tokens


def _answer_tokens(ask: Ask) -> int:
    return ask.max_tokens if ask.ignore_eos else min(ask.answer_tokens, ask.max_tokens)


def _is_whole(ask: Ask) -> bool:
    """Whether the answer ends with its first token, by itself: then nothing is handed off."""
    return ask.answer_tokens == 1 and not ask.ignore_eos
