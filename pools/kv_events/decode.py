"""Serialised batches of KV events, read a piece at a time.

A batch may hold thousands of events, and parsing it at once would hold up the event loop. Its framing is
walked by hand instead (protobuf.dev/programming-guides/encoding): the head, then pieces of whole events,
each parsed when it is its turn.

    SubscribeKvEventsResponse:  0a length KvEventBatch       or  12 length EngineError
    KvEventBatch:               [08 number] [10 time] [18 rank] (22 length KvEvent)*
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

from google.protobuf.message import DecodeError, Message

from slagate.proto import openengine_pb2 as oe

PIECE_EVENTS = 64
PIECE_BYTES = 16 * 1024
"""The size of a piece, unless a single event is larger: it is parsed in some 20 us."""

MAX_EVENT_BYTES = 1 << 20
"""The largest event that OpenEngine peers agree on; parsing a larger one would hold up the event loop."""

_BATCH, _ERROR = 0x0A, 0x12
_NUMBER, _TIME, _RANK, _EVENT = 0x08, 0x10, 0x18, 0x22
_HEAD = (_NUMBER, _TIME, _RANK)

_MAX_VARINT_BITS = 64

_Parsed = TypeVar("_Parsed", bound=Message)


class UndecodableError(Exception):
    """Bytes that are no batch of KV events; the message says what is wrong."""


class BatchHeader(NamedTuple):
    """What comes before a batch's events."""

    number: int
    unix_s: float  # publish time; 0: not stated
    rank: int
    events_at: int  # offset of the first event in the message


class EventSlice(NamedTuple):
    """A range of the message with whole events in it."""

    start: int
    end: int

    @property
    def n_bytes(self) -> int:
        """The size of the range."""
        return self.end - self.start


def read_head(message: bytes) -> BatchHeader | oe.EngineError:
    """The head, or the error, of a `SubscribeKvEventsResponse`. Raises `UndecodableError`."""
    if message[:1] == bytes([_ERROR]) and len(message) <= MAX_EVENT_BYTES:
        return _parsed(oe.SubscribeKvEventsResponse, message).error
    if message[:1] != bytes([_BATCH]):
        raise UndecodableError("neither a batch nor an error")
    n_bytes, at = _varint(message, 1)
    if at + n_bytes != len(message):
        raise UndecodableError("a batch of another length than it says")
    values = {_NUMBER: 0, _TIME: 0, _RANK: 0}
    while at < len(message) and message[at] != _EVENT:
        if message[at] in _HEAD:
            values[message[at]], at = _varint(message, at + 1)
        else:
            at = _skip(message, at)
    return BatchHeader(values[_NUMBER], values[_TIME] / 1e9, values[_RANK], at)


def pieces(message: bytes, head: BatchHeader) -> Iterator[EventSlice]:
    """Yield the events of a batch in pieces. `UndecodableError` may be raised after some."""
    at = start = head.events_at
    end = len(message)
    n_events = 0
    while at < end:
        if message[at] == _EVENT:
            n_bytes, body = _varint(message, at + 1)
            after = body + n_bytes
            if after > end or n_bytes > MAX_EVENT_BYTES:
                raise UndecodableError(f"an event of {n_bytes} bytes")
        elif message[at] in _HEAD:
            # The pieces before it were applied under the number and rank of another head.
            raise UndecodableError("the head of a batch behind its events")
        else:
            after = _skip(message, at)
        if n_events and (n_events == PIECE_EVENTS or after - start > PIECE_BYTES):
            yield EventSlice(start, at)
            start, n_events = at, 0
        at = after
        n_events += 1
    if at > start:
        yield EventSlice(start, at)


def parse(message: bytes, piece: EventSlice) -> Sequence[oe.KvEvent]:
    """The events of a piece. Raises `UndecodableError`."""
    return _parsed(oe.KvEventBatch, message[piece.start : piece.end]).events


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """A base-128 varint, and the offset behind it."""
    value = shift = 0
    try:
        while message[at] >= 0x80:
            value |= (message[at] & 0x7F) << shift
            shift += 7
            at += 1
            if shift >= _MAX_VARINT_BITS:
                raise UndecodableError("a number of more than 64 bits")
        return value | message[at] << shift, at + 1
    except IndexError:
        raise UndecodableError("ends in the middle of a number") from None


def _skip(message: bytes, at: int) -> int:
    """The offset behind a field of a later revision."""
    tag, at = _varint(message, at)
    wire_type = tag & 7
    if wire_type == 0:
        return _varint(message, at)[1]
    if wire_type == 2:
        n_bytes, at = _varint(message, at)
        at += n_bytes
    elif wire_type in (1, 5):
        at += 8 if wire_type == 1 else 4
    else:
        raise UndecodableError(f"a field of wire type {wire_type}")
    if at > len(message):
        raise UndecodableError("ends in the middle of a field")
    return at


def _parsed(kind: type[_Parsed], message: bytes) -> _Parsed:
    try:
        parsed: _Parsed = kind.FromString(message)
        return parsed
    except DecodeError:
        raise UndecodableError(f"no {kind.DESCRIPTOR.name}") from None
