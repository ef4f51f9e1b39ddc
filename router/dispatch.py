"""From a decision to leases, in one synchronous step: load counts from the moment of the choice.

A request that every worker of its pools could take, were it not at its limit, waits. Requests wait in
lanes, one for each model and order of pools, each in order of arrival; whenever a worker can take more,
`step` assigns as many as fit. A lane whose first request does not fit waits as a whole, the others do not.
"""

import logging
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import anyio

from slagate.pools.fleet import Fleet
from slagate.pools.member import Lease, Member, Stage
from slagate.pools.overlap import Prompt
from slagate.router.errors import NoWorker, Overloaded, RequestError, UnknownModel
from slagate.router.policy import Decision, StageChoice, choose, choose_stage
from slagate.router.score import LIMITS, Ask
from slagate.workers.clock import monotonic_s

log = logging.getLogger(__name__)

MAX_HINT_S = 30.0
"""A client is never told to come back later than this."""


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


class Ticket:
    """A request's place: assigned, refused, or waiting."""

    def __init__(self, ask: Ask, prompt: Prompt | None, decision: Decision, now_s: float) -> None:
        self.ask = ask
        self.prompt = prompt
        self.decision = decision  # the newest one
        self.submitted_s = now_s
        self.outcome: Assignment | RequestError | None = None
        self._settled = anyio.Event()

    def settle(self, outcome: Assignment | RequestError) -> None:
        """Assign or refuse it."""
        self.outcome = outcome
        self._settled.set()

    async def assigned(self) -> Assignment:
        """Wait for the workers. Raises `NoWorker` or `Overloaded`."""
        if self.outcome is None:
            await self._settled.wait()
        if isinstance(self.outcome, RequestError):
            raise self.outcome
        assert self.outcome is not None
        return self.outcome


class _Lane:
    def __init__(self) -> None:
        self.tickets: deque[Ticket] = deque()
        self._interval_s: float | None = None  # between two assignments, lately
        self._last_s: float | None = None

    def note_assigned(self, now_s: float) -> None:
        if self._last_s is not None:
            interval_s = now_s - self._last_s
            old_s = interval_s if self._interval_s is None else self._interval_s
            self._interval_s = old_s + 0.2 * (interval_s - old_s)
        self._last_s = now_s

    def hint_ms(self) -> int:
        """When one more would have its turn, as things go."""
        if self._interval_s is None:
            return Overloaded.default_retry_ms
        return int(1000 * min(max(self._interval_s * (len(self.tickets) + 1), 0.1), MAX_HINT_S))


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
        self._lanes: dict[object, _Lane] = {}
        self._stepping = False
        self.n_waiting = 0
        for member in fleet.members():
            member.on_change = self.step

    def explain(self, ask: Ask, prompt: Prompt | None = None) -> Decision:
        """The decision that would be taken now, with no chance used up. Raises as `submit` does."""
        rng = random.Random()
        rng.setstate(self._rng.getstate())
        return self._choose(ask, prompt, rng)

    @contextmanager
    def submit(self, ask: Ask, prompt: Prompt | None = None) -> Iterator[Ticket]:
        """A request for workers on every stage, for the time of the block; `Ticket.assigned` waits.

        An assignment that nobody fetched by the end of the block is given back, else it is the caller's.
        Raises `UnknownModel` or `NoWorker`.
        """
        ticket = Ticket(ask, prompt, self._choose(ask, prompt, self._rng), self._now_s())
        key = (ask.model, *(choice.pool_order for choice in ticket.decision.stages))
        lane = self._lanes.get(key)
        if lane is not None and lane.tickets:
            self._wait(lane, ticket)
        elif not self._settle(ticket):
            lane = self._lanes.setdefault(key, _Lane())
            self._wait(lane, ticket)
        try:
            yield ticket
        except BaseException:
            if isinstance(ticket.outcome, Assignment):
                ticket.outcome.release()
            raise
        finally:
            if ticket.outcome is None:
                assert lane is not None
                lane.tickets.remove(ticket)
                self.n_waiting -= 1
                # It may have been the one that did not fit.
                self.step()

    def take_now(self, ask: Ask, prompt: Prompt | None) -> Assignment:
        """Workers for every stage, without waiting and ahead of all who do. Raises as `submit` does."""
        ticket = Ticket(ask, prompt, self._choose(ask, prompt, self._rng), self._now_s())
        if not self._settle(ticket):
            raise Overloaded(_why(ticket.decision))
        if isinstance(ticket.outcome, Assignment):
            return ticket.outcome
        assert ticket.outcome is not None
        raise ticket.outcome

    def step(self) -> None:
        """Assign as many waiting requests as fit, and refuse those that no worker is left for."""
        if self._stepping or not self.n_waiting:
            return
        self._stepping = True
        try:
            for lane in list(self._lanes.values()):
                while lane.tickets:
                    ticket = lane.tickets[0]
                    views = self.fleet.views(ticket.prompt)
                    ticket.decision = choose(ticket.ask, self.fleet.grids, views, rng=self._rng)
                    if not self._settle(ticket):
                        break
                    lane.tickets.popleft()
                    self.n_waiting -= 1
                    lane.note_assigned(self._now_s())
        finally:
            self._stepping = False

    def reassign(
        self, assignment: Assignment, ask: Ask, stage: Stage, prompt: Prompt | None = None
    ) -> StageChoice | None:
        """Another worker for a stage whose worker failed; None, and no change, when there is none."""
        choice = choose_stage(
            stage, ask, self.fleet.grids[stage], self.fleet.views(prompt), rng=self._rng
        )
        if choice.row is None:
            return None
        failed = assignment.lease(stage).member
        self.fleet.pools[failed.pool].retries_total += 1
        assignment.replace(choice, self._lease(choice, prompt))
        return choice

    def _choose(self, ask: Ask, prompt: Prompt | None, rng: random.Random) -> Decision:
        self._check_model(ask)
        return choose(ask, self.fleet.grids, self.fleet.views(prompt), rng=rng)

    def _settle(self, ticket: Ticket) -> bool:
        """Take the leases of a ticket's decision, or refuse it; False where it is worth waiting."""
        for choice in ticket.decision.stages:
            if choice.row is None and not choice.reasons & LIMITS:
                pools = ", ".join(choice.pool_order)
                refusal = NoWorker(f"{choice.stage.value}: no worker of pool {pools} is ready")
                ticket.settle(refusal)
                return True
        if any(choice.row is None for choice in ticket.decision.stages):
            return False
        leases = {c.stage: self._lease(c, ticket.prompt) for c in ticket.decision.stages}
        ticket.settle(Assignment(ticket.decision, leases))
        return True

    def _wait(self, lane: _Lane, ticket: Ticket) -> None:
        if self.n_waiting >= self._max_waiting:
            why = f"{_why(ticket.decision)}, and {self.n_waiting} requests wait already"
            ticket.settle(Overloaded(why, retry_after_ms=lane.hint_ms()))
            return
        lane.tickets.append(ticket)
        self.n_waiting += 1

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
