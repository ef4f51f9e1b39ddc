"""One request, top to bottom.

    parse, SLA ──▶ decide, take leases ──▶ prefill leg ──▶ handoff check ──▶ decode leg, relayed
    ──▶ outcome, receipt, metrics, what it teaches; leases and handoff released, however the request ends

Each leg is a loop over attempts: a worker is called, and where it fails another one is tried while that can
help. Clean-up never waits: a cancelled request gives its leases back and cancels its leg at once, and a
parked handoff is freed by a task that outlives the request.
"""

import asyncio
import logging

from slagate.pools.grid.grid import Stage
from slagate.proto.rpc.status import OK, Status
from slagate.router.legs.active_request import ActiveRequest, RequestServices
from slagate.router.legs.handoff import Handoff, PrefillSink, check_handoff
from slagate.router.receipts.feedback import update_estimators
from slagate.router.receipts.record import Record
from slagate.router.request.call import ClientCall
from slagate.router.request.errors import (
    CANCELLED,
    INTERNAL,
    DeadlineExceeded,
    GatewayError,
    LegFailed,
    Outcome,
)
from slagate.router.request.metadata import RECEIPT_TRAILER
from slagate.router.request.request import Request, check_length, output_budget, parse_request
from slagate.router.request.running import CancelHandle
from slagate.router.request.sla import parse_sla
from slagate.router.scheduling.score import RoutingRequest
from slagate.router.scheduling.wait_queue import Assignment
from slagate.workers.legs import agg_leg, decode_leg, prefill_leg
from slagate.workers.runtime.logs import note

log = logging.getLogger(__name__)


async def generate(call: ClientCall, gateway: RequestServices) -> None:
    """Serve one request; `call.out` is always ended, and exactly one outcome is recorded."""
    record = Record(gateway.now_s())
    outcome, status = Outcome.INTERNAL, INTERNAL
    limit_s = gateway.settings.default_timeout_s if call.timeout_s is None else call.timeout_s
    deadline_s = record.started_s + limit_s
    timer = asyncio.get_running_loop().call_later(limit_s, _too_late, call.running, limit_s)
    try:
        call.running.start()
        if call.refusal is not None:
            raise call.refusal
        if limit_s <= 0.0:
            raise DeadlineExceeded("the deadline had passed when the request came")
        await _serve(call, gateway, record, deadline_s)
        outcome, status = Outcome.COMPLETED, OK
    except GatewayError as error:
        outcome, status = error.outcome, error.status()
    except asyncio.CancelledError:
        ended_by = call.running.absorb()
        if ended_by is None:
            is_late = call.timeout_s is not None and gateway.now_s() >= deadline_s - _slack_s(
                limit_s
            )
            outcome, status = Outcome.DEADLINE if is_late else Outcome.CANCELLED, CANCELLED
            raise
        outcome, status = ended_by.outcome, ended_by.status()
    except Exception:
        log.exception("request.bug", extra={"request_id": record.request_id})
    finally:
        timer.cancel()
        call.running.finish()
        _finish(call, gateway, record, outcome, status)


def _too_late(running: CancelHandle, limit_s: float) -> None:
    running.cancel(DeadlineExceeded(f"the limit of {limit_s:.3f} s has passed"))


def _slack_s(limit_s: float) -> float:
    """How long before a client's deadline its cancellation is that deadline.

    Its clock ran ahead of ours by the transit, and gRPC rounds a deadline up on the wire by as much as
    one in a hundred.
    """
    return max(min(0.25, 0.1 * limit_s), 0.01 * limit_s)


async def _serve(
    call: ClientCall, gateway: RequestServices, record: Record, deadline_s: float
) -> None:
    record.sla = sla = parse_sla(call.metadata, receipts=gateway.settings.client_receipts)
    request = parse_request(call.data, max_bytes=gateway.settings.max_request_bytes)
    record.request_id = request.id
    ask = RoutingRequest(request.model, request.isl_tokens, sla, max_tokens=request.max_tokens)
    gateway.live.register(call.peer, request.id, call.running)
    try:
        assignment = await _assigned(gateway, record, ask, request)
        active = ActiveRequest(call, gateway, record, request, ask, assignment, deadline_s)
        try:
            infos = [member.models.get(request.model) for member in assignment.members]
            record.max_tokens = output_budget(request, infos)
            if Stage.AGG not in assignment.leases or not await _aggregate(active):
                await _disaggregate(active)
        finally:
            active.release_all()
    finally:
        gateway.live.unregister(call.peer, request.id, call.running)


async def _assigned(
    gateway: RequestServices, record: Record, ask: RoutingRequest, request: Request
) -> Assignment:
    """Workers for every stage, waited for where all are at their limits."""
    # Before it waits, and holds up others, for what no worker could ever do.
    check_length(request, gateway.dispatcher.fleet.context_window(request.model))
    started_s = gateway.now_s()
    with gateway.dispatcher.submit(ask, request.prompt) as ticket:
        try:
            return await ticket.assigned()
        finally:
            record.decision = ticket.decision
            record.sla = ticket.decision.ask.sla  # with the defaults of its class
            record.waited_s = gateway.now_s() - started_s


async def _disaggregate(active: ActiveRequest) -> None:
    """Prefill, then decode; once more from the start where the handoff was lost before a token."""
    while (handoff := await _prefill(active)) is not None:
        try:
            await _decode(active, handoff)
        except LegFailed as failure:
            await active.start_over(failure)
        else:
            return


async def _prefill(active: ActiveRequest) -> Handoff | None:
    """The context-only leg, with other workers while they can help; None: a first token was all."""
    gateway, request = active.gateway, active.request
    while True:
        lease, leg_id = active.assignment.leases[Stage.PREFILL], gateway.next_leg_id()
        sink = PrefillSink(leg_id, active.hold_handoff, only_token=request.max_tokens == 1)
        leg = prefill_leg(request.data, leg_id, min_tokens=request.min_tokens)
        failure = await active.call_worker(lease, leg, sink)
        if failure is None:
            break
        await active.try_elsewhere(Stage.PREFILL, failure)
    active.preface = sink.preface
    lease.prefill_done()
    lease.release()
    active.prefilled(lease, gateway.now_s(), sink.cached_tokens)
    if active.handoff is None:
        relay = active.relay(Stage.PREFILL, leg_id, on_token=lease.prefill_done)
        for message in sink.answer:
            relay.message(message)
        if failure := relay.failure():
            raise failure
    return active.handoff


async def _decode(active: ActiveRequest, handoff: Handoff) -> None:
    """The generation-only leg, relayed to the client; on another worker while that can help."""
    request, budget = active.request, active.added_budget()
    may_stall = active.gateway.dispatcher.fleet.bypasses
    while True:
        lease, leg_id = active.assignment.leases[Stage.DECODE], active.gateway.next_leg_id()
        check_handoff(handoff.session, lease.member)
        on_token = active.begin_answer if may_stall else handoff.used
        relay = active.relay(Stage.DECODE, leg_id, on_token=on_token)
        leg = decode_leg(request.data, leg_id, session=handoff.session, max_tokens=budget)
        failure = await active.call_worker(lease, leg, relay)
        if failure is None:
            break
        await active.try_elsewhere(Stage.DECODE, failure)
    handoff.used()
    active.record.decode_started_s = active.leg_started_s
    active.record.decoded = True
    if may_stall:
        lease.release()
        active.record.stalled_s = lease.held.stalled_s


async def _aggregate(active: ActiveRequest) -> bool:
    """The one leg of an aggregated or bypassing request, relayed; on another worker while that can help.

    False: no worker has served it alone, and those of prefill and decode are to.
    """
    request, record, budget = active.request, active.record, active.added_budget()
    while True:
        lease, leg_id = active.assignment.leases[Stage.AGG], active.gateway.next_leg_id()
        relay = active.relay(Stage.AGG, leg_id, on_token=lease.prefill_done)
        to_decode = lease.member.stage is Stage.DECODE
        leg = agg_leg(request.data, leg_id, max_tokens=budget, to_decode=to_decode)
        failure = await active.call_worker(lease, leg, relay)
        if failure is None:
            break
        await active.try_elsewhere(Stage.AGG, failure)
        if Stage.AGG not in active.assignment.leases:
            return False
    active.prefilled(lease, record.stats.first_token_s, record.stats.cached_tokens)
    lease.release()
    record.stalled_s = lease.held.stalled_s
    record.decoded = True
    return True


def _finish(
    call: ClientCall, gateway: RequestServices, record: Record, outcome: Outcome, status: Status
) -> None:
    """Everything a request leaves behind. Never waits."""
    now_s = gateway.now_s()
    number = gateway.receipts.add_receipt(record, outcome, now_s)
    if record.sla.receipt:
        receipt = record.trailer(outcome, now_s, number)
        trailer = (RECEIPT_TRAILER, receipt.SerializeToString())
        status = status._replace(trailers=(*status.trailers, trailer))
    call.out.finish(status)
    latencies = record.latencies()
    gateway.metrics.measure(record, outcome, latencies)
    note(
        log,
        "request.done",
        {
            "request_id": record.request_id,
            "outcome": outcome.value,
            "workers": [attempt.choice.worker for attempt in record.attempts],
            "ttft_s": latencies.ttft_s,
            "itl_s": latencies.itl_s,
            "total_s": now_s - record.started_s,
            "output_tokens": record.stats.n_tokens,
        },
    )
    update_estimators(record, latencies.itl_s, gateway.dispatcher.fleet)
