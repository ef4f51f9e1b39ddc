"""The relay: what a worker's leg sends is passed on to the client, and counted.

The bytes are relayed as they are plus the client's own request id. Nothing here waits: a worker's events go
straight into the client's buffer, and the request's coroutine sleeps until the leg has ended.

Most responses of a stream are one small token event, and to parse it costs more than all else that is done
with it. `plain_tokens` counts the tokens in its bytes; what is anything else is parsed.
"""

import re
from collections.abc import Callable

from typing_extensions import override

from slagate.pools.grid.grid import Stage
from slagate.proto import openengine_pb2 as oe
from slagate.proto.rpc.sinks import Call, ResponseWriter
from slagate.router.legs.backpressure import Backpressure
from slagate.router.legs.leg import LegSink
from slagate.router.receipts.record import StreamStats
from slagate.router.request.errors import ErrorRelayed, SlowClient
from slagate.workers.errors import scrub
from slagate.workers.legs import client_id_suffix

TOKEN_TAG = b"\x1a"
"""Of `GenerateResponse.token`: field 3, length-delimited."""

_ID = (
    rb"\x12(?:\x02\x08[\x00-\x7f]|\x03\x08[\x80-\xff][\x00-\x7f]|\x04\x08[\x80-\xff]{2}[\x00-\x7f]"
    rb"|\x05\x08[\x80-\xff]{3}[\x00-\x7f]|\x06\x08[\x80-\xff]{4}[\x00-\x7f])"
)
"""TokenOutput.tokens, field 2: a `TokenInfo` with an id, field 1, of up to five bytes, and nothing else."""

_beginning = re.compile(
    rb"\x1a[\x00-\x7f](?:\x08[\x00-\x7f])?"  # the event; TokenOutput.output_index, field 1
    rb"((?:" + _ID + rb")*)"
    rb"(?:\x1a[\x00-\x7f])?",  # TokenOutput.text, field 3
    re.DOTALL,
).match
_ids = re.compile(_ID, re.DOTALL).findall

_TWO_IDS_BYTES = 8
"""Of the shortest two ids; the longest one has as many."""


def plain_tokens(data: bytes, at: int) -> int:
    """Tokens in a serialised `GenerateResponse` that is one token event from `at` to its end.

    -1 where it may be something else: another field, one of 128 bytes and more, another order of fields.

    >>> from slagate.proto import openengine_pb2 as oe
    >>> response = oe.GenerateResponse(token={"tokens": [{"token_id": 7}, {"token_id": 300}]})
    >>> plain_tokens(response.SerializeToString(), 0)
    2
    >>> response.usage.cached_prompt_tokens = 3
    >>> plain_tokens(response.SerializeToString(), 0)
    -1
    """
    # First of all its size, of which there is but one byte: a large message is not looked through.
    if len(data) < at + 2 or data[at + 1] != len(data) - at - 2:
        return -1
    found = _beginning(data, at)
    if found is None:
        return -1
    ids_at, ids_end = found.span(1)
    end = found.end()
    if end == ids_end:
        if end != len(data):
            return -1
    # What is not ASCII may be no UTF-8, which is for the parser to refuse.
    elif data[end - 1] != len(data) - end or not data[end:].isascii():
        return -1
    n_bytes = ids_end - ids_at
    if n_bytes < _TWO_IDS_BYTES:
        return 1 if n_bytes else 0
    return len(_ids(data, ids_at, ids_end))


class Relay(LegSink):
    """The sink of a leg whose output the client gets.

    Before the first relayed message a worker's error is held back, so that the client can get a gRPC status
    for it, or the leg can be tried elsewhere; later the error event itself is relayed. `preface`, a message
    of an earlier leg, goes in front of that first one. `on_token` is called with the first token and maybe
    with later ones, `on_answered` when the whole answer was passed on.
    """

    def __init__(
        self,
        stage: Stage,
        client: ResponseWriter,
        *,
        leg_id: str,
        client_id: str,
        stats: StreamStats,
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
        self._stats = stats
        self._max_buffer_bytes = max_buffer_bytes
        self._stuck_s = stuck_s
        self._call: Call | None = None
        self._backpressure: Backpressure | None = None  # once it was needed
        # By the batch that is being taken, the rest of which is taken too.
        self._is_shut_here = False
        self._now_s = now_s
        self._on_token = on_token
        self._on_answered = on_answered
        self._preface = preface

    @override
    def message(self, data: bytes, /) -> None:
        self.batch([data])

    @override
    def batch(self, messages: list[bytes], /) -> None:
        """Pass responses on; nearly all are one token event and nothing else."""
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
            self._stats.n_messages += len(found)
            self._stats.count_tokens(n_tokens, self._now_s())
            self._client.batch(found)
            if not self._is_flowing:
                self._is_flowing = self._heard = self._committed = True
                self._on_token()
        return len(found)

    @override
    def take_response(self, response: oe.GenerateResponse, data: bytes) -> None:
        """Pass one response on."""
        event = response.WhichOneof("event")
        if event == "error":
            self._error(response.error, data)
        elif event in ("token", "finished", "prompt") and self._relay(data):
            if event == "token":
                self._stats.count_tokens(len(response.token.tokens), self._now_s())
                self._on_token()
                self._is_flowing = True
            elif event == "finished":
                self._finish()
            if response.HasField("usage") and response.usage.HasField("cached_prompt_tokens"):
                self._stats.cached_tokens = response.usage.cached_prompt_tokens

    def _error(self, error: oe.EngineError, data: bytes) -> None:
        if not self._stats.n_messages:
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

    @override
    def started(self, call: Call, /) -> None:
        self._call = call

    @override
    def detach(self) -> None:
        self._call = None
        if self._backpressure is not None:
            # Which knows this one, too.
            self._backpressure.stop()
            self._backpressure = None

    def _held_up(self) -> bool:
        """Have the worker wait for the client; false: it does already, or cannot."""
        if self._call is None:
            return False
        if self._backpressure is None:
            self._backpressure = Backpressure(
                self._client, self._call, limit_s=self._stuck_s, stuck=self._too_slow
            )
        self._is_shut_here = self._is_shut_here or self._backpressure.pause_worker()
        return self._is_shut_here

    def _pass_on(self, data: bytes) -> None:
        self._stats.n_messages += 1
        self._client.message(data + self._suffix)
