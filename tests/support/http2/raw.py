"""HTTP/2 frames as bytes, and a client that sends them: what no library would send."""

import asyncio
from collections.abc import Iterator

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = (
    range(10)
)
END_STREAM, END_HEADERS, ACK = 1, 4, 1


def frame(kind: int, flags: int = 0, stream_id: int = 0, payload: bytes = b"") -> bytes:
    head = len(payload).to_bytes(3, "big") + bytes((kind, flags))
    return head + stream_id.to_bytes(4, "big") + payload


HELLO = PREFACE + frame(SETTINGS)


def field(name: bytes, value: bytes) -> bytes:
    """One field, literal and not indexed; RFC 7541, section 6.2.2."""
    return b"\x00" + _string(name) + _string(value)


def _string(text: bytes) -> bytes:
    if len(text) < 127:
        return bytes((len(text),)) + text
    rest, more = len(text) - 127, b""
    while rest >= 128:
        more += bytes((rest % 128 + 128,))
        rest //= 128
    return b"\x7f" + more + bytes((rest,)) + text


def headers_of(path: bytes, *more: tuple[bytes, bytes]) -> bytes:
    """The header block of a call."""
    fields = (
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", path),
        (b":authority", b"a"),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
        *more,
    )
    return b"".join(field(name, value) for name, value in fields)


def begin(stream_id: int, path: bytes, *more: tuple[bytes, bytes]) -> bytes:
    """The headers of a call, whose body follows."""
    return frame(HEADERS, END_HEADERS, stream_id, headers_of(path, *more))


def frames(data: bytes) -> Iterator[tuple[int, int, int, bytes]]:
    """Type, flags, stream and payload of each."""
    at = 0
    while at + 9 <= len(data):
        end = at + 9 + int.from_bytes(data[at : at + 3], "big")
        stream_id = int.from_bytes(data[at + 5 : at + 9], "big")
        yield data[at + 3], data[at + 4], stream_id, data[at + 9 : end]
        at = end


class RawClient(asyncio.Protocol):
    """Sends bytes, answers pings, and keeps what comes."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.heard = b""
        self.is_over = False
        self._read_bytes = 0  # of `heard`, whole frames

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.heard += data
        for kind, flags, _, payload in frames(self.heard[self._read_bytes :]):
            if len(self.heard) - self._read_bytes < 9 + len(payload):
                break
            self._read_bytes += 9 + len(payload)
            if kind == PING and not flags & ACK:
                self.send(frame(PING, ACK, 0, payload))

    def forget(self) -> None:
        """What was heard so far."""
        self.heard = self.heard[self._read_bytes :]
        self._read_bytes = 0

    def connection_lost(self, _exc: Exception | None) -> None:
        self.is_over = True

    def send(self, data: bytes) -> None:
        assert self.transport is not None
        self.transport.write(data)

    def said(self, kind: int) -> list[bytes]:
        """Payloads of the frames of this type that came."""
        return [payload for each, _, _, payload in frames(self.heard) if each == kind]

    @property
    def goaway_code(self) -> int | None:
        """Of the last one."""
        codes = [int.from_bytes(payload[4:8], "big") for payload in self.said(GOAWAY)]
        return codes[-1] if codes else None
