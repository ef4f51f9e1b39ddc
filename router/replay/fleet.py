"""The simulated workers of a fleet file, and what they meet that the gateway is not told."""

import json
import math
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from slagate.pools.fleet_file.load import FleetConfig, load_config
from slagate.pools.fleet_file.models import ANY_CLASS, PoolSpec, Positive, TargetMs
from slagate.pools.grid.grid import Stage
from slagate.router.replay.classes import RequestClass
from slagate.workers.kv_transfer.memory import MemoryExchange
from slagate.workers.profiles.profile import TpProfile
from slagate.workers.runtime.usage import UsageError
from slagate.workers.serving.sim import SimOptions, sim_worker
from slagate.workers.sim.timing import Conditions
from slagate.workers.trtllm.worker import TrtllmWorker

DEFAULT_BATCH = 256
KV_BLOCK_BYTES = 16
"""The least that a simulated block may have: its bytes are checked, and nothing is timed by them."""

STATS_EVERY_S = 0.25
"""Between two polls of an engine for its newest statistics: a part of the time between load reports."""


class SimPool(NamedTuple):
    """One pool of a fleet, simulated.

    The attention-DP ranks of a worker compute in step, each its own batch: the slowest one's time, by the
    profile, is that of all. Each has a KV cache and GPUs as the profile has them.
    """

    name: str
    stage: Stage
    profile_name: str
    profile: TpProfile
    gpus: float  # of each worker
    addresses: tuple[str, ...]
    batch: int  # of each rank
    ranks: int = 1


class SimFleet(NamedTuple):
    """A fleet file whose workers are simulated."""

    config: FleetConfig
    pools: tuple[SimPool, ...]
    model: str  # which every worker serves

    @property
    def gpus(self) -> float:
        """GPUs of all workers."""
        return sum(pool.gpus * len(pool.addresses) for pool in self.pools)


class Slow(NamedTuple):
    """A pool whose steps take `factor` times as long, from so long after the first arrival on."""

    pool: str
    factor: Positive
    from_s: TargetMs = 0.0


class Imperfection(NamedTuple):
    """What a fleet has and a profile does not say, in seconds where no unit is named."""

    worker_sigma: float = 0.15  # of the natural logarithm of each worker's factor of its step times
    step_sigma: float = 0.05  # the same of each step's
    load_every_s: float = 1.0  # between two load reports of a worker
    events_late_s: float = 0.020
    connect_s: float = 0.030  # of the first transfer between two workers
    latency_s: float = 0.0005  # each way between gateway and worker
    slow: Slow | None = None
    prediction_noise: float = 0.0  # of the natural logarithm of the factors in `noise`


REAL = Imperfection()
IDEAL = Imperfection(0.0, 0.0, 0.0, REAL.latency_s, 0.0)


def load_fleet(
    path: str | Path,
    ranks: Mapping[str, int] = MappingProxyType({}),
    classes: Sequence[RequestClass] = (),
) -> SimFleet:
    """The fleet file at `path`. Raises `ConfigError`, and `UsageError` for a pool that cannot be simulated.

    A pool without workers gets `replicas` of them. `ranks` says how many attention-DP ranks the workers of
    a pool have, by its name; names of other fleets' pools are of no account. `classes` are laid over the
    file's objectives.
    """
    plain = load_config(path)
    if "prefill" in plain.stages and "decode" not in plain.stages:
        raise UsageError(f"{path}: has prefill pools only, and a replay needs pools for decode too")
    names = [name for grid in plain.stages.values() for name in grid.pool_names]
    added: dict[str, list[str]] = {}
    for number, name in enumerate(names, start=1):
        spec = plain.pools.get(name)
        if spec is None or spec.profile is None:
            raise UsageError(f"{path}: pools.{name}.profile: is missing, and a replay needs one")
        if not spec.workers:
            added[name] = [f"replica-{number}:{i + 1}" for i in range(spec.replicas or 1)]
    text = _with_classes(plain.text, classes)
    config = load_config(path, workers=added, serving=True, text=text)
    assert config.profiles is not None, "it was read with serving=True"
    pools = []
    for stage, grid in config.stages.items():
        for name in grid.pool_names:
            spec = config.pools[name]
            assert spec.profile is not None, "it was looked for above"
            pools.append(
                SimPool(
                    name,
                    Stage(stage),
                    spec.profile,
                    config.profiles[name],
                    _gpus(spec, ranks.get(name, 1)),
                    tuple(spec.workers),
                    spec.batch or DEFAULT_BATCH,
                    ranks.get(name, 1),
                )
            )
    return SimFleet(config, tuple(pools), pools[0].profile.model)


def _with_classes(text: str, classes: Sequence[RequestClass]) -> str:
    """A fleet file's content with the priority, policy and weight of these classes, but not their targets.

    What a class leaves out is what the file says for it. Targets come with each request.
    """
    content = json.loads(text)
    objectives = content.setdefault("objectives", {})
    anybody = objectives.get(ANY_CLASS, {})
    for each in classes:
        said = {"priority": each.priority, "policy": each.policy, "weight": each.weight}
        given = {key: value for key, value in said.items() if value is not None}
        objectives[each.name] = {**objectives.get(each.name, anybody), **given}
    return json.dumps(content)


def _gpus(spec: PoolSpec, ranks: int) -> float:
    """GPUs of one worker: `cost`, which is of a whole one, or else what the profile has, for each rank."""
    return float(spec.gpus if spec.cost is not None else spec.gpus * ranks)


def step_factor(
    imperfection: Imperfection, seed: int, address: str, *, pool: str = "", first_s: float = 0.0
) -> Callable[[float], float] | None:
    """A worker's factor of its step times, as `Conditions` has it; None: always 1.

    That of the worker and that of each step are lognormal with median 1. `first_s` is when the first
    request arrives.
    """
    worker_sigma, step_sigma = imperfection.worker_sigma, imperfection.step_sigma
    slow = imperfection.slow
    slow_from_s = first_s + slow.from_s if slow is not None and slow.pool == pool else math.inf
    if not worker_sigma and not step_sigma and slow_from_s == math.inf:
        return None
    rng = random.Random(f"{seed} {address}")
    worker = rng.gauss(0.0, worker_sigma)

    def factor(now_s: float) -> float:
        drawn = math.exp(worker + rng.gauss(0.0, step_sigma))
        return drawn * slow.factor if slow is not None and now_s >= slow_from_s else drawn

    return factor


def mean_factor(imperfection: Imperfection, seed: int, address: str) -> float:
    """The mean of a worker's `step_factor` over many steps."""
    worker = random.Random(f"{seed} {address}").gauss(0.0, imperfection.worker_sigma)
    return math.exp(worker + imperfection.step_sigma**2 / 2)


@asynccontextmanager
async def simulated_workers(
    fleet: SimFleet,
    imperfection: Imperfection,
    *,
    seed: int,
    first_s: float,
    answer_tokens: Callable[[bytes], int],
) -> AsyncIterator[Mapping[str, TrtllmWorker]]:
    """All workers of the fleet, by address, for the time of the block; `first_s` as in `step_factor`.

    Decode workers publish no KV events, since the gateway follows none of theirs.
    """
    exchange = MemoryExchange()
    async with AsyncExitStack() as stack:
        workers: dict[str, TrtllmWorker] = {}
        for pool in fleet.pools:
            for address in pool.addresses:
                options = SimOptions(
                    role=pool.stage.value,
                    profile=pool.profile_name,
                    tp=pool.profile.tensor_parallel_size,
                    model=fleet.model,
                    kv_block_bytes=KV_BLOCK_BYTES,
                    max_batch_size=pool.batch,
                    ranks=pool.ranks if pool.ranks > 1 else None,
                    stats_every_s=STATS_EVERY_S,
                    conditions=Conditions(
                        step_factor=step_factor(
                            imperfection, seed, address, pool=pool.name, first_s=first_s
                        ),
                        connect_s=imperfection.connect_s,
                        answer_tokens=answer_tokens,
                    ),
                )
                if pool.stage is Stage.DECODE:
                    options = replace(options, kv_events=0)
                transport = None if pool.stage is Stage.AGG else exchange.transport()
                workers[address] = await stack.enter_async_context(
                    sim_worker(options, instance_id=address, transport=transport)
                )
        yield workers
