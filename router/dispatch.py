"""From a decision to leases, in one synchronous step: load counts from the moment of the choice.

A request that every worker of its pools could take, were it not at its limit, waits (`waiting`); whenever a
worker can take more, `step` assigns as many as fit.
"""

import logging
import random
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial

from slagate.pools.fleet import Fleet
from slagate.pools.member import Lease, Stage
from slagate.pools.overlap import Prompt
from slagate.router.assignment import Assignment
from slagate.router.errors import NoWorker, Overloaded, RequestError, UnknownModel
from slagate.router.policy import Decision, StageChoice, choose
from slagate.router.score import LIMITS, Ask
from slagate.router.waiting import Lanes, Ticket
from slagate.workers.clock import monotonic_s

log = logging.getLogger(__name__)


class Dispatcher:
    """Assigns requests to workers of one fleet; at most `max_waiting` wait for one."""

    def __init__(
        self,
        fleet: Fleet,
        *,
        rng: random.Random,
        max_waiting: int = 1024,
        now_s: Callable[[], float] = monotonic_s,
    ) -> None:
        self.fleet = fleet
        self._rng = rng
        self._max_waiting = max_waiting
        self._now_s = now_s
        self._lanes = Lanes(now_s=now_s)
        for member in fleet.members():
            member.on_change = partial(self.step, member.pool)

    @property
    def n_waiting(self) -> int:
        """Requests that wait for a worker below its limits."""
        return self._lanes.n_waiting

    def explain(self, ask: Ask, prompt: Prompt | None = None) -> Decision:
        """The decision that would be taken now, with no chance used up. Raises as `submit` does."""
        rng = random.Random()
        rng.setstate(self._rng.getstate())
        return self._choose(ask, prompt, self.fleet.stages, rng)

    @contextmanager
    def submit(
        self,
        ask: Ask,
        prompt: Prompt | None = None,
        *,
        stages: tuple[Stage, ...] | None = None,
        since_s: float | None = None,
    ) -> Iterator[Ticket]:
        """A request for workers, for the time of the block; `Ticket.assigned` waits for them.

        They are for all stages, or for some of a request that lost its workers there and has waited since
        `since_s`. An assignment that nobody fetched by the end of the block is given back, else it is the
        caller's. Raises `UnknownModel` or `NoWorker`.
        """
        stages = stages or self.fleet.stages
        ticket = Ticket(
            ask,
            prompt,
            stages=stages,
            decision=self._choose(ask, prompt, stages, self._rng),
            since_s=self._now_s() if since_s is None else since_s,
        )
        if not (self._refused(ticket) or (self._lanes.is_free(ticket) and self._taken(ticket))):
            self._wait(ticket)
            if since_s is not None:
                # It may be older than who keeps the place that it was refused.
                self.step()
        try:
            yield ticket
        except BaseException:
            if isinstance(ticket.outcome, Assignment):
                ticket.outcome.release()
            raise
        finally:
            if ticket.outcome is None:
                self._lanes.remove(ticket)
                # It may have been the one that did not fit.
                self.step()

    def step(self, pool: str | None = None) -> None:
        """Assign as many waiting requests as fit, and refuse those that no worker is left for.

        With `pool` something has changed there only.
        """
        self._lanes.step(self._try, pool)

    def _try(self, ticket: Ticket, taken: Collection[str]) -> bool:
        try:
            return self._choose_and_settle(ticket, taken)
        except Exception:
            # Whoever gave something back is not to suffer for a bug with somebody else's request.
            log.exception("dispatch.bug")
            ticket.settle(RequestError("internal error of the gateway; see its log"))
            return True

    def _choose_and_settle(self, ticket: Ticket, taken: Collection[str]) -> bool:
        views = self.fleet.views(ticket.prompt)
        grids = {stage: self.fleet.grids[stage] for stage in ticket.stages}
        ticket.decision = choose(ticket.ask, grids, views, rng=self._rng)
        if any(
            choice.row is not None and choice.pool in taken for choice in ticket.decision.stages
        ):
            return False
        return self._refused(ticket) or self._taken(ticket)

    def _choose(
        self, ask: Ask, prompt: Prompt | None, stages: tuple[Stage, ...], rng: random.Random
    ) -> Decision:
        self._check_model(ask)
        grids = {stage: self.fleet.grids[stage] for stage in stages}
        return choose(ask, grids, self.fleet.views(prompt), rng=rng)

    def _refused(self, ticket: Ticket) -> bool:
        """Refuse a ticket where a stage has nobody that it would be worth waiting for."""
        for choice in ticket.decision.stages:
            if choice.row is None and not choice.reasons & LIMITS:
                pools = ", ".join(choice.pool_order)
                refusal = NoWorker(f"{choice.stage.value}: no worker of pool {pools} is ready")
                ticket.settle(refusal)
                return True
        return False

    def _taken(self, ticket: Ticket) -> bool:
        """Take the leases of a ticket's decision; False where a stage has nobody now."""
        if any(choice.row is None for choice in ticket.decision.stages):
            return False
        leases: dict[Stage, Lease] = {}
        try:
            for choice in ticket.decision.stages:
                leases[choice.stage] = self._lease(choice, ticket.prompt)
        except Exception:
            for lease in leases.values():
                lease.release()
            raise
        ticket.settle(Assignment(ticket.decision, leases))
        return True

    def _wait(self, ticket: Ticket) -> None:
        n_waiting = self._lanes.n_waiting
        if n_waiting < self._max_waiting:
            self._lanes.add(ticket)
            return
        others = f"{n_waiting} requests wait already" if n_waiting else "none may wait"
        why = f"{_why(ticket.decision)}, and {others}"
        ticket.settle(Overloaded(why, retry_after_ms=self._lanes.hint_ms(ticket)))

    def _lease(self, choice: StageChoice, prompt: Prompt | None) -> Lease:
        assert choice.row is not None
        pool = self.fleet.pools[choice.pool]
        if choice.pool != choice.pool_order[0]:
            pool.spills_total += 1
            log.warning(
                "request.spilled",
                extra={"stage": choice.stage.value, "from": choice.pool_order[0], "to": pool.name},
            )
        return pool.lease(choice.row, choice.work, prompt)

    def _check_model(self, ask: Ask) -> None:
        if not self.fleet.serves(ask.model):
            if not self.fleet.models():
                raise NoWorker("no worker has been reached yet")
            raise UnknownModel(f"model: {ask.model[:100]!r} is not served here")


def _why(decision: Decision) -> str:
    """Which stage holds a request up; the first, where none does at this moment."""
    choice = next((c for c in decision.stages if c.row is None), decision.stages[0])
    reasons = " or ".join(sorted(choice.reasons & LIMITS)) or "at its limit"
    return f"{choice.stage.value}: every worker of pool {', '.join(choice.pool_order)} is {reasons}"
