"""One request, top to bottom.

    parse, SLA ──▶ assign (leases taken) ──▶ prefill leg ──▶ handoff guard ──▶ decode leg, relayed
    ──▶ outcome, receipt, metrics; leases and handoff let go, however the request ends

Clean-up never waits: a cancelled request gives its leases back and cancels its leg at once, and a parked
handoff is freed by a task that outlives it.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import anyio
import grpc

from slagate.pools.member import Member, Stage
from slagate.proto import openengine_pb2 as oe
from slagate.router.dispatch import Assignment, Dispatcher
from slagate.router.errors import (
    CANCELLED,
    INTERNAL,
    DeadlineExceeded,
    LegFailed,
    Outcome,
    RequestError,
)
from slagate.router.handoff import Handoff, PrefillSink, Releaser, guard
from slagate.router.leg import LegSink
from slagate.router.live import LiveRequests
from slagate.router.metrics import Metrics
from slagate.router.policy import Ask
from slagate.router.receipts import Record
from slagate.router.request import Request, output_budget, parse_request
from slagate.router.settings import Settings
from slagate.router.sla import PRIORITY, parse_sla
from slagate.router.splice import Splice
from slagate.workers.legs import agg_leg, decode_leg, prefill_leg
from slagate.workers.stream import BufferedSink
from slagate.workers.worker import OK, Metadata, Status

log = logging.getLogger(__name__)

RECEIPT_TRAILER = "slagate-receipt-bin"

FORWARDED_KEYS = ("traceparent", "tracestate")
"""Client metadata that a worker gets; everything else is the gateway's business, or nobody's."""

TRAILER_LIMIT_S = 1.0
"""How long a worker may take to close a call behind its terminal event."""


@dataclass(slots=True)
class ClientCall:
    """One Generate call as the front hands it over."""

    data: bytes
    metadata: Metadata
    peer: str  # who may abort it
    timeout_s: float | None  # what is left of the client's deadline
    out: BufferedSink  # what the front writes to the client


@dataclass(slots=True)
class Gateway:
    """What every request needs."""

    dispatcher: Dispatcher
    settings: Settings
    metrics: Metrics
    releaser: Releaser
    live: LiveRequests
    leg_id: Callable[[], str]
    now_s: Callable[[], float]


async def generate(call: ClientCall, gateway: Gateway) -> None:
    """Serve one request; `call.out` is always ended, and exactly one outcome is recorded."""
    record = Record(gateway.now_s())
    outcome, status = Outcome.INTERNAL, INTERNAL
    limit_s = gateway.settings.default_timeout_s if call.timeout_s is None else call.timeout_s
    deadline_s = record.started_s + limit_s
    try:
        with anyio.fail_after(limit_s):
            await _serve(call, gateway, record, deadline_s)
        outcome, status = Outcome.COMPLETED, OK
    except TimeoutError:
        late = DeadlineExceeded(f"the limit of {limit_s:.3f} s has passed")
        outcome, status = late.outcome, late.status()
    except RequestError as error:
        outcome, status = error.outcome, error.status()
    except anyio.get_cancelled_exc_class():
        is_late = call.timeout_s is not None and gateway.now_s() >= deadline_s - _slack_s(limit_s)
        outcome, status = Outcome.DEADLINE if is_late else Outcome.CANCELLED, CANCELLED
        raise
    except Exception:
        log.exception("request.bug", extra={"request_id": record.request_id})
    finally:
        _finish(call, gateway, record, outcome, status)


def _slack_s(limit_s: float) -> float:
    """How long before a client's deadline its cancellation is that deadline.

    Its clock ran ahead of ours by the transit, and gRPC rounds a deadline up on the wire by as much as
    one in a hundred.
    """
    return max(min(0.25, 0.1 * limit_s), 0.01 * limit_s)


async def _serve(call: ClientCall, gateway: Gateway, record: Record, deadline_s: float) -> None:
    record.sla = sla = parse_sla(call.metadata, receipts=gateway.settings.client_receipts)
    request = parse_request(call.data, max_bytes=gateway.settings.max_request_bytes)
    record.request_id = request.id
    ask = Ask(request.model, request.isl_tokens, sla)
    record.decision = gateway.dispatcher.decide(ask)
    assignment = gateway.dispatcher.take(record.decision)
    turn = _Turn(call, gateway, record, request, ask, assignment, deadline_s)
    try:
        infos = [member.models.get(request.model) for member in assignment.members]
        record.max_tokens = output_budget(request, infos)
        with gateway.live.listed(call.peer, request.id):
            if Stage.AGG in assignment.stages:
                await turn.aggregate()
            else:
                await turn.disaggregate()
    finally:
        turn.let_go()


_SinkT = TypeVar("_SinkT", bound=LegSink)


@dataclass(slots=True)
class _Turn:
    """The legs of one request, and what it holds: leases, and a handoff once there is one."""

    call: ClientCall
    gateway: Gateway
    record: Record
    request: Request
    ask: Ask
    assignment: Assignment
    deadline_s: float
    handoff: Handoff | None = None
    started_over: bool = False

    def let_go(self) -> None:
        """Give back whatever is still held. Idempotent, never waits."""
        if self.handoff is not None:
            self.handoff.release()
        self.assignment.release()

    async def disaggregate(self) -> None:
        """Prefill, then decode; once more from the start where the handoff was lost before a token."""
        while (handoff := await self.prefill()) is not None:
            try:
                await self.decode(handoff)
            except LegFailed as failure:
                self._start_over(failure)
            else:
                return

    async def prefill(self) -> Handoff | None:
        """The context-only leg. None: its first token ended the request, and the client has it."""

        def leg(leg_id: str) -> tuple[bytes, PrefillSink]:
            data = prefill_leg(self.request.data, leg_id, min_tokens=self.request.min_tokens)
            only_token = self.request.max_tokens == 1
            return data, PrefillSink(leg_id, self._park, only_token=only_token)

        sink = await self._leg(Stage.PREFILL, leg)
        self.record.cached_tokens = sink.cached_tokens
        lease = self.assignment.lease(Stage.PREFILL)
        lease.release()
        if self.handoff is None:
            splice = self._splice(Stage.PREFILL, sink.leg_id, on_token=lease.prefill_done)
            for message in sink.answer:
                splice.message(message)
            if failure := splice.failure():
                raise failure
        return self.handoff

    async def decode(self, handoff: Handoff) -> None:
        """The generation-only leg, relayed to the client."""

        def leg(leg_id: str) -> tuple[bytes, Splice]:
            guard(handoff.session, self.assignment.lease(Stage.DECODE).member)
            data = decode_leg(
                self.request.data,
                leg_id,
                session=handoff.session,
                max_tokens=self._added_budget(),
            )
            return data, self._splice(Stage.DECODE, leg_id, on_token=handoff.used)

        await self._leg(Stage.DECODE, leg)
        handoff.used()

    async def aggregate(self) -> None:
        """The one leg of an aggregated pool, relayed to the client."""

        def leg(leg_id: str) -> tuple[bytes, Splice]:
            done = self.assignment.lease(Stage.AGG).prefill_done
            data = agg_leg(self.request.data, leg_id, max_tokens=self._added_budget())
            return data, self._splice(Stage.AGG, leg_id, on_token=done)

        await self._leg(Stage.AGG, leg)
        usage = self.record.tally.usage
        if usage is not None and usage.HasField("cached_prompt_tokens"):
            self.record.cached_tokens = usage.cached_prompt_tokens

    async def _leg(self, stage: Stage, make: Callable[[str], tuple[bytes, _SinkT]]) -> _SinkT:
        """Call the stage's worker, and others while that can help; the sink of the call that went well."""
        while True:
            data, sink = make(self.gateway.leg_id())
            member = self.assignment.lease(stage).member
            try:
                await self._run(member, data, sink)
            finally:
                if sink.may_have_parked:
                    self.gateway.releaser.abort(sink.leg_id, member)
            failure = sink.failure()
            self.record.attempt(stage, OK if failure is None else failure.status())
            if failure is None:
                return sink
            if sink.untaken:
                member.probe_failed(f"refused a request: {failure}")
            self._try_elsewhere(stage, failure)

    async def _run(self, member: Member, leg: bytes, sink: LegSink) -> None:
        """One call to a worker, waited for; cancelled when this coroutine is."""
        assert member.worker is not None, member
        remaining_s = max(self.deadline_s - self.gateway.now_s(), 0.0)
        leg_call = member.worker.generate(
            leg, self._leg_metadata(member), sink, timeout_s=remaining_s
        )
        member.on_leave.add(sink.worker_lost)
        try:
            await sink.complete.wait()
            if sink.failure() is None:
                # The status behind the terminal event changes nothing, so it is not waited for long.
                with anyio.move_on_after(TRAILER_LIMIT_S):
                    await sink.ended.wait()
        finally:
            member.on_leave.discard(sink.worker_lost)
            leg_call.cancel()

    def _splice(self, stage: Stage, leg_id: str, *, on_token: Callable[[], None]) -> Splice:
        return Splice(
            stage,
            self.call.out,
            leg_id=leg_id,
            client_id=self.request.id,
            tally=self.record.tally,
            max_buffer_bytes=self.gateway.settings.max_buffer_bytes,
            now_s=self.gateway.now_s,
            on_token=on_token,
        )

    def _added_budget(self) -> int | None:
        return self.record.max_tokens if self.request.max_tokens is None else None

    def _leg_metadata(self, member: Member) -> Metadata:
        metadata = [item for item in self.call.metadata if item[0] in FORWARDED_KEYS]
        model = member.models.get(self.request.model)
        # TensorRT-LLM fails the whole request over a priority that it does not support.
        if self.ask.sla.priority is not None and model and model.generation.supports_priority:
            metadata.append((PRIORITY, str(self.ask.sla.priority)))
        return metadata

    def _park(self, session: oe.KvSessionRef) -> None:
        """The prefill worker holds KV for this request, from this moment on and until told otherwise."""
        if self.handoff is not None:
            self.handoff.release()
        holder = self.assignment.lease(Stage.PREFILL).member
        self.handoff = Handoff(session, holder, self.gateway.releaser)

    def _try_elsewhere(self, stage: Stage, failure: RequestError) -> None:
        """Give the stage to another worker. Raises `failure` when that cannot help, or nobody is left."""
        may_retry = isinstance(failure, LegFailed) and failure.retryable
        if not may_retry or self.record.n_attempts(stage) >= self.gateway.settings.max_attempts:
            raise failure
        failed = self.assignment.lease(stage).member.address
        self.ask = self.ask._replace(excluded=self.ask.excluded | {failed})
        choice = self.gateway.dispatcher.reassign(self.assignment, self.ask, stage)
        if choice is None:
            raise failure
        assert self.record.decision is not None
        self.record.decision = self.record.decision.replace(choice)
        self._note_retry(stage, failure)

    def _start_over(self, failure: LegFailed) -> None:
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
        try:
            decision = self.gateway.dispatcher.decide(self.ask)
            self.assignment = self.gateway.dispatcher.take(decision)
        except RequestError:
            raise failure from None
        self.handoff = None
        self.record.decision = decision
        self._note_retry(Stage.PREFILL, failure)

    def _note_retry(self, stage: Stage, failure: LegFailed | RequestError) -> None:
        self.gateway.metrics.retries.labels(stage=stage.value, code=failure.code.name).inc()
        about = {"request_id": self.record.request_id, "stage": stage.value}
        log.warning("request.retried", extra=about | {"reason": str(failure)})


def _finish(
    call: ClientCall, gateway: Gateway, record: Record, outcome: Outcome, status: Status
) -> None:
    """Everything a request leaves behind. Never waits."""
    now_s = gateway.now_s()
    if record.sla.receipt:
        trailer = (RECEIPT_TRAILER, record.receipt(outcome, now_s).SerializeToString())
        status = status._replace(trailers=(*status.trailers, trailer))
    call.out.end(status)
    gateway.metrics.measure(record, outcome)
    log.info(
        "request.done",
        extra={
            "request_id": record.request_id,
            "outcome": outcome.value,
            "workers": [attempt.worker for attempt in record.attempts],
            "ttft_s": record.ttft_s,
            "itl_s": record.itl_s,
            "total_s": now_s - record.started_s,
            "output_tokens": record.tally.n_tokens,
        },
    )
