"""All runs of a suite: each trace, fleet, policy, load and seed, and what bounds them."""

import math
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from slagate.router.replay.client import Ask
from slagate.router.replay.fleet import SimFleet, load_fleet
from slagate.router.replay.jobs import run_jobs
from slagate.router.replay.measure import run_figures, schedule_figures
from slagate.router.replay.oracle import feasible, scheduled
from slagate.router.replay.out import OutFile, Row, RowKey
from slagate.router.replay.policies.registry import make
from slagate.router.replay.run import play
from slagate.router.replay.suite import Suite
from slagate.router.replay.trace import TraceRow, count_rows, read_rows
from slagate.router.replay.tune import Tried, combinations, other_rows, tried
from slagate.workers.runtime.clock import monotonic_s

ORACLE = "oracle"
LOAD_STEP = 1.05
"""The precision of the highest load that is looked for: 5 %."""

FIND_ROUNDS = 6
"""Doublings or halvings of the load before the search gives up: by 64 either way."""


class Job(NamedTuple):
    """One run to do, or for the policy `ORACLE` one schedule."""

    suite: Suite
    key: RowKey

    def __str__(self) -> str:
        """Which run it is, for errors."""
        load = "search" if self.key.load is None else f"load {self.key.load:g}"
        return (
            f"{self.key.policy} on {self.key.trace}, {self.key.fleet}, {load}, seed {self.key.seed}"
        )


def keys_of(suite: Suite) -> list[RowKey]:
    """The rows that a suite has, in their order: the oracle's behind those that it bounds."""
    keys = []
    for trace in suite.traces:
        for fleet in suite.fleets:
            for load in suite.loads:
                for seed in suite.seeds:
                    keys += [
                        RowKey(Path(trace).stem, Path(fleet).stem, policy, load, seed)
                        for policy in (*suite.policies, ORACLE)
                    ]
            if suite.find_rate is not None:
                keys += [
                    RowKey(Path(trace).stem, Path(fleet).stem, policy, None, seed, suite.find_rate)
                    for policy in suite.policies
                    for seed in suite.seeds
                ]
    return keys


def missing(suite: Suite, out: OutFile) -> list[RowKey]:
    """The rows to play: those that `out` has not, and an oracle's of a run of fewer policies."""

    def is_there(key: RowKey) -> bool:
        beside = _beside(suite, key) if key.policy == ORACLE else []
        return key in out and all(
            each in out and out[each]["both_met"] <= out[key]["both_met"] for each in beside
        )

    return [key for key in keys_of(suite) if not is_there(key)]


def setup_of(suite: Suite) -> dict[str, Any]:
    """What all rows of a suite have in common, for `OutFile`."""
    return {
        "version": version("slagate"),
        "requests": suite.requests,
        "skip": suite.skip,
        "ideal": suite.ideal,
        "classes": [each._asdict() for each in suite.classes],
        "fleets": {Path(fleet).stem: load_fleet(fleet).config.text for fleet in suite.fleets},
        "slow": None if suite.slow is None else suite.slow._asdict(),
        "prediction_noise": suite.prediction_noise,
        "ranks": suite.ranks,
        "tenants": suite.tenants,
    }


def run_sweep(
    suite: Suite, out: OutFile, *, n_processes: int, on_progress: Callable[[int, int], None]
) -> Iterator[Row]:
    """Play what `out` has no row of yet; yields each row once it is written.

    `on_progress` gets how many requests have ended, and how many there are in all: for a search that is
    guessed, and for an oracle 0. Raises `KeyboardInterrupt` at Ctrl-C and `JobFailed`; `out` has what was
    done until then.
    """
    keys = missing(suite, out)
    # The long ones first, so that no core is left over with one at the end.
    jobs = [Job(suite, key) for key in sorted(keys, key=lambda key: key.load or 0.0, reverse=True)]
    n_plays = [key.policy != ORACLE if key.load is not None else 8 for key in keys]
    total = suite.requests * sum(n_plays)
    schedules: dict[RowKey, Row] = {}
    done = run_jobs(
        jobs,
        do_job,
        n_processes=n_processes,
        on_progress=lambda n_ended: on_progress(min(n_ended, total), total),
    )
    for job, row in done:
        if job.key.policy == ORACLE:
            schedules[job.key] = row
        else:
            out.put(job.key, row)
            yield row
        for key in list(schedules):
            beside = [out[each] for each in _beside(suite, key) if each in out]
            if len(beside) == len(suite.policies):
                bound = bounded(schedules.pop(key), beside)
                out.put(key, bound)
                yield bound


def tuned(
    suite: Suite, policy: str, *, n_processes: int, on_progress: Callable[[int, int], None]
) -> list[Tried]:
    """Every combination of a policy's parameters, with its mean attainment on rows that are not shown.

    Raises `UsageError` for a policy without parameters, and where the trace has no other rows; else as
    `run_sweep`, without keeping anything.
    """
    most = suite.skip + 2 * suite.requests
    n_in_trace = min(count_rows(trace, most=most) for trace in suite.traces)
    skip, n_rows = other_rows(suite.skip, suite.requests, n_in_trace)
    points = combinations(policy)
    jobs = []
    for parameters in points:
        changed = {
            "policies": (policy,),
            "parameters": {policy: parameters},
            "skip": skip,
            "requests": n_rows,
            "find_rate": None,
        }
        one = suite.model_copy(update=changed)
        jobs += [Job(one, key) for key in keys_of(one) if key.policy == policy]
    attained: list[list[float]] = [[] for _ in points]
    for job, row in run_jobs(
        jobs,
        do_job,
        n_processes=n_processes,
        on_progress=lambda n_ended: on_progress(n_ended, len(jobs) * n_rows),
    ):
        attained[points.index(job.suite.parameters[policy])].append(row["both_met"])
    return [
        tried(policy, point, sum(shares) / len(shares))
        for point, shares in zip(points, attained, strict=True)
    ]


def _beside(suite: Suite, key: RowKey) -> list[RowKey]:
    return [key._replace(policy=policy) for policy in suite.policies]


def bounded(schedule: Row, rows: Sequence[Row]) -> Row:
    """The oracle's row: the schedule's, or where a policy met more, that policy's figures."""
    best = max(rows, key=lambda row: row["both_met"])
    if best["both_met"] <= schedule["both_met"]:
        return schedule
    return best | {"policy": ORACLE, "parameters": {}, "bound": best["policy"]}


def do_job(job: Job, count: Callable[[], None]) -> Row:
    """Play one run, search for the highest load, or make the schedule of the oracle."""
    suite, key = job
    began_s = monotonic_s()
    path = _path(suite.fleets, key.fleet)
    fleet = load_fleet(path, ranks=suite.ranks, classes=suite.classes)
    rows = read_rows(_path(suite.traces, key.trace), skip=suite.skip, n_rows=suite.requests)
    run = _Run(suite, fleet, rows, key, count)
    if key.load is None:
        found = run.search()
    else:
        found = run.schedule(key.load) if key.policy == ORACLE else run.figures(key.load)
    return found | {"wall_s": round(monotonic_s() - began_s, 3)}


def _path(paths: Sequence[str], stem: str) -> str:
    return next(path for path in paths if Path(path).stem == stem)


class _Run(NamedTuple):
    suite: Suite
    fleet: SimFleet
    rows: Sequence[TraceRow]
    key: RowKey
    on_ended: Callable[[], None]

    def asks(self, load: float) -> list[Ask]:
        """The requests of the run, in order of arrival."""
        return self.suite.asks(self.rows, load=load, seed=self.key.seed)

    def head(self, load: float | None) -> Row:
        key, parameters = self.key, self.suite.parameters.get(self.key.policy, {})
        return {
            "trace": key.trace,
            "fleet": key.fleet,
            "policy": key.policy,
            "parameters": dict(parameters),
            "load": load,
            "seed": key.seed,
            "find_rate": key.find_rate,
        }

    def figures(self, load: float) -> Row:
        """The row of a run at this load."""
        asks = self.asks(load)
        router = make(self.key.policy, self.suite.parameters.get(self.key.policy, {}))
        played = play(
            self.fleet, asks, router, self.suite.imperfection, self.key.seed, self.on_ended
        )
        can_be_met = feasible(self.fleet, asks, self.suite.imperfection)
        return (
            self.head(load)
            | run_figures(played, can_be_met, self.fleet)
            | {"requests_per_cpu_s": round(len(asks) / played.cpu_s, 2)}
        )

    def search(self) -> Row:
        """The row of the highest load at which enough of the feasible requests meet both targets.

        It is looked for by doubling or halving, then by bisection to `LOAD_STEP`. The load is 0, and the
        figures are those of the lowest load tried, where none is low enough.
        """
        tried: dict[float, Row] = {}

        def holds(load: float) -> bool:
            tried[load] = self.figures(load)
            met = tried[load]["both_met_feasible"]
            return met is not None and met >= self.suite.find_rate

        low, high = highest_load(holds)
        return tried[low] if low else tried[high] | {"load": 0.0}

    def schedule(self, load: float) -> Row:
        """The oracle's schedule, with the figures that a schedule has."""
        asks = self.asks(load)
        met = scheduled(self.fleet, asks, self.suite.imperfection, self.key.seed)
        can_be_met = feasible(self.fleet, asks, self.suite.imperfection)
        classes = {}
        for name in dict.fromkeys(ask.sla.name for ask in asks):
            of_class = [at for at, ask in enumerate(asks) if ask.sla.name == name]
            classes[name] = schedule_figures(
                [met[at] for at in of_class], [can_be_met[at] for at in of_class]
            )
        return (
            self.head(load)
            | {"bound": "schedule"}
            | schedule_figures(met, can_be_met)
            | {"classes": classes}
        )


def highest_load(holds: Callable[[float], bool]) -> tuple[float, float]:
    """The highest load found that holds, and the lowest found that does not; at most `LOAD_STEP` apart.

    The first is 0 where none holds, the second infinite where all do.

    >>> low, high = highest_load(lambda load: load < 3)
    >>> low < 3 <= high <= low * 1.05
    True
    """
    low, high = 0.0, math.inf
    load = 1.0
    for _ in range(FIND_ROUNDS):
        if holds(load):
            low = load
            load *= 2
        else:
            high = load
            load /= 2
        if low and high < math.inf:
            break
    else:
        return low, high
    while high / low > LOAD_STEP:
        middle = math.sqrt(low * high)
        if holds(middle):
            low = middle
        else:
            high = middle
    return low, high
