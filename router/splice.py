"""Stream to stream: what a worker's leg sends, passed on to the client, with an eye on it.

The bytes are relayed as they are plus the client's own request id; accounting only peeks. Nothing here
waits: a worker's events go straight into the client's buffer, and the request's coroutine sleeps until
the leg has ended.
"""

from collections.abc import Callable

import msgspec

from slagate.pools.member import Stage
from slagate.proto import openengine_pb2 as oe
from slagate.router.errors import ErrorRelayed, SlowClient
from slagate.router.leg import LegSink
from slagate.router.peek import TOKEN_TAG, plain_tokens
from slagate.router.valve import Valve
from slagate.workers.errors import scrub
from slagate.workers.legs import client_id_suffix
from slagate.workers.stream import Outlet
from slagate.workers.worker import Call


class Tally(msgspec.Struct, gc=False):
    """What was sent to the client, and when (seconds on the gateway's clock)."""

    n_messages: int = 0
    n_tokens: int = 0
    first_token_s: float | None = None
    last_token_s: float | None = None
    cached_tokens: int | None = None  # of the prompt; None: the engine does not say

    def tokens(self, n_tokens: int, now_s: float) -> None:
        """Count tokens that were just passed on."""
        self.n_tokens += n_tokens
        self.last_token_s = now_s
        if self.first_token_s is None:
            self.first_token_s = now_s


class Splice(LegSink):
    """The sink of a leg whose output the client gets.

    Before the first relayed message a worker's error is held back, so that it can be answered with a gRPC
    status, or the leg tried elsewhere; after it the error event itself is relayed. `preface`, a message of
    an earlier leg, goes in front of that first one.
    """

    def __init__(
        self,
        stage: Stage,
        client: Outlet,
        *,
        leg_id: str,
        client_id: str,
        tally: Tally,
        max_buffer_bytes: int,
        stuck_s: float,
        now_s: Callable[[], float],
        on_token: Callable[[], None],
        on_answered: Callable[[], None],
        preface: bytes = b"",
    ) -> None:
        super().__init__(stage, leg_id)
        self._client = client
        id_of_leg = client_id_suffix(leg_id)
        self._head = id_of_leg + TOKEN_TAG
        self._event_at = len(id_of_leg)
        self._is_flowing = False  # a token was passed on
        self._suffix = client_id_suffix(client_id)
        self._tally = tally
        self._max_buffer_bytes = max_buffer_bytes
        self._stuck_s = stuck_s
        self._call: Call | None = None
        self._valve: Valve | None = None  # once it was needed
        self._is_shut_here = (
            False  # by the batch that is being taken, the rest of which is taken too
        )
        self._now_s = now_s
        self._on_token = on_token
        self._on_answered = on_answered
        self._preface = preface

    def message(self, data: bytes, /) -> None:
        """As `Sink.message`."""
        self.batch([data])

    def batch(self, messages: list[bytes], /) -> None:
        """As `StreamSink.batch`. Nearly all are one token event and nothing else."""
        self._is_shut_here = False
        at = 0
        while at < len(messages):
            at += self._flow(messages[at:] if at else messages)
            if at < len(messages):
                super().message(messages[at])
                at += 1

    def _flow(self, messages: list[bytes]) -> int:
        """Pass token events on, up to the first message that is something else; how many it were."""
        if self.is_complete or self._preface:
            return 0
        head, event_at, suffix = self._head, self._event_at, self._suffix
        room_bytes = self._max_buffer_bytes - self._client.n_bytes
        found: list[bytes] = []
        n_tokens = 0
        for data in messages:
            if not data.startswith(head):
                break
            n_plain = plain_tokens(data, event_at)
            room_bytes -= len(data)
            if n_plain < 0 or room_bytes < 0:
                break
            n_tokens += n_plain
            found.append(data + suffix)
        if found:
            self._tally.n_messages += len(found)
            self._tally.tokens(n_tokens, self._now_s())
            self._client.batch(found)
            if not self._is_flowing:
                self._is_flowing = self._heard = self._committed = True
                self._on_token()
        return len(found)

    def take(self, response: oe.GenerateResponse, data: bytes) -> None:
        """Pass one response on."""
        event = response.WhichOneof("event")
        if event == "error":
            self._error(response.error, data)
        elif event in ("token", "finished", "prompt") and self._relay(data):
            if event == "token":
                self._tally.tokens(len(response.token.tokens), self._now_s())
                self._on_token()
                self._is_flowing = True
            elif event == "finished":
                self._finish()
            if response.HasField("usage") and response.usage.HasField("cached_prompt_tokens"):
                self._tally.cached_tokens = response.usage.cached_prompt_tokens

    def _error(self, error: oe.EngineError, data: bytes) -> None:
        if not self._tally.n_messages:
            self._fail_by(error)
            return
        message = scrub(error.message)
        # The appended message replaces the worker's: the last value of a field wins.
        scrubbed = oe.GenerateResponse(error=oe.EngineError(message=message))
        if self._relay(data + scrubbed.SerializeToString()):
            self._failure = ErrorRelayed(f"{self.stage.value}: {message}")
            self._finish()

    def _relay(self, data: bytes) -> bool:
        """False: the client's buffer is full, and its stream is over."""
        # What does not fit is the last for now: one message may be larger than the buffer.
        n_bytes = self._client.n_bytes
        if n_bytes and n_bytes + len(data) > self._max_buffer_bytes and not self._held_up():
            self._too_slow()
            return False
        self._committed = True
        if self._preface:
            self._pass_on(self._preface)
            self._preface = b""
        self._pass_on(data)
        return True

    def _too_slow(self) -> None:
        if self._terminal or self._failure is not None:
            return
        waiting = self._client.n_bytes
        self._failure = SlowClient(f"the client reads too slowly: {waiting} bytes wait for it")
        self._client.discard()
        self._completed()

    def _finish(self) -> None:
        self._on_answered()
        super()._finish()

    def started(self, call: Call, /) -> None:
        """As `LegSink.started`."""
        self._call = call

    def over(self) -> None:
        """As `LegSink.over`."""
        self._call = None
        if self._valve is not None:
            # Which knows this one, too.
            self._valve.close()
            self._valve = None

    def _held_up(self) -> bool:
        """Have the worker wait for the client; false: it does already, or cannot."""
        if self._call is None:
            return False
        if self._valve is None:
            self._valve = Valve(
                self._client, self._call, limit_s=self._stuck_s, stuck=self._too_slow
            )
        self._is_shut_here = self._is_shut_here or self._valve.shut()
        return self._is_shut_here

    def _pass_on(self, data: bytes) -> None:
        self._tally.n_messages += 1
        self._client.message(data + self._suffix)
