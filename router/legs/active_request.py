"""A request on its way: its leases, its handoff, calls to its workers, and other workers for a retry."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import grpc
from msgspec.structs import replace

from slagate.pools.fleet.member import Member
from slagate.pools.fleet.pool import Lease
from slagate.pools.grid.grid import Stage
from slagate.proto import openengine_pb2 as oe
from slagate.proto.rpc.status import OK, Metadata, Status
from slagate.router.legs.handoff import Handoff, Releaser
from slagate.router.legs.leg import LegSink
from slagate.router.legs.relay import Relay
from slagate.router.metrics import Metrics
from slagate.router.receipts.record import Prefilled, Record
from slagate.router.receipts.ring import ReceiptRing
from slagate.router.request.call import ClientCall
from slagate.router.request.errors import GatewayError, LegFailed
from slagate.router.request.metadata import PRIORITY
from slagate.router.request.request import Request
from slagate.router.request.running import RunningRequests
from slagate.router.request.settings import Settings
from slagate.router.scheduling.dispatcher import Dispatcher
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
class RequestServices:
    """What all requests of one gateway process share: the parts of the gateway that they use."""

    dispatcher: Dispatcher
    settings: Settings
    metrics: Metrics
    receipts: ReceiptRing
    releaser: Releaser
    live: RunningRequests
    instance_id: str  # of the gateway process
    leg_numbers: Iterator[int]
    now_s: Callable[[], float]

    def next_leg_id(self) -> str:
        """A new request id for a call to a worker; no other call of this gateway has it."""
        return f"{self.instance_id}-{next(self.leg_numbers)}"


@dataclass(slots=True)
class ActiveRequest:
    """One request from its assignment on: its leases, its handoff, and its calls to the leased workers."""

    call: ClientCall
    gateway: RequestServices
    record: Record
    request: Request
    ask: RoutingRequest
    assignment: Assignment
    deadline_s: float  # on the gateway's clock
    handoff: Handoff | None = None
    preface: bytes = b""  # what the client is to get in front of the first token
    started_over: bool = False  # `start_over` was called once
    leg_started_s: float = 0.0

    def release_all(self) -> None:
        """Release its leases and its handoff. Idempotent, never waits."""
        if self.handoff is not None:
            self.handoff.release()
        self.assignment.release()

    async def call_worker(self, lease: Lease, leg: bytes, sink: LegSink) -> GatewayError | None:
        """Send the serialised request `leg` to the leased worker; returns why it failed, or None.

        It waits for the end of the call, and cancels the call when it is cancelled. Every call becomes an
        attempt in the record.
        """
        record, stage, member = self.record, sink.stage, lease.member
        assert member.worker is not None, member
        self.leg_started_s = now_s = self.gateway.now_s()
        try:
            if not member.is_up:
                # Leased when it was; a leg to it now would be waited for until the deadline.
                sink.worker_lost(member.reason)
            else:
                limit_s = max(self.deadline_s - now_s, 0.0) + LEG_SLACK_S
                metadata = self._leg_metadata(lease, stage)
                leg_call = member.worker.generate(leg, metadata, sink, timeout_s=limit_s)
                member.legs.add(sink)
                sink.started(leg_call)
                try:
                    await sink.completed()
                    if not sink.has_ended and sink.failure() is None:
                        # The status behind the terminal event changes nothing: not waited for long.
                        await sink.ended(TRAILER_LIMIT_S)
                finally:
                    member.legs.discard(sink)
                    sink.detach()
                    if not sink.has_ended:
                        leg_call.cancel()
        except asyncio.CancelledError:
            record.attempt(stage, GIVEN_UP)
            raise
        finally:
            if sink.may_have_parked:
                self.gateway.releaser.abort(sink.leg_id, member)
        failure = sink.failure()
        record.attempt(stage, OK if failure is None else failure.status())
        if sink.untaken:
            member.probe_failed(f"refused a request: {failure}")
        return failure

    def prefilled(self, lease: Lease, done_s: float | None, cached_tokens: int | None) -> None:
        """Record for the feedback when a prefill was done and what was cached (None: not known)."""
        record = self.record
        record.cached_tokens = cached_tokens
        if cached_tokens is not None and record.decision is not None:
            seconds = None if done_s is None else done_s - self.leg_started_s
            choice, joined_s = record.decision.stages[0], lease.held.joined_s
            record.prefilled += (Prefilled(choice, cached_tokens, seconds, joined_s),)

    def relay(self, stage: Stage, leg_id: str, *, on_token: Callable[[], None]) -> Relay:
        """The sink of a leg whose output the client gets."""
        return Relay(
            stage,
            self.call.out,
            leg_id=leg_id,
            client_id=self.request.id,
            stats=self.record.stats,
            max_buffer_bytes=self.gateway.settings.max_buffer_bytes,
            stuck_s=self.gateway.settings.stuck_s,
            now_s=self.gateway.now_s,
            on_token=on_token,
            on_answered=self.call.running.answered,
            preface=self.preface,
        )

    def added_budget(self) -> int | None:
        """The output budget, in tokens, to append to a leg; None: the client gave its own."""
        return self.record.max_tokens if self.request.max_tokens is None else None

    def _leg_metadata(self, lease: Lease, stage: Stage) -> Metadata:
        metadata = [item for item in self.call.metadata if item[0] in FORWARDED_KEYS]
        member = lease.member
        if lease.rank is not None:
            key = DECODE_RANK if stage is Stage.DECODE else TARGET_RANK
            metadata.append((key, str(lease.rank)))
        priority = self.assignment.decision.ask.sla.priority
        if priority is not None:
            model = member.models.get(self.request.model)
            # TensorRT-LLM fails the whole request over a priority that it does not support.
            if model and model.generation.supports_priority:
                metadata.append((PRIORITY, str(priority)))
        return metadata

    def begin_answer(self) -> None:
        """Note the first token of a decode worker that computes prompts of other requests too."""
        assert self.handoff is not None
        self.handoff.used()
        self.assignment.leases[Stage.DECODE].begin_answer()

    def hold_handoff(self, session: oe.KvSessionRef) -> None:
        """Take over the handoff that the prefill worker keeps parked, and release an earlier one."""
        if self.handoff is not None:
            self.handoff.release()
        holder = self.assignment.leases[Stage.PREFILL].member
        self.handoff = Handoff(session, holder, self.gateway.releaser)

    async def try_elsewhere(self, stage: Stage, failure: GatewayError) -> None:
        """Lease another worker for the stage, or behind a bypass for whichever stages it takes.

        Raises `failure` when that cannot help, or there is none.
        """
        may_retry = isinstance(failure, LegFailed) and failure.retryable
        if not may_retry or self.record.n_attempts(stage) >= self.gateway.settings.max_attempts:
            raise failure
        lease = self.assignment.leases[stage]
        lease.release()
        self.ask = replace(self.ask, excluded=self.ask.excluded | {lease.member.address})
        stages = None if self.assignment.decision.is_bypass else (stage,)
        self.assignment.adopt(await self._reassigned(lease.member, failure, stages))
        self.record.decision = self.assignment.decision
        self._note_retry(stage, failure)

    async def start_over(self, failure: LegFailed) -> None:
        """Assign prefill and decode anew. Raises `failure` if that cannot help, or was done before.

        It helps where a decode worker accepted a handoff and then lost it, as when the prefill worker is
        gone: the client has got nothing yet, and only the KV has to be made again.
        """
        lost = (
            failure.stage is Stage.DECODE
            and failure.code is grpc.StatusCode.UNAVAILABLE
            and not self.record.stats.n_messages
        )
        attempts = self.record.n_attempts(Stage.DECODE)
        if not lost or self.started_over or attempts >= self.gateway.settings.max_attempts:
            raise failure
        self.started_over = True
        self.release_all()
        lost_by = self.assignment.leases[Stage.DECODE].member
        stages = tuple(self.assignment.leases)
        self.assignment.adopt(await self._reassigned(lost_by, failure, stages))
        self.handoff = None
        self.record.decision = self.assignment.decision
        self._note_retry(Stage.PREFILL, failure)

    async def _reassigned(
        self, lost_by: Member, failure: GatewayError, stages: tuple[Stage, ...] | None
    ) -> Assignment:
        """Other workers for these stages, waited for like any, but as old as the request is.

        For all stages (None) it may be a decode worker alone. Raises `failure`.
        """
        dispatcher, started_s = self.gateway.dispatcher, self.gateway.now_s()
        # What it was decided by does not change any more, whatever a reload says its class means.
        leases, later_s = self.assignment.leases, 0.0
        stays = [] if stages is None else [leases[of].member for of in leases if of not in stages]
        if stays and stages == (Stage.PREFILL,):
            taker = self.assignment.decision.stage(Stage.DECODE)
            assert taker.row is not None
            later_s = taker.won.first_response_s(taker.row)
        ask = replace(
            self.ask,
            sla=replace(self.record.sla, is_final=True),
            # Where the other leg's worker stays, its KV does too, or it has room for this request's.
            partner=stays[0].pair if stays else None,
            later_s=later_s,
        )
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
