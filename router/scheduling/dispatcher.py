"""From a decision to leases, in one synchronous step: load counts from the moment of the choice.

A request waits (`wait_queue`) if workers of its pools could take it and all are at their limits. Whenever a
worker can take more, `step` assigns as many requests as fit.
"""

import logging
import math
import random
from collections.abc import Callable, Iterable, Set
from functools import partial

from msgspec.structs import replace

from slagate.pools.fleet.fleet import Fleet, Prepared
from slagate.pools.fleet.member import Member
from slagate.pools.fleet.pool import Lease, Pool
from slagate.pools.fleet_file.models import ANY_CLASS, AdmissionMode, default_for
from slagate.pools.grid.grid import Stage
from slagate.pools.inflight.demand import RoomKeeper
from slagate.pools.inflight.row_view import State
from slagate.pools.prefix.overlap import Prompt
from slagate.proto import gateway_pb2 as gw
from slagate.router.request.errors import (
    NO_RETRY_MS,
    GatewayError,
    NoWorker,
    Overloaded,
    UnknownModel,
)
from slagate.router.scheduling.bypass import try_bypass
from slagate.router.scheduling.pairs import CANNOT_TAKE_OVER, NO_TAKER
from slagate.router.scheduling.peers import PeerGateways
from slagate.router.scheduling.policy import NO_CONFIG, Choose, Decision, StageChoice, choose
from slagate.router.scheduling.score import KV_TOO_SMALL, LIMITS, OTHER_MODEL, RoutingRequest
from slagate.router.scheduling.targets import busy_s, drain_s, is_unsure, note_protected, promised
from slagate.router.scheduling.wait_queue import (
    Assignment,
    PendingAssignment,
    WaitQueue,
)
from slagate.router.scheduling.words import misses
from slagate.workers.runtime.clock import monotonic_s

log = logging.getLogger(__name__)

MODELS_TOLD = 5
TOLD = frozenset({OTHER_MODEL, KV_TOO_SMALL, NO_TAKER, CANNOT_TAKE_OVER})
"""Reasons that a refused client is told, beside that nobody is ready."""

MIN_HINT_S, MAX_HINT_S = 0.1, 30.0
"""The bounds of what retry delays are drawn around."""

HINT_SPREAD = 0.25
"""The part by which retry delays are drawn shorter or longer, or all who were refused come back at once."""

MAX_PATIENT = 64
"""So many requests wait until they harm nobody; each is decided anew whenever a worker is given back."""

LEARN_EVERY_S = 10.0
"""A pool to which nobody was sent for so long learns from a request that would be refused."""

STEP_EVERY_S = 0.25
"""Load reports of many workers step the queue for relegated requests no more often than that."""

CLASSES_NOTED = 100
"""Clients make up names of classes, so no more than this many are logged."""


class Dispatcher:
    """Assigns requests to workers of one fleet; at most `max_waiting` wait for one, here and in `peers`.

    So many relegated ones may besides. `peers` are other gateways that send to the same workers. `choose`
    is the policy. `config` is in force, and named by decisions; `rng` draws between workers of equal score.
    """

    def __init__(
        self,
        fleet: Fleet,
        *,
        rng: random.Random,
        choose: Choose = choose,
        config: gw.GatewayConfig = NO_CONFIG,
        max_waiting: int = 1024,
        peers: PeerGateways | None = None,
        now_s: Callable[[], float] = monotonic_s,
    ) -> None:
        self.fleet = fleet
        self._choose_workers = choose
        self._config = config
        self._rng = rng
        self._max_waiting = max_waiting
        self._now_s = now_s
        self._peers = peers or PeerGateways()
        self._peers.on_change = self.step
        self._noted: set[str] = set()
        self._stepped_s = -math.inf  # when load reports did so last
        # By pool: how many leases it had given, and when, at the first refusal since its last one.
        self._refused: dict[str, tuple[int, float]] = {}
        self._admission: AdmissionMode = fleet.scheduling.admission
        elsewhere = self._waited_for_elsewhere if self._peers.n_peers else None
        self._queue = WaitQueue(now_s=now_s, elsewhere=elsewhere)
        fleet.on_join(self._joined)

    def _joined(self, pool: Pool, member: Member) -> None:
        member.on_change = partial(self._changed, pool.name)
        member.on_report = self._reported

    def _reported(self) -> None:
        """Somebody's load was asked for: load of others, and room that was kept, pass without a word."""
        if self._queue.waits_for_load and self._now_s() - self._stepped_s >= STEP_EVERY_S:
            self._stepped_s = self._now_s()
            self.step()

    def _changed(self, pool: str) -> None:
        """Capacity of a pool was given back."""
        if self._queue.n_waiting:
            # With bypasses what waits for a prefill worker may go to a decode worker alone.
            self.step(None if self.fleet.bypasses else pool)
        if self._peers.n_peers:
            self._peers.wake()

    def _waited_for_elsewhere(self, since_s: float) -> Set[str]:
        """Pools that a request waits for in another gateway which came before `since_s`."""
        keys = self._peers.waited_for(since_s)
        return {name for name, pool in self.fleet.pools.items() if pool.key in keys}

    def _show_waiting(self) -> None:
        """Tell the other gateways what waits here."""
        if self._peers.n_peers:
            pools, oldest_s = self.fleet.pools, self._queue.oldest_s()
            oldest_of = {pools[name].key: s for name, s in oldest_s.items() if name in pools}
            self._peers.show_waiting(self._queue.n_waiting, self._queue.n_relegated, oldest_of)

    @property
    def n_waiting(self) -> int:
        """Requests of this gateway, peers not included, that wait for a worker below its limits."""
        return self._queue.n_waiting

    @property
    def admission(self) -> AdmissionMode:
        """The admission mode in force: the configuration's, or what was set since it is in force."""
        return self._admission

    def set_admission(self, mode: AdmissionMode) -> None:
        """Put another admission mode in force, until the next configuration."""
        if mode != self._admission:
            log.info("admission.changed", extra={"from": self._admission, "to": mode})
            self._admission = mode
            # Relegated requests wait only while it is on, and then in lines of their own.
            self._decide_all_again(self._queue.clear())

    def explain(self, ask: RoutingRequest, prompt: Prompt | None = None) -> Decision:
        """The decision that `submit` would make now; no lease is taken. Raises like `submit`."""
        rng = random.Random()
        rng.setstate(self._rng.getstate())
        return self._choose(ask, prompt, None, rng, 0.0)

    def submit(
        self,
        ask: RoutingRequest,
        prompt: Prompt | None = None,
        *,
        stages: tuple[Stage, ...] | None = None,
        since_s: float | None = None,
    ) -> PendingAssignment:
        """Ask for workers: takes their leases at once if they are free, else the request waits in line.

        Use the result in a `with`, and in it `await PendingAssignment.assigned()`, which waits, and raises
        most refusals. A `with` that ends without an error keeps the leases: the caller has to release them.
        A retry names the `stages` whose workers it lost (None: all), and since when it counts as waiting
        (`since_s`, on the clock of `now_s`). Raises `UnknownModel` or `NoWorker` where there is nothing to
        choose from.
        """
        now_s = self._now_s()
        came_s = now_s if since_s is None else since_s
        pending = PendingAssignment(
            ask,
            prompt,
            stages=stages,
            decision=self._choose(ask, prompt, stages, self._rng, now_s - came_s),
            since_s=came_s,
            leave=self._leave,
        )
        self._settle(pending, self._queue.reserved_before(pending))
        if pending.outcome is None:
            self._wait(pending)
            if since_s is not None:
                # It may be older than the request for which workers were reserved.
                self.step()
        return pending

    def _leave(self, pending: PendingAssignment) -> None:
        self._queue.remove(pending)
        # It may have held up others.
        self.step()

    def put_in_force(self, prepared: Prepared, config: gw.GatewayConfig) -> None:
        """Put a configuration in force, of which `config` is the message, and decide anew what waits."""
        # Taken out before anything changes: each change steps the queue, by half of the configuration.
        waiting = self._queue.clear()
        try:
            self.fleet.apply(prepared)
            self._config = config
            self._refused.clear()
            self.set_admission(self.fleet.scheduling.admission)
        finally:
            self._decide_all_again(waiting)

    def _decide_all_again(self, waiting: Iterable[PendingAssignment]) -> None:
        """Decide anew for requests that waited until now, the oldest first and relegated ones last."""

        def turn(pending: PendingAssignment) -> tuple[bool, float]:
            objective = default_for(self.fleet.objectives, pending.ask.sla.objective)
            is_last = objective is not None and objective.policy == "relegate"
            return is_last and self._admission == "on", pending.since_s

        for pending in sorted(waiting, key=turn):
            self._decide_again(pending, self._queue.reserved())
            if pending.outcome is None:
                self._queue.append(pending)
        self._show_waiting()

    def step(self, pool: str | None = None) -> None:
        """Assign as many waiting requests as fit, and refuse those that no worker is left for.

        `pool` is the name of the only pool in which something has changed; None: any may have.
        """
        for pending, reserved in self._queue.step(pool):
            self._decide_again(pending, reserved)
        self._show_waiting()

    def _decide_again(self, pending: PendingAssignment, reserved: Set[str]) -> None:
        """Decide anew for a request that waits, and settle it if that can be."""
        try:
            elapsed_s = self._now_s() - pending.since_s
            pending.decision = self._choose(
                pending.ask, pending.prompt, pending.stages, self._rng, elapsed_s
            )
            if reserved:
                self._leave_reserved(pending, reserved)
            choices = pending.decision.stages
            # For want of workers not before its turn: those that are down now may be back by then.
            is_refused = pending.decision.admission == "refused"
            is_reserved = any(each.row is not None and each.pool in reserved for each in choices)
            if is_refused or not is_reserved:
                self._settle(pending, reserved)
        except GatewayError as error:
            pending.settle(error)  # another configuration, that has no place for it
        except Exception:
            # A bug with this request must not hit the request that has just given a worker back.
            log.exception("dispatch.bug")
            pending.settle(GatewayError("internal error of the gateway; see its log"))

    def _choose(
        self,
        ask: RoutingRequest,
        prompt: Prompt | None,
        stages: tuple[Stage, ...] | None,
        rng: random.Random,
        elapsed_s: float,
    ) -> Decision:
        """A decision for `stages`, None: for all. Raises `UnknownModel` or `NoWorker`."""
        fleet = self.fleet
        if not fleet.serves(ask.model):
            raise self._unserved(ask.model)
        sla, is_protected, yields = ask.sla, False, False
        if fleet.objectives or sla.objective:
            sla = sla.with_defaults(fleet.objectives)
            if sla.is_unlisted:
                self._note_class(sla.objective)
            objective = default_for(fleet.objectives, sla.objective)
            if objective is not None and objective.policy != "shed":
                is_protected = objective.policy == "protect"
                # A retry was admitted when it came, and its client may have waited for long.
                yields = not is_protected and self._admission == "on" and not sla.is_final
        if sla.ttft_ms == 0 or sla.itl_ms == 0:
            sla = sla.with_edges(fleet.grids.values())
        answer_tokens = fleet.answers.short_tokens(sla.objective)
        if ask.max_tokens is not None:
            answer_tokens = min(ask.max_tokens, answer_tokens)
        ask = replace(
            ask,
            sla=sla,
            elapsed_s=elapsed_s,
            answer_tokens=answer_tokens,
            growth_tokens=int(answer_tokens),
            is_protected=is_protected,
            yields=yields,
            admission_mode=self._admission,
        )
        grids = fleet.grids
        if stages is not None:
            gone = ", ".join(stage.value for stage in stages if stage not in grids)
            if gone:
                raise NoWorker(f"the configuration has no {gone} pools any more")
            grids = {stage: grids[stage] for stage in stages}
        views = fleet.views(prompt)
        decision = self._choose_workers(ask, grids, views, rng=rng, config=self._config)
        if fleet.bypasses and stages is None:
            draw = rng.random()
            decision = try_bypass(decision, grids, views, draw=draw, config=self._config)
        for choice in decision.stages:
            if choice.is_met is False:
                decision = decision.with_admission(fleet.objectives)
                if decision.admission == "refused" and self._teaches(decision):
                    ask = replace(decision.ask, admission_mode="learn")
                    decision = replace(decision, ask=ask).with_admission(fleet.objectives)
                return decision
        return decision

    def _teaches(self, decision: Decision) -> bool:
        """Whether a request is worth more than its refusal: idle workers that get none are never learnt."""
        for choice in decision.stages:
            if choice.is_met is not False:
                continue
            pool, rows, row = self.fleet.pools[choice.pool], choice.won.pool.rows, choice.row
            if row is None or rows.batch.item(row) > 1 or rows.load_s.item(row) > 0.0:
                return False
            n_leases, since_s = self._refused.get(pool.name, (-1, 0.0))
            if n_leases != pool.table.newest_lease() or self._now_s() - since_s < LEARN_EVERY_S:
                return False
        return True

    def _settle(self, pending: PendingAssignment, reserved: Set[str]) -> None:
        """Take the leases of a request's decision, or refuse it, or do nothing: then it has to wait.

        It is refused where a stage has nobody that would be worth waiting for, or admission says so. It
        waits where a stage has nobody now, or somebody of a pool that is reserved for older requests.
        """
        if reserved:
            self._leave_reserved(pending, reserved)
        choices = pending.decision.stages
        has_to_wait = False
        for choice in choices:
            if choice.row is None and choice.is_hopeless:
                pending.settle(NoWorker(_nobody(choice)))
                return
            has_to_wait |= choice.row is None or choice.pool in reserved
        admission = pending.decision.admission
        if admission == "waits" and self._queue.has_patience(pending, MAX_PATIENT):
            return
        if admission in ("refused", "waits"):
            self._refuse(pending)
            return
        if has_to_wait:
            return
        asked = pending.decision.ask
        if asked.is_protected and not asked.sla.is_final:  # a retry was learnt from when it came
            self._keep_room(choices)
        leases: dict[Stage, Lease] = {}
        try:
            for choice in choices:
                assert choice.row is not None
                pool, scored = self.fleet.pools[choice.pool], choice.won
                if choice.pool != choice.pool_order[0]:
                    _note_spill(pool, choice)
                work = scored.work(choice.row)
                if choice.is_met:
                    work = promised(scored, choice.row, work, self._now_s())
                leases[choice.stage] = pool.lease(
                    choice.row, work, pending.prompt, n_leases=scored.pool.n_leases
                )
        except Exception:
            for lease in leases.values():
                lease.release()
            raise
        pending.settle(Assignment(pending.decision, leases))

    def _leave_reserved(self, pending: PendingAssignment, reserved: Set[str]) -> None:
        """Drop a bypass whose pool is reserved for older requests: what waits waits for both stages."""
        decision = pending.decision
        if decision.is_bypass and decision.stages[0].pool in reserved:
            left = Decision(decision.ask, decision.untaken)
            pending.decision = left.with_admission(self.fleet.objectives)

    def _keep_room(self, choices: Iterable[StageChoice]) -> None:
        """Let the pools learn how much room a protected request needs."""
        for choice in choices:
            for scored in choice.scored:
                pool = self.fleet.pools[scored.pool.name]
                pool.room = pool.room or RoomKeeper()
                note_protected(scored, pool.room)
                if scored is choice.won:
                    assert choice.row is not None
                    pool.room.add_busy(busy_s(scored, choice.row), self._now_s())

    def _refuse(self, pending: PendingAssignment) -> None:
        """Refuse a request that is predicted to miss, or that would have to wait for others' sake."""
        for choice in pending.decision.stages:
            pool = self.fleet.pools[choice.pool]
            n_leases = pool.table.newest_lease()
            if self._refused.get(pool.name, (-1, 0.0))[0] != n_leases:
                self._refused[pool.name] = n_leases, self._now_s()
        refusal = self._refusal(pending)
        pending.decision = replace(pending.decision, admission="refused")
        pending.settle(refusal)

    def _refusal(self, pending: PendingAssignment) -> Overloaded:
        """Why a request is refused that is predicted to miss, and when it would fit, if ever."""
        decision = pending.decision
        why, last = misses(decision), decision.stages[-1]
        answer_tokens = self.fleet.answers.short_tokens("")
        until_s = max(
            drain_s(
                choice.scored,
                () if choice is last else last.scored,
                answer_tokens=answer_tokens,
            )
            for choice in decision.stages
            if choice.is_met is False
        )
        if until_s == math.inf:
            why += (
                "; no worker there would meet it with nothing else to do, so a retry is of no use"
            )
            return Overloaded(why, retry_after_ms=NO_RETRY_MS)
        if any(choice.row is None for choice in decision.stages):
            until_s = max(until_s, self._queue.turn_s(pending))
        return Overloaded(why, retry_after_ms=self._hint_ms(until_s))

    def _hint_ms(self, until_s: float) -> int:
        """When to come back, milliseconds: about then, within bounds."""
        spread = self._rng.uniform(1 - HINT_SPREAD, 1 + HINT_SPREAD)
        return int(1000 * min(max(until_s, MIN_HINT_S), MAX_HINT_S) * spread)

    def _wait(self, pending: PendingAssignment) -> None:
        n_last = self._queue.n_relegated + self._peers.n_relegated
        n_others = self._queue.n_waiting + self._peers.n_waiting - n_last
        n_waiting = n_last if pending.decision.ask.yields else n_others
        if n_waiting < self._max_waiting:
            self._queue.append(pending)
            self._show_waiting()
            return
        if pending.decision.admission == "waits":
            self._refuse(pending)
            return
        others = f"{n_waiting} requests wait already" if n_waiting else "none may wait"
        why = f"{_why(pending.decision)}, and {others}"
        pending.settle(Overloaded(why, retry_after_ms=self._hint_ms(self._queue.turn_s(pending))))

    def _unserved(self, model: str) -> GatewayError:
        """Why no worker serves a model."""
        if not self.fleet.models():
            return NoWorker("no worker has been reached yet")
        if any(member.state is State.JOINING for member in self.fleet.members()):
            return NoWorker("no worker of the model has been reached yet, and not all were asked")
        served = ", ".join(name[:100] for name in sorted(self.fleet.models())[:MODELS_TOLD])
        return UnknownModel(f"model: {model[:100]!r} is not served here, but {served}")

    def _note_class(self, name: str) -> None:
        """Log a class that the configuration does not list, once."""
        if name not in self._noted and len(self._noted) < CLASSES_NOTED:
            self._noted.add(name)
            log.warning("request.unknown_class", extra={"class": name, "counts_as": ANY_CLASS})


def _note_spill(pool: Pool, choice: StageChoice) -> None:
    """Count a choice that went past the first pool of its order; log it if nobody there could take it."""
    pool.count_spill()
    is_judged = choice.is_met is not None or is_unsure(choice.won, choice.row or 0)
    own = (each for each in choice.scored if each.pool.name == choice.pool_order[0])
    if is_judged and all(each.n_open for each in own):
        return  # load decided so, which is no event
    about = {"stage": choice.stage.value, "from": choice.pool_order[0], "to": pool.name}
    log.warning("request.spilled", extra=about)


def _nobody(choice: StageChoice) -> str:
    """Why a stage has no worker that it would be worth waiting for."""
    of_pool = f"{choice.stage.value}: no worker of pool {', '.join(choice.pool_order)}"
    why = choice.reasons
    if why & TOLD:
        return f"{of_pool} can take it: {', '.join(sorted(why))}"
    return f"{of_pool} is ready"


def _why(decision: Decision) -> str:
    """Why a request has to wait: the stage without a worker, or the first where each has one."""
    choice = next((c for c in decision.stages if c.row is None), decision.stages[0])
    reasons = " or ".join(sorted(choice.reasons & LIMITS)) or "at its limit"
    return f"{choice.stage.value}: every worker of pool {', '.join(choice.pool_order)} is {reasons}"
