"""Requests that wait for workers below their limits: in lanes, each in order of arrival.

A lane is of requests that wait for the same: model, stages, order of pools. Its first request stands for
all of it. Between lanes age decides too: what an older request waits for no younger one of another lane
takes. Who gets workers holds them in an `Assignment`.
"""

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator, Set

from slagate.pools.fleet.member import Member
from slagate.pools.fleet.pool import Lease
from slagate.pools.grid.grid import Stage
from slagate.pools.inflight.rows import State
from slagate.pools.prefix.overlap import Prompt
from slagate.router.request.errors import GatewayError, Overloaded
from slagate.router.scheduling.policy import Decision, StageChoice
from slagate.router.scheduling.score import LIMITS, RoutingRequest


class Assignment:
    """The workers a request holds: one lease a stage, all released by `release`."""

    def __init__(self, decision: Decision, leases: dict[Stage, Lease]) -> None:
        self.decision = decision
        self._leases = leases

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

    def adopt(self, other: "Assignment") -> None:
        """Take over the other's workers for its stages; those held for them before are let go."""
        for choice in other.decision.stages:
            self._leases[choice.stage].release()
            self._leases[choice.stage] = other.lease(choice.stage)
            self.decision = self.decision.replace(choice)

    def release(self) -> None:
        """Let every worker go. Idempotent."""
        for lease in self._leases.values():
            lease.release()


MAX_HINT_S = 30.0
"""A client is never told to come back later than this."""


class PendingAssignment:
    """A request's place, for the time of a block: assigned, refused, or waiting.

    An assignment that the block failed with is given back, else it is whose the block is.
    """

    def __init__(
        self,
        ask: RoutingRequest,
        prompt: Prompt | None,
        *,
        stages: tuple[Stage, ...] | None,
        decision: Decision,
        since_s: float,
        leave: Callable[["PendingAssignment"], None],
    ) -> None:
        """`leave` is called where it still waits at the end of the block."""
        self.ask = ask
        self.prompt = prompt
        self.stages = stages  # None: all that the configuration has
        self.decision = decision  # the newest one
        self.since_s = since_s
        self.outcome: Assignment | GatewayError | None = None
        self._leave = leave
        self._waiter: asyncio.Future[None] | None = None

    def __enter__(self) -> "PendingAssignment":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and isinstance(self.outcome, Assignment):
            self.outcome.release()
        if self.outcome is None:
            self._leave(self)

    def settle(self, outcome: Assignment | GatewayError) -> None:
        """Assign or refuse it."""
        self.outcome = outcome
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def assigned(self) -> Assignment:
        """Wait for the workers. Raises `NoWorker` or `Overloaded`."""
        if self.outcome is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if isinstance(self.outcome, GatewayError):
            raise self.outcome
        assert self.outcome is not None
        return self.outcome

    @property
    def lane(self) -> Hashable:
        """What it waits for; who has failed it is part of that, as others may go there."""
        orders = ((choice.stage, choice.pool_order) for choice in self.decision.stages)
        return (self.ask.model, self.ask.excluded, *orders)

    def held_up_by(self, taken: Collection[str]) -> list[StageChoice]:
        """Stages that have nobody, or only somebody of a pool that an older request waits for."""
        return [c for c in self.decision.stages if c.row is None or c.pool in taken]


class _WaitLine:
    def __init__(self, key: Hashable) -> None:
        self.key = key
        self.tickets: deque[PendingAssignment] = deque()
        self.pools: set[str] = set()  # that its first request waits for
        self._only_joining = False
        self._interval_s: float | None = None  # between two assignments, lately
        self._last_s: float | None = None

    def wait_for(self, choices: Collection[StageChoice]) -> None:
        self.pools = {pool for choice in choices for pool in choice.pool_order}
        self._only_joining = all(
            choice.row is None and choice.reasons & LIMITS == {State.JOINING.value}
            for choice in choices
        )

    @property
    def kept(self) -> set[str]:
        """Pools that younger requests of other lanes leave to it."""
        # It may not go everywhere there, so what it cannot take is nobody's loss. Nor is anything that
        # others could take what it waits for where that is only to know a worker that has just joined.
        if not self.tickets or self.tickets[0].ask.excluded or self._only_joining:
            return set()
        return self.pools

    def served(self, now_s: float) -> None:
        self.tickets.popleft()
        if not self.tickets:
            self._last_s = None  # what comes next is no sign of how fast things go
            return
        if self._last_s is not None:
            interval_s = now_s - self._last_s
            old_s = interval_s if self._interval_s is None else self._interval_s
            self._interval_s = old_s + 0.2 * (interval_s - old_s)
        self._last_s = now_s

    def hint_ms(self) -> int:
        if self._interval_s is None:
            return Overloaded.default_retry_ms
        return int(1000 * min(max(self._interval_s * (len(self.tickets) + 1), 0.1), MAX_HINT_S))


class WaitQueue:
    """Who waits. `settle` is tried on a ticket: true when it was assigned or refused.

    `older` has the pools that a request waits for in another process which came before a time.
    """

    def __init__(
        self,
        *,
        now_s: Callable[[], float],
        older: Callable[[float], Set[str]] = lambda _: frozenset(),
    ) -> None:
        self._now_s = now_s
        self._older = older
        self._lanes: dict[Hashable, _WaitLine] = {}
        self._stepping = False
        self.n_waiting = 0

    def is_free(self, ticket: PendingAssignment) -> bool:
        """Whether nobody who came before waits for what it would take."""
        taken = self._older(ticket.since_s)
        if not self.n_waiting and not taken:
            return True
        lane = self._lanes.get(ticket.lane)
        taken = taken | self.kept()
        in_line = lane is not None and bool(lane.tickets)
        return not in_line and not any(choice.pool in taken for choice in ticket.decision.stages)

    def add(self, ticket: PendingAssignment) -> None:
        """Let it wait, behind those of its lane."""
        lane = self._lanes.setdefault(ticket.lane, _WaitLine(ticket.lane))
        if not lane.tickets:
            lane.wait_for(ticket.held_up_by(self.kept() | self._older(ticket.since_s)))
        lane.tickets.append(ticket)
        self.n_waiting += 1

    def clear(self) -> list[PendingAssignment]:
        """Let nobody wait any more; those who did, the oldest first."""
        tickets = [ticket for lane in self._waiting() for ticket in lane.tickets]
        self._lanes.clear()
        self.n_waiting = 0
        return sorted(tickets, key=lambda ticket: ticket.since_s)

    def hint_ms(self, ticket: PendingAssignment) -> int:
        """When one more like this would have its turn, as things go."""
        lane = self._lanes.get(ticket.lane)
        return Overloaded.default_retry_ms if lane is None else lane.hint_ms()

    def remove(self, ticket: PendingAssignment) -> None:
        """It waits no more."""
        lane = next(lane for lane in self._waiting() if ticket in lane.tickets)
        lane.tickets.remove(ticket)
        self._left(lane, ticket)

    def step(
        self, settle: Callable[[PendingAssignment, Collection[str]], bool], pool: str | None
    ) -> None:
        """Settle as many as can be, the oldest first; with `pool` only those who wait for that one."""
        if self._stepping or not self.n_waiting:
            return
        self._stepping = True
        try:
            taken: set[str] = set()
            heads = [(lane.tickets[0].since_s, n, lane) for n, lane in enumerate(self._waiting())]
            heapq.heapify(heads)
            while heads:
                _, n, lane = heapq.heappop(heads)
                if (pool is None or pool in lane.pools) and self._serve(lane, settle, taken):
                    if lane.tickets:
                        heapq.heappush(heads, (lane.tickets[0].since_s, n, lane))
                else:
                    taken |= lane.kept
        finally:
            self._stepping = False

    def _serve(
        self,
        lane: _WaitLine,
        settle: Callable[[PendingAssignment, Collection[str]], bool],
        taken: set[str],
    ) -> bool:
        ticket = lane.tickets[0]
        taken = taken | self._older(ticket.since_s)
        if not settle(ticket, taken):
            lane.wait_for(ticket.held_up_by(taken))
            return False
        lane.served(self._now_s())
        self._left(lane, ticket)
        if lane.tickets:
            # Not looked at yet; it waits for no less than the one before it did.
            lane.wait_for(ticket.decision.stages)
        return True

    def _left(self, lane: _WaitLine, ticket: PendingAssignment) -> None:
        self.n_waiting -= 1
        if not lane.tickets and ticket.ask.excluded:
            # Each retry may have a lane of its own; the others are few, and remember how fast they go.
            del self._lanes[lane.key]

    def _waiting(self) -> Iterator[_WaitLine]:
        return (lane for lane in self._lanes.values() if lane.tickets)

    def oldest_s(self) -> dict[str, float]:
        """Since when the oldest request waits for a pool that younger ones leave to it."""
        found: dict[str, float] = {}
        for lane in self._waiting():
            since_s = lane.tickets[0].since_s
            for pool in lane.kept:
                found[pool] = min(since_s, found.get(pool, since_s))
        return found

    def kept(self) -> set[str]:
        """Pools that younger requests of other lanes leave to those who wait."""
        return set().union(*(lane.kept for lane in self._waiting()))
