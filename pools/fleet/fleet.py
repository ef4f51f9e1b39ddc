"""The fleet: every pool of a configuration, and the grid of each stage."""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from slagate.pools.estimator.estimator import Estimator
from slagate.pools.fleet.member import Member
from slagate.pools.fleet.pairing import pair_statuses
from slagate.pools.fleet.pool import Pool, PoolSnapshot
from slagate.pools.fleet_file.load import FleetConfig
from slagate.pools.fleet_file.models import ANY_CLASS, Objective, Scheduling
from slagate.pools.grid.grid import Stage, StageGrid
from slagate.pools.inflight.demand import AnswerLengths
from slagate.pools.inflight.row_view import State
from slagate.pools.inflight.table import UNLIMITED, LoadTable
from slagate.pools.inflight.worker_rows import Limits
from slagate.pools.prefix.overlap import Prompt
from slagate.workers.runtime.clock import monotonic_s


class Prepared(NamedTuple):
    """A configuration that a fleet can apply: it was checked, and every profile in it was read."""

    config: FleetConfig
    estimators: Mapping[str, Estimator]  # by pool; they have learnt nothing yet


def prepare(config: FleetConfig) -> Prepared:
    """A configuration that was loaded with `serving=True`, and a new estimator for each pool."""
    assert config.profiles is not None, "it was read with serving=True"
    estimators = {name: Estimator() for name in config.pools}
    for name, profile in config.profiles.items():
        spec = config.pools[name]
        estimators[name] = Estimator(profile, source=f"profile {spec.profile} tp {spec.tp}")
    return Prepared(config, estimators)


class Fleet:
    """The grids and pools of the configuration in force, and workers of earlier ones that still drain.

    Without `prefix` workers are chosen by their load alone, and not by what they have cached.
    `load_table` makes the table of a pool from `Pool.key`; processes of a gateway may share it.
    """

    def __init__(
        self,
        prepared: Prepared,
        *,
        prefix: bool = True,
        load_table: Callable[[str], LoadTable] = lambda _: LoadTable(),
        now_s: Callable[[], float] = monotonic_s,
    ) -> None:
        self._prefix = prefix
        self._load_table = load_table
        self._now_s = now_s
        self.warnings: tuple[str, ...] = ()
        self.grids: Mapping[Stage, StageGrid] = {}
        self.objectives: Mapping[str, Objective] = {}
        self.scheduling = Scheduling()
        self.bypasses = False  # decode workers may compute prompts too
        self.answers = AnswerLengths()
        self.pools: dict[str, Pool] = {}
        self._leaving: list[Pool] = []  # pools of earlier configurations, whose workers drain
        self._on_join: list[Callable[[Pool, Member], None]] = []
        self._n_applied = 0
        self._models: set[str] = set()
        self._windows: dict[str, int | None] = {}  # by served model
        self._windows_of = (-1, -1)
        self.apply(prepared)

    def apply(self, prepared: Prepared) -> None:
        """Put a configuration in force, without an await.

        Pools and workers that stay keep their requests and state, but a pool with another profile
        learns anew. Those that go take no new requests, and leave once theirs have ended.
        """
        config = prepared.config
        self.models()  # the models of workers that go now are kept
        before = self.pools
        for pool in self._leaving:
            if pool.is_empty:
                pool.table.free_pool()
        self._leaving = [pool for pool in self._leaving if not pool.is_empty]
        self.warnings = config.warnings
        self.objectives = config.objectives
        self.answers.listed = config.objectives.keys() - {ANY_CLASS}
        self.scheduling = config.scheduling
        self.grids = {Stage(name): grid for name, grid in config.stages.items()}
        both = Stage.PREFILL in self.grids and Stage.DECODE in self.grids
        self.bypasses = both and config.scheduling.bypass == "auto"
        # Scrapes and probes read from a thread of their own, and must never see half a fleet.
        pools: dict[str, Pool] = {}
        for stage, grid in self.grids.items():
            for index, name in enumerate(grid.pool_names):
                estimator, spec = prepared.estimators[name], config.pools[name]
                pool = self._known(before, stage, name) or Pool(
                    name,
                    stage=stage,
                    index=index,
                    estimator=estimator,
                    prefix=self._prefix,
                    load_table=self._load_table,
                    now_s=self._now_s,
                )
                pools[name] = pool
                pool.index = index
                pool.set_limits(Limits(spec.max_inflight, spec.max_queued_tokens))
                pool.set_estimator(estimator, bypassed=self.bypasses and stage is Stage.DECODE)
        self.pools = pools
        for pool in before.values():
            if pools.get(pool.name) is not pool:
                self._leaving.append(pool)
                for address in list(pool.members):
                    pool.drain(address)
        for name, pool in pools.items():
            addresses = config.pools[name].workers
            stay = set(addresses)
            for address in [each for each in pool.members if each not in stay]:
                pool.drain(address)
            for address in addresses:
                self._join(pool, address)
        self._n_applied += 1

    def on_join(self, joined: Callable[[Pool, Member], None]) -> None:
        """Call `joined` with each worker of the configuration now, and with each new one later."""
        self._on_join.append(joined)
        for pool in self.pools.values():
            for member in pool.members.values():
                joined(pool, member)

    def _known(self, before: Mapping[str, Pool], stage: Stage, name: str) -> Pool | None:
        """The pool of that name and stage, also where it was leaving."""
        for pool in (*before.values(), *self._leaving):
            if pool.name == name and pool.stage is stage:
                if pool in self._leaving:
                    self._leaving.remove(pool)
                return pool
        return None

    def _join(self, pool: Pool, address: str) -> None:
        member = None if address in pool.members else pool.join(address)
        if member is not None:
            for joined in self._on_join:
                joined(pool, member)

    def pool(self, name: str, stage: Stage) -> Pool | None:
        """The pool of that name and stage; None: the configuration has none."""
        pool = self.pools.get(name)
        return pool if pool is not None and pool.stage is stage else None

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages a request goes through, in order."""
        return tuple(self.grids)

    @property
    def all_pools(self) -> Iterator[Pool]:
        """Yield every pool of the configuration, and earlier ones whose workers still drain."""
        yield from list(self.pools.values())
        yield from [pool for pool in list(self._leaving) if not pool.is_empty]

    def members(self) -> Iterator[Member]:
        """Yield every worker of the configuration, pool by pool."""
        for pool in list(self.pools.values()):
            yield from list(pool.members.values())

    def serving_members(self) -> Iterator[Member]:
        """Yield the workers that can make a stage ready: `members`, and at times draining ones.

        Draining workers count while a member of their stage waits for its first probe, so that a
        reload does not make the stage unready: its requests wait for the new worker.
        """
        members = list(self.members())
        yield from members
        joining = {member.stage for member in members if member.state is State.JOINING}
        if joining:
            yield from (m for m in self.all_members() if m.is_draining and m.stage in joining)

    def all_members(self) -> Iterator[Member]:
        """Yield every worker of the configuration, and those that drain."""
        for pool in self.all_pools:
            yield from pool.all_members

    def views(self, prompt: Prompt | None = None) -> Mapping[str, PoolSnapshot]:
        """Pool name to snapshot for one decision, with what each row has cached of `prompt`.

        Only `[name]` makes a snapshot, at its first use. Use them before the next await.
        """
        return _Views(self.pools, prompt)

    def models(self) -> set[str]:
        """Names of the models that a worker serves, or was found to serve at some time before."""
        for member in self.members():
            self._models.update(member.models)
        return self._models

    def serves(self, model: str) -> bool:
        """Whether a worker serves the model, or was found to serve it at some time before."""
        return model in self._models or model in self.models()

    def context_window(self, model: str) -> int | None:
        """The longest context, in tokens, that every stage has a worker for; None: not known."""
        n_changes = 0
        for pool in self.pools.values():
            n_changes += pool.table.n_model_changes
        if self._windows_of != (self._n_applied, n_changes):
            self._windows_of = self._n_applied, n_changes
            self._windows.clear()
        if model not in self._windows:
            if not self.serves(model):
                return None  # not kept, as clients may make up names
            self._windows[model] = self._find_window(model)
        return self._windows[model]

    def _find_window(self, model: str) -> int | None:
        windows: dict[Stage, int] = {}
        for member in self.members():
            info = member.models.get(model)
            if info is not None:
                # A worker that does not say may have any.
                known = info.HasField("max_context_length")
                tokens = info.max_context_length if known else UNLIMITED
                windows[member.stage] = max(tokens, windows.get(member.stage, 0))
        shortest = min(windows.values(), default=UNLIMITED)
        return None if shortest == UNLIMITED else shortest

    def unready_stages(self) -> list[Stage]:
        """The stages without a ready worker, in the order in which a request goes through them."""
        return [
            stage
            for stage in self.stages
            if not any(member.is_up for member in self.serving_members() if member.stage is stage)
        ]

    def not_ready(self) -> str:
        """Why no request at all can be served, for people; an empty string when one can."""
        if unready := self.unready_stages():
            return ", ".join(f"no {stage.value} worker is ready" for stage in unready)
        served = [
            {
                name
                for m in self.serving_members()
                if m.stage is stage and m.is_up
                for name in m.models
            }
            for stage in self.stages
        ]
        if not set.intersection(*served):
            return "no model is served by every stage"
        problems = [status.problem for status in pair_statuses(self.serving_members()).values()]
        return f"each worker {problems[0]}" if problems and all(problems) else ""


class _Views(dict[str, PoolSnapshot]):
    """Views of pools, made when they are needed: most decisions need one a stage."""

    def __init__(self, pools: Mapping[str, Pool], prompt: Prompt | None) -> None:
        super().__init__()
        self._pools = pools
        self._prompt = prompt

    def __missing__(self, name: str) -> PoolSnapshot:
        view = self[name] = self._pools[name].snapshot(self._prompt)
        return view
