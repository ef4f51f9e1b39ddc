"""One request's hold on the fleet: its leases, its handoff, and the calls to its workers."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import grpc
from msgspec.structs import replace

from slagate.pools.estimator.estimator import Estimator
from slagate.pools.fleet.member import Member
from slagate.pools.fleet.pool import Lease
from slagate.pools.grid.grid import Stage
from slagate.proto import openengine_pb2 as oe
from slagate.proto.rpc.status import OK, Metadata, Status
from slagate.router.legs.handoff import Handoff, Releaser
from slagate.router.legs.leg import LegSink
from slagate.router.legs.relay import Relay
from slagate.router.metrics import Metrics
from slagate.router.receipts.record import Record
from slagate.router.receipts.ring import ReceiptRing
from slagate.router.request.call import ClientCall
from slagate.router.request.errors import GatewayError, LegFailed
from slagate.router.request.metadata import PRIORITY
from slagate.router.request.request import Request
from slagate.router.request.running import RunningRequests
from slagate.router.request.settings import Settings
from slagate.router.scheduling.dispatcher import Dispatcher
from slagate.router.scheduling.policy import StageChoice
from slagate.router.scheduling.score import RoutingRequest
from slagate.router.scheduling.wait_queue import Assignment
from slagate.workers.legs import DECODE_RANK, TARGET_RANK

log = logging.getLogger(__name__)

FORWARDED_KEYS = ("traceparent", "tracestate")
"""Client metadata that a worker gets; everything else is the gateway's business, or nobody's."""

GIVEN_UP = Status(grpc.StatusCode.CANCELLED, "given up by the gateway")

LEG_SLACK_S = 0.05
"""Of a leg's limit, behind the request's own: that one cancels the leg, and says whose limit it was. Loops
count in milliseconds, so of two timers for one moment either may come first."""

TRAILER_LIMIT_S = 1.0
"""How long a worker may take to close a call behind its terminal event."""


@dataclass(slots=True)
class Gateway:
    """What every request needs."""

    dispatcher: Dispatcher
    settings: Settings
    metrics: Metrics
    receipts: ReceiptRing
    releaser: Releaser
    live: RunningRequests
    leg_id: Callable[[], str]
    now_s: Callable[[], float]


_SinkT = TypeVar("_SinkT", bound=LegSink)


@dataclass(slots=True)
class ActiveRequest:
    """What a request holds, and how it calls the workers that it holds."""

    call: ClientCall
    gateway: Gateway
    record: Record
    request: Request
    ask: RoutingRequest
    assignment: Assignment
    deadline_s: float
    handoff: Handoff | None = None
    preface: bytes = b""  # what the client is to get in front of the first token
    started_over: bool = False
    leg_started_s: float = 0.0

    def learn_prefill(self, stage: Stage, cached_tokens: int | None) -> None:
        """What a prefill that went well tells of prediction and truth; None: the engine does not say."""
        record, lease = self.record, self.assignment.lease(stage)
        record.cached_tokens = cached_tokens
        if cached_tokens is None or record.decision is None:
            return
        choice = record.decision.stage(stage)
        scored, row = choice.scored[-1], choice.row
        assert row is not None
        lease.member.prefix_error.add_prompt(
            scored.pool.cached.cached_tokens.item(row), cached_tokens
        )
        done_s = self.gateway.now_s() if stage is Stage.PREFILL else record.tally.first_token_s
        estimator = self._estimator(choice)
        if done_s is None or estimator is None:
            return
        estimator.observe_prefill(
            self.ask.isl_tokens - cached_tokens,
            cached_tokens,
            queued_s=scored.waiting_s(row),
            seconds=done_s - self.leg_started_s,
        )

    def learn_itl(self, stage: Stage) -> None:
        """What a decode that went well tells of its prediction."""
        itl_s, decision = self.record.itl_s, self.record.decision
        if itl_s is None or decision is None:
            return
        choice = decision.stage(stage)
        estimator = self._estimator(choice)
        assert choice.row is not None
        if estimator is not None:
            estimator.observe_itl(*choice.scored[-1].decoding(choice.row), seconds=itl_s)

    def _estimator(self, choice: StageChoice) -> Estimator | None:
        """What learns from a choice; None: its pool has gone, or is of other workers by now."""
        pool = self.gateway.dispatcher.fleet.pool(choice.pool, choice.stage)
        predicted_by = choice.scored[-1].pool.estimator.profile
        if pool is None or pool.estimator.profile is not predicted_by:
            return None
        return pool.estimator

    def let_go(self) -> None:
        """Give back whatever is still held. Idempotent, never waits."""
        if self.handoff is not None:
            self.handoff.release()
        self.assignment.release()

    async def leg(self, stage: Stage, make: Callable[[str], tuple[bytes, _SinkT]]) -> _SinkT:
        """Call the stage's worker, and others while that can help; the sink of the call that went well."""
        while True:
            data, sink = make(self.gateway.leg_id())
            lease = self.assignment.lease(stage)
            member = lease.member
            self.leg_started_s = self.gateway.now_s()
            try:
                await self._run(lease, data, sink)
            except asyncio.CancelledError:
                self.record.attempt(stage, GIVEN_UP)
                raise
            finally:
                if sink.may_have_parked:
                    self.gateway.releaser.abort(sink.leg_id, member)
            failure = sink.failure()
            self.record.attempt(stage, OK if failure is None else failure.status())
            if failure is None:
                return sink
            if sink.untaken:
                member.probe_failed(f"refused a request: {failure}")
            await self._try_elsewhere(stage, failure)

    async def _run(self, lease: Lease, leg: bytes, sink: LegSink) -> None:
        """One call to a worker, waited for; cancelled when this coroutine is."""
        member = lease.member
        assert member.worker is not None, member
        if not member.is_up:
            # Leased when it was; a leg to it now would be waited for until the deadline.
            sink.worker_lost(member.reason)
            return
        remaining_s = max(self.deadline_s - self.gateway.now_s(), 0.0)
        leg_call = member.worker.generate(
            leg, self._leg_metadata(lease), sink, timeout_s=remaining_s + LEG_SLACK_S
        )
        member.legs.add(sink)
        sink.started(leg_call)
        try:
            await sink.completed()
            if not sink.has_ended and sink.failure() is None:
                # The status behind the terminal event changes nothing, so it is not waited for long.
                await sink.ended(TRAILER_LIMIT_S)
        finally:
            member.legs.discard(sink)
            sink.over()
            leg_call.cancel()

    def splice(self, stage: Stage, leg_id: str, *, on_token: Callable[[], None]) -> Relay:
        """The sink of a leg whose output the client gets."""
        return Relay(
            stage,
            self.call.out,
            leg_id=leg_id,
            client_id=self.request.id,
            tally=self.record.tally,
            max_buffer_bytes=self.gateway.settings.max_buffer_bytes,
            stuck_s=self.gateway.settings.stuck_s,
            now_s=self.gateway.now_s,
            on_token=on_token,
            on_answered=self.call.running.answered,
            preface=self.preface,
        )

    def added_budget(self) -> int | None:
        """The output budget to append to a leg: None where the client gave its own."""
        return self.record.max_tokens if self.request.max_tokens is None else None

    def _leg_metadata(self, lease: Lease) -> Metadata:
        metadata = [item for item in self.call.metadata if item[0] in FORWARDED_KEYS]
        member = lease.member
        if lease.rank is not None:
            key = DECODE_RANK if member.stage is Stage.DECODE else TARGET_RANK
            metadata.append((key, str(lease.rank)))
        priority = self.assignment.decision.ask.sla.priority
        if priority is not None:
            model = member.models.get(self.request.model)
            # TensorRT-LLM fails the whole request over a priority that it does not support.
            if model and model.generation.supports_priority:
                metadata.append((PRIORITY, str(priority)))
        return metadata

    def park(self, session: oe.KvSessionRef) -> None:
        """The prefill worker holds KV for this request, from this moment on and until told otherwise."""
        if self.handoff is not None:
            self.handoff.release()
        holder = self.assignment.lease(Stage.PREFILL).member
        self.handoff = Handoff(session, holder, self.gateway.releaser)

    async def _try_elsewhere(self, stage: Stage, failure: GatewayError) -> None:
        """Give the stage to another worker. Raises `failure` when that cannot help, or nobody is left."""
        may_retry = isinstance(failure, LegFailed) and failure.retryable
        if not may_retry or self.record.n_attempts(stage) >= self.gateway.settings.max_attempts:
            raise failure
        lease = self.assignment.lease(stage)
        lease.release()
        self.ask = replace(self.ask, excluded=self.ask.excluded | {lease.member.address})
        self.assignment.adopt(await self._reassigned(lease.member, failure, (stage,)))
        self.record.decision = self.assignment.decision
        self._note_retry(stage, failure)

    async def start_over(self, failure: LegFailed) -> None:
        """Assign prefill and decode anew. Raises `failure` when that cannot help, or was done before.

        A decode worker that accepted the handoff and then lost it (its prefill worker is gone, say) has
        sent nothing, so the client cannot tell; only the KV has to be made again.
        """
        lost = (
            failure.stage is Stage.DECODE
            and failure.code is grpc.StatusCode.UNAVAILABLE
            and not self.record.tally.n_messages
        )
        attempts = self.record.n_attempts(Stage.DECODE)
        if not lost or self.started_over or attempts >= self.gateway.settings.max_attempts:
            raise failure
        self.started_over = True
        self.let_go()
        lost_by = self.assignment.lease(Stage.DECODE).member
        self.assignment = await self._reassigned(lost_by, failure, self.assignment.stages)
        self.handoff = None
        self.record.decision = self.assignment.decision
        self._note_retry(Stage.PREFILL, failure)

    async def _reassigned(
        self, lost_by: Member, failure: GatewayError, stages: tuple[Stage, ...]
    ) -> Assignment:
        """Other workers, waited for like any, but as old as the request is. Raises `failure`."""
        dispatcher, started_s = self.gateway.dispatcher, self.gateway.now_s()
        # What it was decided by does not change any more, whatever a reload says its class means.
        ask = replace(self.ask, sla=replace(self.record.sla, is_final=True))
        try:
            with dispatcher.submit(
                ask, self.request.prompt, stages=stages, since_s=self.record.started_s
            ) as ticket:
                found = await ticket.assigned()
        except GatewayError:
            raise failure from None
        finally:
            self.record.waited_s += self.gateway.now_s() - started_s
        if (pool := dispatcher.fleet.pool(lost_by.pool, lost_by.stage)) is not None:
            pool.count_retry()
        return found

    def _note_retry(self, stage: Stage, failure: LegFailed | GatewayError) -> None:
        self.gateway.metrics.retries.labels(stage=stage.value, code=failure.code.name).inc()
        about = {"request_id": self.record.request_id, "stage": stage.value}
        log.warning("request.retried", extra=about | {"reason": str(failure)})
