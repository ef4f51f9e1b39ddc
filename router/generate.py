"""One request, top to bottom.

    parse, SLA ──▶ decide, take leases ──▶ prefill leg ──▶ handoff guard ──▶ decode leg, relayed
    ──▶ outcome, receipt, metrics; leases and handoff let go, however the request ends

Clean-up never waits: a cancelled request gives its leases back and cancels its leg at once, and a parked
handoff is freed by a task that outlives it. How a leg is called, tried elsewhere and started over is in
`legs/attempts.py`.
"""

import asyncio
import logging

from slagate.pools.grid.grid import Stage
from slagate.proto.rpc.status import OK, Status
from slagate.router.legs.attempts import ActiveRequest, Gateway
from slagate.router.legs.handoff import Handoff, PrefillSink, guard
from slagate.router.legs.relay import Relay
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


async def generate(call: ClientCall, gateway: Gateway) -> None:
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


async def _serve(call: ClientCall, gateway: Gateway, record: Record, deadline_s: float) -> None:
    record.sla = sla = parse_sla(call.metadata, receipts=gateway.settings.client_receipts)
    request = parse_request(call.data, max_bytes=gateway.settings.max_request_bytes)
    record.request_id = request.id
    ask = RoutingRequest(request.model, request.isl_tokens, sla)
    gateway.live.add(call.peer, request.id, call.running)
    try:
        assignment = await _assigned(gateway, record, ask, request)
        turn = ActiveRequest(call, gateway, record, request, ask, assignment, deadline_s)
        try:
            infos = [member.models.get(request.model) for member in assignment.members]
            record.max_tokens = output_budget(request, infos)
            if Stage.AGG in assignment.stages:
                await _aggregate(turn)
            else:
                await _disaggregate(turn)
        finally:
            turn.let_go()
    finally:
        gateway.live.remove(call.peer, request.id, call.running)


async def _assigned(
    gateway: Gateway, record: Record, ask: RoutingRequest, request: Request
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


async def _disaggregate(turn: ActiveRequest) -> None:
    """Prefill, then decode; once more from the start where the handoff was lost before a token."""
    while (handoff := await _prefill(turn)) is not None:
        try:
            await _decode(turn, handoff)
        except LegFailed as failure:
            await turn.start_over(failure)
        else:
            return


async def _prefill(turn: ActiveRequest) -> Handoff | None:
    """The context-only leg. None: its first token ended the request, and the client has it."""
    request = turn.request

    def leg(leg_id: str) -> tuple[bytes, PrefillSink]:
        data = prefill_leg(request.data, leg_id, min_tokens=request.min_tokens)
        return data, PrefillSink(leg_id, turn.park, only_token=request.max_tokens == 1)

    sink = await turn.leg(Stage.PREFILL, leg)
    turn.preface = sink.preface
    lease = turn.assignment.lease(Stage.PREFILL)
    lease.prefill_done()
    lease.release()
    turn.learn_prefill(Stage.PREFILL, sink.cached_tokens)
    if turn.handoff is None:
        splice = turn.splice(Stage.PREFILL, sink.leg_id, on_token=lease.prefill_done)
        for message in sink.answer:
            splice.message(message)
        if failure := splice.failure():
            raise failure
    return turn.handoff


async def _decode(turn: ActiveRequest, handoff: Handoff) -> None:
    """The generation-only leg, relayed to the client."""

    def leg(leg_id: str) -> tuple[bytes, Relay]:
        guard(handoff.session, turn.assignment.lease(Stage.DECODE).member)
        data = decode_leg(
            turn.request.data, leg_id, session=handoff.session, max_tokens=turn.added_budget()
        )
        return data, turn.splice(Stage.DECODE, leg_id, on_token=handoff.used)

    await turn.leg(Stage.DECODE, leg)
    handoff.used()
    turn.learn_itl(Stage.DECODE)


async def _aggregate(turn: ActiveRequest) -> None:
    """The one leg of an aggregated pool, relayed to the client."""

    def leg(leg_id: str) -> tuple[bytes, Relay]:
        done = turn.assignment.lease(Stage.AGG).prefill_done
        data = agg_leg(turn.request.data, leg_id, max_tokens=turn.added_budget())
        return data, turn.splice(Stage.AGG, leg_id, on_token=done)

    await turn.leg(Stage.AGG, leg)
    turn.learn_prefill(Stage.AGG, turn.record.tally.cached_tokens)
    turn.learn_itl(Stage.AGG)


def _finish(
    call: ClientCall, gateway: Gateway, record: Record, outcome: Outcome, status: Status
) -> None:
    """Everything a request leaves behind. Never waits."""
    now_s = gateway.now_s()
    stamp = gateway.receipts.add_receipt(record, outcome, now_s)
    if record.sla.receipt:
        receipt = record.trailer(outcome, now_s, stamp)
        trailer = (RECEIPT_TRAILER, receipt.SerializeToString())
        status = status._replace(trailers=(*status.trailers, trailer))
    call.out.finish(status)
    gateway.metrics.measure(record, outcome)
    note(
        log,
        "request.done",
        {
            "request_id": record.request_id,
            "outcome": outcome.value,
            "workers": [attempt.choice.worker for attempt in record.attempts],
            "ttft_s": record.ttft_s,
            "itl_s": record.itl_s,
            "total_s": now_s - record.started_s,
            "output_tokens": record.tally.n_tokens,
        },
    )
