"""From a decision to leases, in one synchronous step: load counts from the moment of the choice.

A request that every worker of its pools could take, were it not at its limit, waits (`wait_queue`);
whenever a worker can take more, `step` assigns as many as fit.
"""

import logging
import random
from collections.abc import Callable, Collection, Set
from functools import partial

from msgspec.structs import replace

from slagate.pools.fleet.fleet import Fleet, Prepared
from slagate.pools.fleet.member import Member
from slagate.pools.fleet.pool import Lease, Pool
from slagate.pools.fleet_file.models import ANY_CLASS
from slagate.pools.grid.grid import Stage
from slagate.pools.inflight.rows import State
from slagate.pools.prefix.overlap import Prompt
from slagate.proto import gateway_pb2 as gw
from slagate.router.request.errors import GatewayError, NoWorker, Overloaded, UnknownModel
from slagate.router.scheduling.peers import PeerGateways
from slagate.router.scheduling.policy import NO_CONFIG, Decision, StageChoice, choose
from slagate.router.scheduling.score import KV_TOO_SMALL, LIMITS, OTHER_MODEL, RoutingRequest
from slagate.router.scheduling.wait_queue import Assignment, PendingAssignment, WaitQueue
from slagate.workers.runtime.clock import monotonic_s

log = logging.getLogger(__name__)

MODELS_TOLD = 5
CLASSES_NOTED = 100
"""Clients make up names of classes; those of more are not logged."""


class Dispatcher:
    """Assigns requests to workers of one fleet; at most `max_waiting` wait for one.

    `peers` are the other gateways that send to the same workers, and whose requests wait for them.
    """

    def __init__(
        self,
        fleet: Fleet,
        *,
        rng: random.Random,
        config: gw.GatewayConfig = NO_CONFIG,
        max_waiting: int = 1024,
        peers: PeerGateways | None = None,
        now_s: Callable[[], float] = monotonic_s,
    ) -> None:
        self.fleet = fleet
        self._config = config
        self._rng = rng
        self._max_waiting = max_waiting
        self._now_s = now_s
        self._peers = peers or PeerGateways()
        self._peers.on_change = self.step
        self._noted: set[str] = set()
        self._lanes = WaitQueue(now_s=now_s, older=self._waited_for_elsewhere)
        fleet.on_join(self._joined)

    def _joined(self, pool: Pool, member: Member) -> None:
        member.on_change = partial(self._changed, pool.name)

    def _changed(self, pool: str) -> None:
        if self._lanes.n_waiting:
            self.step(pool)
        if self._peers.n_peers:
            self._peers.wake()

    def _waited_for_elsewhere(self, since_s: float) -> Set[str]:
        """Pools that a request waits for in another gateway which came before `since_s`."""
        if not self._peers.n_peers or not (keys := self._peers.waited_for(since_s)):
            return frozenset()
        return {name for name, pool in self.fleet.pools.items() if pool.key in keys}

    def _show_waiting(self) -> None:
        """Tell the other gateways what waits here."""
        if self._peers.n_peers:
            pools, oldest_s = self.fleet.pools, self._lanes.oldest_s()
            oldest_of = {pools[name].key: s for name, s in oldest_s.items() if name in pools}
            self._peers.show_waiting(self._lanes.n_waiting, oldest_of)

    @property
    def n_waiting(self) -> int:
        """Requests that wait for a worker below its limits."""
        return self._lanes.n_waiting

    def explain(self, ask: RoutingRequest, prompt: Prompt | None = None) -> Decision:
        """The decision that would be taken now, with no chance used up. Raises as `submit` does."""
        rng = random.Random()
        rng.setstate(self._rng.getstate())
        return self._choose(ask, prompt, None, rng)

    def submit(
        self,
        ask: RoutingRequest,
        prompt: Prompt | None = None,
        *,
        stages: tuple[Stage, ...] | None = None,
        since_s: float | None = None,
    ) -> PendingAssignment:
        """A request for workers, for the time of a block; `PendingAssignment.assigned` waits for them.

        They are for all stages, or for some of a request that lost its workers there and has waited since
        `since_s`. Raises `UnknownModel` or `NoWorker`.
        """
        ticket = PendingAssignment(
            ask,
            prompt,
            stages=stages,
            decision=self._choose(ask, prompt, stages, self._rng),
            since_s=self._now_s() if since_s is None else since_s,
            leave=self._left,
        )
        if not (self._refused(ticket) or (self._lanes.is_free(ticket) and self._taken(ticket))):
            self._wait(ticket)
            if since_s is not None:
                # It may be older than who keeps the place that it was refused.
                self.step()
        return ticket

    def _left(self, ticket: PendingAssignment) -> None:
        self._lanes.remove(ticket)
        # It may have been the one that did not fit.
        self.step()

    def put_in_force(self, prepared: Prepared, config: gw.GatewayConfig) -> None:
        """Another configuration, for the fleet and for those who wait; receipts call it `config`."""
        # Out of the lanes before anything changes: what changes has them looked at, by half of it.
        waiting = self._lanes.clear()
        try:
            self.fleet.apply(prepared)
            self._config = config
        finally:
            for ticket in waiting:
                if not self._try(ticket, self._lanes.kept()):
                    self._lanes.add(ticket)
            self._show_waiting()

    def step(self, pool: str | None = None) -> None:
        """Assign as many waiting requests as fit, and refuse those that no worker is left for.

        With `pool` something has changed there only.
        """
        self._lanes.step(self._try, pool)
        self._show_waiting()

    def _try(self, ticket: PendingAssignment, taken: Collection[str]) -> bool:
        try:
            return self._choose_and_settle(ticket, taken)
        except Exception:
            # Whoever gave something back is not to suffer for a bug with somebody else's request.
            log.exception("dispatch.bug")
            ticket.settle(GatewayError("internal error of the gateway; see its log"))
            return True

    def _choose_and_settle(self, ticket: PendingAssignment, taken: Collection[str]) -> bool:
        try:
            ticket.decision = self._choose(ticket.ask, ticket.prompt, ticket.stages, self._rng)
        except GatewayError as error:
            ticket.settle(error)  # another configuration, that has no place for it
            return True
        if any(
            choice.row is not None and choice.pool in taken for choice in ticket.decision.stages
        ):
            return False
        return self._refused(ticket) or self._taken(ticket)

    def _choose(
        self,
        ask: RoutingRequest,
        prompt: Prompt | None,
        stages: tuple[Stage, ...] | None,
        rng: random.Random,
    ) -> Decision:
        """A decision for some stages, None: for all there are. Raises `UnknownModel` or `NoWorker`."""
        self._check_model(ask)
        fleet = self.fleet
        if fleet.objectives:
            ask = replace(ask, sla=ask.sla.with_defaults(fleet.objectives))
            if ask.sla.is_unlisted:
                self._note_class(ask.sla.objective)
        grids = fleet.grids
        if stages is not None:
            gone = ", ".join(stage.value for stage in stages if stage not in grids)
            if gone:
                raise NoWorker(f"the configuration has no {gone} pools any more")
            grids = {stage: grids[stage] for stage in stages}
        decision = choose(ask, grids, fleet.views(prompt), rng=rng)
        for choice in decision.stages:
            choice.config = self._config
        return decision

    def _refused(self, ticket: PendingAssignment) -> bool:
        """Refuse a ticket where a stage has nobody that it would be worth waiting for."""
        for choice in ticket.decision.stages:
            if choice.row is None and not choice.reasons & LIMITS:
                ticket.settle(NoWorker(_nobody(choice)))
                return True
        return False

    def _taken(self, ticket: PendingAssignment) -> bool:
        """Take the leases of a ticket's decision; False where a stage has nobody now."""
        decision = ticket.decision
        for choice in decision.stages:
            if choice.row is None:
                return False
        leases: dict[Stage, Lease] = {}
        try:
            for choice in decision.stages:
                leases[choice.stage] = self._lease(choice, ticket.prompt)
        except Exception:
            for lease in leases.values():
                lease.release()
            raise
        ticket.settle(Assignment(decision, leases))
        return True

    def _wait(self, ticket: PendingAssignment) -> None:
        n_waiting = self._lanes.n_waiting + self._peers.n_waiting
        if n_waiting < self._max_waiting:
            self._lanes.add(ticket)
            self._show_waiting()
            return
        others = f"{n_waiting} requests wait already" if n_waiting else "none may wait"
        why = f"{_why(ticket.decision)}, and {others}"
        ticket.settle(Overloaded(why, retry_after_ms=self._lanes.hint_ms(ticket)))

    def _lease(self, choice: StageChoice, prompt: Prompt | None) -> Lease:
        assert choice.row is not None
        pool = self.fleet.pools[choice.pool]
        if choice.pool != choice.pool_order[0]:
            pool.count_spill()
            log.warning(
                "request.spilled",
                extra={"stage": choice.stage.value, "from": choice.pool_order[0], "to": pool.name},
            )
        n_leases = choice.scored[-1].pool.n_leases
        return pool.lease(choice.row, choice.work, prompt, n_leases=n_leases)

    def _check_model(self, ask: RoutingRequest) -> None:
        if not self.fleet.serves(ask.model):
            if not self.fleet.models():
                raise NoWorker("no worker has been reached yet")
            if any(member.state is State.JOINING for member in self.fleet.members()):
                raise NoWorker(
                    "no worker of the model has been reached yet, and not all were asked"
                )
            served = ", ".join(name[:100] for name in sorted(self.fleet.models())[:MODELS_TOLD])
            raise UnknownModel(f"model: {ask.model[:100]!r} is not served here, but {served}")

    def _note_class(self, name: str) -> None:
        """Tell of a class that the configuration does not list, once."""
        if name not in self._noted and len(self._noted) < CLASSES_NOTED:
            self._noted.add(name)
            log.warning("request.unknown_class", extra={"class": name, "counts_as": ANY_CLASS})


def _nobody(choice: StageChoice) -> str:
    """Why a stage has no worker that it would be worth waiting for."""
    of_pool = f"{choice.stage.value}: no worker of pool {', '.join(choice.pool_order)}"
    why = choice.reasons
    if OTHER_MODEL in why or KV_TOO_SMALL in why:
        return f"{of_pool} can take it: {', '.join(sorted(why))}"
    return f"{of_pool} is ready"


def _why(decision: Decision) -> str:
    """Which stage holds a request up; the first, where none does at this moment."""
    choice = next((c for c in decision.stages if c.row is None), decision.stages[0])
    reasons = " or ".join(sorted(choice.reasons & LIMITS)) or "at its limit"
    return f"{choice.stage.value}: every worker of pool {', '.join(choice.pool_order)} is {reasons}"
