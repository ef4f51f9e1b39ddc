"""Length-prefixed gRPC messages in the bytes of a stream. Pure: no transport, no clock.

The source of the format is gRPC's own page, https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md.
"""

import struct
import zlib
from collections.abc import Iterable

import grpc

from slagate.proto.rpc.status import Status

Headers = Iterable[tuple[bytes, bytes]]

IDENTITY = b"identity"

_PREFIX = struct.Struct(">BI")
"""Before each message: whether it is compressed, and its length in bytes."""

PREFIX_BYTES = _PREFIX.size


class WireError(Exception):
    """A peer broke the format or a limit; `status` is the status of the call."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.status = Status(code, message)
        self.whole: list[bytes] = []  # messages in front of the bad one, from the same bytes


def prefix(message: bytes) -> bytes:
    """The prefix of a message that is not compressed.

    >>> prefix(b"abc").hex()
    '0000000003'
    """
    return _PREFIX.pack(0, len(message))


def framed(messages: list[bytes]) -> bytes:
    """Messages, none of them compressed, each behind its prefix.

    >>> framed([b"abc", b""]).hex()
    '00000000036162630000000000'
    """
    pack = _PREFIX.pack
    return b"".join([part for each in messages for part in (pack(0, len(each)), each)])


def is_one_message(data: bytes, max_bytes: int) -> bool:
    """Whether these bytes are one message with its prefix, not compressed, as most are.

    >>> is_one_message(framed([b"abc"]), 3), is_one_message(framed([b"abc"]), 2)
    (True, False)
    """
    n_bytes = len(data) - PREFIX_BYTES
    return 0 <= n_bytes <= max_bytes and _PREFIX.unpack_from(data) == (0, n_bytes)


class MessageReader:
    """Splits the bytes of one direction of a call into messages, wherever the frames end."""

    __slots__ = ("_encoding", "_max_bytes", "_need_bytes", "_waiting")

    def __init__(self, max_bytes: int, *, encoding: bytes = b"identity") -> None:
        """`max_bytes` bounds one message, compressed and decompressed."""
        self._max_bytes = max_bytes
        self._encoding = encoding
        self._waiting = bytearray()  # the beginning of one message, its prefix included
        self._need_bytes = PREFIX_BYTES  # of `_waiting`, before it is worth a look

    @property
    def waiting_bytes(self) -> int:
        """Bytes of a message that is not complete; at the end of a call there must be none."""
        return len(self._waiting)

    def feed(self, data: bytes) -> list[bytes]:
        """Messages that these bytes complete. Raises `WireError`, earlier ones in its `whole`."""
        waiting = self._waiting
        if waiting:
            waiting += data
            if len(waiting) < self._need_bytes:
                return []
            data = bytes(waiting)
            waiting.clear()
        elif is_one_message(data, self._max_bytes):
            return [data[PREFIX_BYTES:]]
        messages: list[bytes] = []
        try:
            at = self._cut(data, messages)
        except WireError as error:
            error.whole = messages
            raise
        if at < len(data):
            waiting += data[at:]
        return messages

    def _cut(self, data: bytes, messages: list[bytes]) -> int:
        """Append the whole messages in these bytes; returns where the rest begins."""
        at, n_bytes = 0, len(data)
        while n_bytes - at >= PREFIX_BYTES:
            is_compressed, length = _PREFIX.unpack_from(data, at)
            if length > self._max_bytes:
                raise WireError(
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    f"a message of {length} bytes, more than {self._max_bytes}",
                )
            end = at + PREFIX_BYTES + length
            if end > n_bytes:
                self._need_bytes = PREFIX_BYTES + length
                break
            message = data[at + PREFIX_BYTES : end]
            messages.append(self._decompressed(message) if is_compressed else message)
            at = end
        else:
            self._need_bytes = PREFIX_BYTES
        return at

    def _decompressed(self, message: bytes) -> bytes:
        if self._encoding not in (b"gzip", b"deflate"):
            raise WireError(
                grpc.StatusCode.INTERNAL, "a compressed message in a stream without an encoding"
            )
        # 32: zlib and gzip headers are both understood.
        inflater = zlib.decompressobj(32 + zlib.MAX_WBITS)
        try:
            data = inflater.decompress(message, self._max_bytes + 1)
        except zlib.error as error:
            raise WireError(grpc.StatusCode.INTERNAL, "a message that is no gzip") from error
        if len(data) > self._max_bytes:
            raise WireError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"a message of more than {self._max_bytes} bytes, decompressed",
            )
        if not inflater.eof or inflater.unused_data:
            raise WireError(grpc.StatusCode.INTERNAL, "a message whose gzip has another end")
        return data


def supported_encoding(headers: Headers) -> bytes:
    """The encoding of compressed messages of this call. Raises `WireError` for one that we cannot read."""
    encoding = next((value for name, value in headers if name == b"grpc-encoding"), b"identity")
    if encoding not in (b"identity", b"gzip", b"deflate"):
        raise WireError(
            grpc.StatusCode.UNIMPLEMENTED,
            f"grpc-encoding: {encoding[:40]!r} is not supported, only gzip and deflate",
        )
    return encoding
