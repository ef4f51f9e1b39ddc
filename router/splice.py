"""Stream to stream: what a worker's leg sends, passed on to the client, with an eye on it.

The bytes are relayed as they are plus the client's own request id; accounting only peeks. Nothing here
waits: a worker's events go straight into the client's buffer, and the request's coroutine sleeps until
the leg has ended.
"""

from collections.abc import Callable

import anyio
import grpc
from google.protobuf.message import DecodeError

from slagate.pools.member import Stage
from slagate.proto import openengine_pb2 as oe
from slagate.router.errors import ErrorRelayed, LegFailed, RequestError, SlowClient
from slagate.workers.errors import scrub, status_of_engine_error
from slagate.workers.legs import client_id_suffix
from slagate.workers.stream import BufferedSink
from slagate.workers.worker import Status


class Tally:
    """What was sent to the client, and when (seconds on the gateway's clock)."""

    def __init__(self) -> None:
        self.n_messages = 0
        self.n_tokens = 0
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.usage: oe.Usage | None = None

    def tokens(self, n_tokens: int, now_s: float) -> None:
        """Count tokens that were just passed on."""
        self.n_tokens += n_tokens
        self.last_token_s = now_s
        if self.first_token_s is None:
            self.first_token_s = now_s


class Splice:
    """The sink of a leg whose output the client gets.

    `await ended.wait()`, then `failure()` says how it went. Before the first relayed message a worker's
    error is held back, so that it can be answered with a gRPC status, or the leg tried elsewhere; after
    it the error event itself is relayed.
    """

    def __init__(
        self,
        stage: Stage,
        client: BufferedSink,
        *,
        leg_id: str,
        client_id: str,
        tally: Tally,
        max_buffer_bytes: int,
        now_s: Callable[[], float],
        on_token: Callable[[], None],
    ) -> None:
        self.ended = anyio.Event()
        self._stage = stage
        self._client = client
        self._leg_id = leg_id
        self._suffix = client_id_suffix(client_id)
        self._tally = tally
        self._max_buffer_bytes = max_buffer_bytes
        self._now_s = now_s
        self._on_token = on_token
        self._accepted = False
        self._terminal = False
        self._failure: RequestError | None = None

    def message(self, data: bytes, /) -> None:
        """Pass one response on."""
        if self._failure is not None:
            return
        try:
            response = oe.GenerateResponse.FromString(data)
        except DecodeError:
            self._fail(Status(grpc.StatusCode.UNAVAILABLE, "sent a response that cannot be read"))
            return
        self._accepted = True
        if response.request_id != self._leg_id:
            self._fail(Status(grpc.StatusCode.UNAVAILABLE, "answered with another request's id"))
            return
        event = response.WhichOneof("event")
        if event == "error":
            self._error(response, data)
        elif event in ("token", "finished", "prompt") and self._relay(data):
            if event == "token":
                self._tally.tokens(len(response.token.tokens), self._now_s())
                self._on_token()
            elif event == "finished":
                self._terminal = True
            if response.HasField("usage"):
                self._tally.usage = response.usage

    def end(self, status: Status, /) -> None:
        """Take the end of the leg."""
        # A status after the terminal event changes nothing: the client has its whole answer.
        if not self._terminal and self._failure is None:
            if status.code is grpc.StatusCode.OK:
                self._fail(Status(grpc.StatusCode.UNAVAILABLE, "ended without a terminal event"))
            else:
                self._fail(Status(status.code, scrub(status.message)))
        self.ended.set()

    def failure(self) -> RequestError | None:
        """Why the client has no complete answer; None when it has one."""
        return self._failure

    def _error(self, response: oe.GenerateResponse, data: bytes) -> None:
        self._terminal = True
        if self._tally.n_messages:
            message = scrub(response.error.message)
            # The appended message replaces the worker's: the last value of a field wins.
            scrubbed = oe.GenerateResponse(error=oe.EngineError(message=message))
            if self._relay(data + scrubbed.SerializeToString()):
                self._failure = ErrorRelayed(f"{self._stage.value}: {message}")
            self.relayed_error = response.error
        else:
            status = status_of_engine_error(response.error)
            self._fail(Status(status.code, scrub(status.message)))

    def _relay(self, data: bytes) -> bool:
        """False: the client's buffer is full, and its stream is over."""
        if self._client.n_bytes + len(data) > self._max_buffer_bytes:
            waiting = self._client.n_bytes
            self._failure = SlowClient(f"the client reads too slowly: {waiting} bytes wait for it")
            self._client.discard()
            self.ended.set()
            return False
        self._tally.n_messages += 1
        self._client.message(data + self._suffix)
        return True

    def _fail(self, status: Status) -> None:
        self._failure = LegFailed(self._stage, status, accepted=self._accepted)
        self.ended.set()
