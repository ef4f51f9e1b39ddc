"""From a decision to leases, in one synchronous step: load counts from the moment of the choice."""

import logging
import random
from collections.abc import Mapping

from slagate.pools.fleet import Fleet
from slagate.pools.member import Lease, Member, Stage
from slagate.router.errors import NoWorker, Overloaded, UnknownModel
from slagate.router.policy import AT_LIMIT, Ask, Decision, StageChoice, choose, choose_stage

log = logging.getLogger(__name__)


class Assignment:
    """The workers a request holds: one lease a stage, all released by `release`."""

    def __init__(self, decision: Decision, leases: Mapping[Stage, Lease]) -> None:
        self.decision = decision
        self._leases = dict(leases)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages the request goes through, in order."""
        return tuple(self._leases)

    @property
    def members(self) -> list[Member]:
        """The workers the request holds."""
        return [lease.member for lease in self._leases.values()]

    def lease(self, stage: Stage) -> Lease:
        """The lease of a stage."""
        return self._leases[stage]

    def replace(self, choice: StageChoice, lease: Lease) -> None:
        """Another worker for one stage; the one before is let go."""
        self._leases[choice.stage].release()
        self._leases[choice.stage] = lease

    def release(self) -> None:
        """Let every worker go. Idempotent."""
        for lease in self._leases.values():
            lease.release()


class Dispatcher:
    """Assigns requests to workers of one fleet."""

    def __init__(self, fleet: Fleet, *, rng: random.Random) -> None:
        self.fleet = fleet
        self._rng = rng

    def explain(self, ask: Ask) -> Decision:
        """The decision `decide` would take now, with no chance used up. Raises as it does."""
        rng = random.Random()
        rng.setstate(self._rng.getstate())
        return self._choose(ask, rng)

    def decide(self, ask: Ask) -> Decision:
        """Choose a worker for every stage. Raises `UnknownModel` or `NoWorker`."""
        return self._choose(ask, self._rng)

    def take(self, decision: Decision) -> Assignment:
        """The leases of a decision, taken in the step in which it was made: no await in between.

        Raises `NoWorker` or `Overloaded`, with no lease taken, where it has no winner.
        """
        for choice in decision.stages:
            if choice.winner is None:
                raise _refusal(choice)
        return Assignment(decision, {c.stage: self._lease(c) for c in decision.stages})

    def reassign(self, assignment: Assignment, ask: Ask, stage: Stage) -> StageChoice | None:
        """Another worker for a stage whose worker failed; None, and no change, when there is none."""
        choice = choose_stage(
            stage, ask, self.fleet.grids[stage], self.fleet.views(), rng=self._rng
        )
        if choice.winner is None:
            return None
        failed = assignment.lease(stage).member
        self.fleet.pools[failed.pool].retries_total += 1
        assignment.replace(choice, self._lease(choice))
        return choice

    def _choose(self, ask: Ask, rng: random.Random) -> Decision:
        self._check_model(ask)
        return choose(ask, self.fleet.grids, self.fleet.views(), rng=rng)

    def _lease(self, choice: StageChoice) -> Lease:
        assert choice.winner is not None
        pool = self.fleet.pools[choice.pool]
        if choice.pool != choice.pool_order[0]:
            pool.spills_total += 1
            log.warning(
                "request.spilled",
                extra={"stage": choice.stage.value, "from": choice.pool_order[0], "to": pool.name},
            )
        return pool.lease(choice.winner.view.address, choice.work)

    def _check_model(self, ask: Ask) -> None:
        if not self.fleet.serves(ask.model):
            if not self.fleet.models():
                raise NoWorker("no worker has been reached yet")
            raise UnknownModel(f"model: {ask.model[:100]!r} is not served here")


def _refusal(choice: StageChoice) -> NoWorker | Overloaded:
    reasons = [candidate.excluded for candidate in choice.scored]
    pools = ", ".join(choice.pool_order)
    if AT_LIMIT in reasons:
        return Overloaded(f"{choice.stage.value}: every worker of pool {pools} is at its limit")
    return NoWorker(f"{choice.stage.value}: no worker of pool {pools} is ready")
