"""What every leg has in common: one call to a worker, read until it has ended or failed."""

import asyncio
from abc import abstractmethod

import grpc
from google.protobuf.message import DecodeError
from typing_extensions import override

from slagate.pools.grid.grid import Stage
from slagate.proto import openengine_pb2 as oe
from slagate.proto.rpc.sinks import Call, StreamSink
from slagate.proto.rpc.status import Status
from slagate.router.request.errors import GatewayError, LegFailed
from slagate.workers.errors import scrub, status_of_engine_error

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE

RETRYABLE = frozenset({UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED})
"""A status after which another worker may do better; after any other it would say the same."""


class LegSink(StreamSink):
    """Takes what a worker sends on one leg. `await completed()`, then `failure()` says how it went.

    A leg is complete with the event that ends it well, with a failure, or with the end of the call,
    whichever comes first. What a worker sends after the event goes nowhere.

    A worker that breaks the protocol (cannot be read, another request's id, no terminal event) counts as
    unavailable: the request may be fine with another one.
    """

    def __init__(self, stage: Stage, leg_id: str) -> None:
        self.is_complete = False
        self.has_ended = False  # the call
        self._waiter: asyncio.Future[None] | None = None
        self.stage = stage
        self.leg_id = leg_id
        # From here on a repetition might do something twice: tokens for the client, a pull of the handoff.
        self._committed = False
        self._heard = False
        self._lost = False
        self._terminal = False
        self._failure: GatewayError | None = None

    @abstractmethod
    def take_response(self, response: oe.GenerateResponse, data: bytes) -> None:
        """Take one response of this leg, parsed and as bytes; the one that ends it well calls `_finish`."""

    def failure(self) -> GatewayError | None:
        """Why the leg failed; None: it did not, or not yet."""
        return self._failure

    def started(self, call: Call, /) -> None:
        """Called with the leg's call once it has begun, for a sink that is to pause it."""
        return

    def detach(self) -> None:
        """Called when nobody waits for the leg any more; drops the call of `started`."""
        return

    @override
    def message(self, data: bytes, /) -> None:
        if self._terminal or self._failure is not None:
            return
        try:
            response = oe.GenerateResponse.FromString(data)
        except DecodeError:
            self._fail(Status(UNAVAILABLE, "sent a response that cannot be read"))
            return
        self._heard = True
        # Once a decode worker has accepted a handoff nobody else can be sure of it.
        self._committed = self._committed or self.stage is Stage.DECODE
        if response.request_id != self.leg_id:
            self._fail(Status(UNAVAILABLE, "answered with another request's id"))
            return
        self.take_response(response, data)

    @override
    def batch(self, messages: list[bytes], /) -> None:
        for data in messages:
            self.message(data)

    @override
    def finish(self, status: Status, /) -> None:
        """Take the end of the call. After the terminal event a status changes nothing."""
        if not self._terminal and self._failure is None:
            if status.code is grpc.StatusCode.OK:
                self._fail(Status(UNAVAILABLE, "ended without a terminal event"))
            else:
                self._fail(status)
        self.has_ended = True
        self._completed()

    async def completed(self) -> None:
        """Wait until the leg is complete. Only one coroutine may wait at a time, here or in `ended`."""
        if not self.is_complete:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    async def ended(self, limit_s: float) -> None:
        """Wait for the end of the call, at most `limit_s`."""
        if not self.has_ended:
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            timer = loop.call_later(limit_s, self._wake)
            try:
                await self._waiter
            finally:
                timer.cancel()

    def worker_lost(self, reason: str) -> None:
        """Fail the leg as its worker is out of service, unless a repetition might do something twice."""
        if not self._committed and not self._terminal and self._failure is None:
            self._lost = True
            self._fail(Status(UNAVAILABLE, f"is out of service: {reason}"))

    def drain_timed_out(self, reason: str) -> None:
        """Fail the leg, whatever was received: the worker has drained for too long."""
        if not self._terminal and self._failure is None:
            self._lost = True
            self._fail(Status(UNAVAILABLE, reason))

    @property
    def may_have_parked(self) -> bool:
        """Whether the worker may have parked KV for this leg whose handoff did not get to the gateway."""
        return False

    @property
    def untaken(self) -> bool:
        """Whether the leg failed with UNAVAILABLE before the worker had sent anything."""
        failure = self._failure
        unheard = not self._heard and not self._lost
        return failure is not None and failure.code is UNAVAILABLE and unheard

    def _finish(self) -> None:
        self._terminal = True
        self._completed()

    def _completed(self) -> None:
        if not self.is_complete or self.has_ended:
            self.is_complete = True
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, status: Status) -> None:
        self._give_up(status, helps=status.code in RETRYABLE)

    def _fail_by(self, error: oe.EngineError) -> None:
        status = status_of_engine_error(error)
        if self.stage is Stage.DECODE and error.code == oe.ERROR_CODE_KV_SESSION_NOT_FOUND:
            # Between our workers only: a client has no session that could be wrong.
            status = status._replace(code=UNAVAILABLE)
        self._give_up(status, helps=error.retryable)

    def _give_up(self, status: Status, *, helps: bool) -> None:
        scrubbed = Status(status.code, scrub(status.message))
        retryable = helps and not self._committed
        self._failure = LegFailed(self.stage, scrubbed, retryable=retryable)
        self._completed()
