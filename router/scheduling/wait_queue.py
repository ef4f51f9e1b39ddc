"""Requests that wait for workers below their limits, in lines, each in order of arrival.

A line has requests that wait for the same: model, stages, order of pools. Its first request stands for all
of it, and the pools that this one waits for are reserved: no younger request of another line gets a worker
there, but one that holds a worker of its other stage: the older ones may wait for that. A request that was
given workers holds them in an `Assignment`.
"""

import asyncio
import heapq
import math
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Set

from slagate.pools.fleet.member import Member
from slagate.pools.fleet.pool import Lease
from slagate.pools.grid.grid import Stage
from slagate.pools.inflight.row_view import State
from slagate.pools.prefix.overlap import Prompt
from slagate.router.request.errors import GatewayError, Overloaded
from slagate.router.scheduling.policy import Decision
from slagate.router.scheduling.score import LIMITS, RoutingRequest


class Assignment:
    """The workers of one request: a lease for each stage."""

    __slots__ = ("decision", "leases")

    def __init__(self, decision: Decision, leases: dict[Stage, Lease]) -> None:
        self.decision = decision
        self.leases = leases  # in the order of the stages

    @property
    def members(self) -> list[Member]:
        """The workers, in the order of the stages."""
        return [lease.member for lease in self.leases.values()]

    def adopt(self, other: "Assignment") -> None:
        """Take over the other's leases and choices, and release the leases that they replace.

        A bypass takes over whichever stages the other has.
        """
        if self.decision.is_bypass:
            self.release()
            self.leases, self.decision = other.leases, self.decision.replaced_by(other.decision)
            return
        for choice in other.decision.stages:
            self.leases[choice.stage].release()
            self.leases[choice.stage] = other.leases[choice.stage]
            self.decision = self.decision.replace(choice)

    def release(self) -> None:
        """Release every lease. Idempotent."""
        for lease in self.leases.values():
            lease.release()


class PendingAssignment:
    """One request for workers, to be used in a `with`: assigned, refused (`outcome`), or still waiting.

    An error in the `with` releases the leases of an assignment; without one, the caller has to. A request
    that still waits when the `with` ends leaves the queue.
    """

    __slots__ = ("_leave", "_waiter", "ask", "decision", "outcome", "prompt", "since_s", "stages")

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
        """`leave` is called if the request still waits when the `with` ends."""
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
        """Set the outcome, an assignment or the error that refuses the request, and wake `assigned`."""
        self.outcome = outcome
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def assigned(self) -> Assignment:
        """Wait for the workers. Raises the error of a refusal, mostly `NoWorker` or `Overloaded`."""
        if self.outcome is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if isinstance(self.outcome, GatewayError):
            raise self.outcome
        assert self.outcome is not None
        return self.outcome

    def is_overdue(self, now_s: float) -> bool:
        """Whether its time to the first token is over, and it was not decided since."""
        ask, waits_ms = self.decision.ask, 1000 * (now_s - self.since_s)
        if ask.sla.ttft_ms is None or ask.sla.is_final or not ask.by_targets:
            return False
        return 1000 * ask.elapsed_s <= ask.sla.ttft_ms < waits_ms

    @property
    def line(self) -> Hashable:
        """The key of its line in the queue: model, orders of pools by stage, what a retry is bound to."""
        if self.decision.admission == "waits":
            return id(self)  # what makes others late is its own prompt: those behind it may fit
        orders = ((choice.stage, choice.pool_order) for choice in self.decision.stages)
        yields = self.decision.ask.yields
        return (self.ask.model, self.ask.excluded, self.ask.partner, yields, *orders)


class _WaitLine:
    def __init__(self, key: Hashable) -> None:
        self.key = key
        self.requests: deque[PendingAssignment] = deque()
        self.pools: set[str] = set()  # that its first request waits for
        self.is_patient = False  # its one request has a row, but would harm others there
        self._only_joining = False
        self._interval_s: float | None = None  # between two assignments, a moving average
        self._last_s: float | None = None

    def wait_for(self, decision: Decision, reserved: Set[str] | None = None) -> None:
        """Note what the first request waits for; `reserved` are pools of older ones, None: not known."""
        # Stages that have nobody, or only somebody of a pool that an older request waits for.
        choices = [
            choice
            for choice in decision.stages
            if self.is_patient or reserved is None or choice.row is None or choice.pool in reserved
        ]
        if any(choice.row is None and choice.pairing is not None for choice in choices):
            # A worker of the other stage that gets free may make one of this stage open.
            choices = list(decision.stages)
        self.pools = {pool for choice in choices for pool in choice.pool_order}
        self._only_joining = all(
            choice.row is None and choice.reasons & LIMITS == {State.JOINING.value}
            for choice in choices
        )

    @property
    def yields(self) -> bool:
        """Whether its requests, of relegated classes, are behind all others."""
        return bool(self.requests) and self.requests[0].decision.ask.yields

    @property
    def reserved(self) -> set[str]:
        """Pools reserved for it, against younger requests of other lines."""
        # A request with excluded workers may not go everywhere in its pools, so what it cannot take is left
        # to others. So are pools that it waits for only until a worker that has just joined is known, and
        # all where it is behind all others anyway, or has a worker that it would harm.
        if not self.requests or self.requests[0].ask.excluded or self._only_joining:
            return set()
        return set() if self.yields or self.is_patient else self.pools

    def pop_first(self, now_s: float) -> None:
        is_served = isinstance(self.requests.popleft().outcome, Assignment)
        if not self.requests:
            self._last_s = None  # when the next one comes says nothing of how fast workers get free
        if not self.requests or not is_served:
            return
        if self._last_s is not None:
            interval_s = now_s - self._last_s
            old_s = interval_s if self._interval_s is None else self._interval_s
            self._interval_s = old_s + 0.2 * (interval_s - old_s)
        self._last_s = now_s

    def turn_s(self) -> float:
        if self._interval_s is None:
            return Overloaded.default_retry_ms / 1000
        return self._interval_s * (len(self.requests) + 1)


class WaitQueue:
    """The waiting requests of one gateway.

    `elsewhere(since_s)` gives the pools for which a request in another gateway has waited since before that
    time; None: there is no other gateway.
    """

    def __init__(
        self,
        *,
        now_s: Callable[[], float],
        elsewhere: Callable[[float], Set[str]] | None = None,
    ) -> None:
        self._now_s = now_s
        self._elsewhere = elsewhere
        self._lines: dict[Hashable, _WaitLine] = {}
        self._is_stepping = False
        self.n_waiting = 0

    @property
    def n_relegated(self) -> int:
        """Requests among those that wait that are behind all others."""
        return sum(len(line.requests) for line in self._waiting() if line.yields)

    def has_patience(self, pending: PendingAssignment, most: int) -> bool:
        """Whether a request may wait although it has a worker, as it would harm others: `most` may."""
        line = self._lines.get(id(pending))
        return line is not None or sum(line.is_patient for line in self._waiting()) < most

    @property
    def waits_for_load(self) -> bool:
        """Whether one waits for what passes without a word: load of others, and room that was kept."""
        return any(line.yields or line.is_patient for line in self._waiting())

    def reserved_before(self, new: PendingAssignment) -> Set[str]:
        """Names of pools that a new request must leave to requests that came before it."""
        if not self.n_waiting:
            return frozenset() if self._elsewhere is None else self._waited_for_before(new)
        line = self._lines.get(new.line)
        if line is not None and line.requests:
            return {choice.pool for choice in new.decision.stages}
        return self._reserved_for(new, self.reserved())

    def reserved(self) -> set[str]:
        """Names of pools reserved for the requests that wait here, against younger ones of other lines."""
        return set().union(*(line.reserved for line in self._waiting()))

    def append(self, new: PendingAssignment) -> None:
        """Put a request at the end of its line."""
        line = self._lines.setdefault(new.line, _WaitLine(new.line))
        line.is_patient = new.decision.admission == "waits"
        if not line.requests:
            line.wait_for(new.decision, self._reserved_for(new, self.reserved()))
        line.requests.append(new)
        self.n_waiting += 1

    def remove(self, pending: PendingAssignment) -> None:
        """Remove a waiting request from the queue."""
        line = next(line for line in self._waiting() if pending in line.requests)
        line.requests.remove(pending)
        self._removed(line, pending)

    def clear(self) -> list[PendingAssignment]:
        """Remove all requests, and return them, the oldest first."""
        found = [pending for line in self._waiting() for pending in line.requests]
        self._lines.clear()
        self.n_waiting = 0
        return sorted(found, key=lambda pending: pending.since_s)

    def turn_s(self, pending: PendingAssignment) -> float:
        """Seconds until a request's line would be served, at the present rate; a guess without one."""
        line = self._lines.get(pending.line)
        return Overloaded.default_retry_ms / 1000 if line is None else line.turn_s()

    def step(self, pool: str | None) -> Iterator[tuple[PendingAssignment, Set[str]]]:
        """Yield the first request of each line, oldest first, with the pools it must leave to older ones.

        If the caller settles a request before it asks for the next, the one behind it comes to its turn; if
        not, its line waits on; but behind the first one those whose time to the first token is over are
        yielded once. With `pool`, lines that wait for other pools are left out. A step in a step yields
        nothing.
        """
        if self._is_stepping or not self.n_waiting:
            return
        self._is_stepping = True
        try:
            reserved: set[str] = set()
            heads = [
                (line.yields, line.requests[0].since_s, n, line)
                for n, line in enumerate(self._waiting())
            ]
            heapq.heapify(heads)
            while heads:
                _, _, n, line = heapq.heappop(heads)
                if pool is None or pool in line.pools:
                    first = line.requests[0]
                    of_older = self._reserved_for(first, reserved)
                    yield first, of_older
                    if first.outcome is not None:
                        self._settled(line, first)
                        if line.requests:
                            heapq.heappush(heads, (line.yields, line.requests[0].since_s, n, line))
                        continue
                    if first.decision.admission == "waits" and not line.is_patient:
                        line.requests.popleft()
                        self._removed(line, first)
                        self.append(first)
                        if line.requests:
                            line.wait_for(first.decision)
                            heapq.heappush(heads, (line.yields, line.requests[0].since_s, n, line))
                        continue
                    line.wait_for(first.decision, of_older)
                for late in [each for each in line.requests if each.is_overdue(self._now_s())]:
                    yield late, reserved | line.pools
                    if late.outcome is not None:
                        line.requests.remove(late)
                        self._removed(line, late)
                reserved |= line.reserved
        finally:
            self._is_stepping = False

    def _settled(self, line: _WaitLine, pending: PendingAssignment) -> None:
        line.pop_first(self._now_s())
        self._removed(line, pending)
        if line.requests:
            # The next one was not decided for yet; it waits for no less than the one before it did.
            line.wait_for(pending.decision)

    def _removed(self, line: _WaitLine, pending: PendingAssignment) -> None:
        self.n_waiting -= 1
        if not line.requests and (pending.ask.excluded or line.is_patient):
            # Each retry may have a line of its own; the others are few, and remember how fast they go.
            del self._lines[line.key]

    def _reserved_for(self, pending: PendingAssignment, here: set[str]) -> Set[str]:
        if pending.ask.partner is not None:
            # It holds a worker of its other stage, which may be what the older ones wait for.
            return frozenset()
        return here if self._elsewhere is None else here | self._waited_for_before(pending)

    def _waited_for_before(self, pending: PendingAssignment) -> Set[str]:
        """Pools that a request waits for in another gateway which comes before this one."""
        assert self._elsewhere is not None
        return self._elsewhere(math.inf if pending.decision.ask.yields else pending.since_s)

    def _waiting(self) -> Iterator[_WaitLine]:
        return (line for line in self._lines.values() if line.requests)

    def oldest_s(self) -> dict[str, float]:
        """For each reserved pool, since when its oldest request waits, on the clock of `now_s`."""
        found: dict[str, float] = {}
        for line in self._waiting():
            since_s = line.requests[0].since_s
            for pool in line.reserved:
                found[pool] = min(since_s, found.get(pool, since_s))
        return found
