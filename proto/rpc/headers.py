"""Headers and trailers of gRPC over HTTP/2, to and from bytes.

Pure: no transport, no clock. The source of every format is gRPC's own page on it,
https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md.
"""

import binascii
import math
import re
from base64 import b64decode, b64encode
from functools import lru_cache

import grpc

from slagate.proto.rpc.frames import IDENTITY, Headers, WireError, supported_encoding
from slagate.proto.rpc.status import OK, Metadata, Status

CONTENT_TYPE = b"application/grpc"
_CONTENT_TYPES = (CONTENT_TYPE + b"+", CONTENT_TYPE + b";")

_CODES = {code.value[0]: code for code in grpc.StatusCode}

_CODE_OF_HTTP = {
    400: grpc.StatusCode.INTERNAL,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.UNIMPLEMENTED,
    429: grpc.StatusCode.UNAVAILABLE,
    502: grpc.StatusCode.UNAVAILABLE,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.UNAVAILABLE,
}

_CODE_OF_RESET = {
    0x7: grpc.StatusCode.UNAVAILABLE,  # REFUSED_STREAM
    0x8: grpc.StatusCode.CANCELLED,  # CANCEL
    0xB: grpc.StatusCode.RESOURCE_EXHAUSTED,  # ENHANCE_YOUR_CALM
    0xC: grpc.StatusCode.PERMISSION_DENIED,  # INADEQUATE_SECURITY
}

# What belongs to a call itself; everything else that a peer sends is metadata.
_OWN = frozenset(
    (
        b":method",
        b":scheme",
        b":path",
        b":authority",
        b":status",
        b"te",
        b"content-type",
        b"grpc-timeout",
        b"grpc-encoding",
        b"grpc-accept-encoding",
        b"grpc-status",
        b"grpc-message",
    )
)

_KEY = re.compile(r"[0-9a-z_.-]+")
_VALUE = re.compile(r"[\x20-\x7e]*")
_TIMEOUT = re.compile(rb"([0-9]{1,8})([HMSmun])")
_UNIT_S = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_MAX_TIMEOUT = 99_999_999  # eight digits
_MAX_MICROSECONDS_S = 99.9
_ESCAPED = re.compile(rb"%([0-9a-fA-F]{2})")


def is_grpc(content_type: bytes) -> bool:
    """Whether a `content-type` is gRPC's, with or without a suffix for the encoding of messages.

    >>> [is_grpc(each) for each in (b"application/grpc", b"application/grpc+proto", b"application/grpcfoo")]
    [True, True, False]
    """
    return content_type == CONTENT_TYPE or content_type.startswith(_CONTENT_TYPES)


# --- deadlines -------------------------------------------------------------------------------------


def encode_timeout(timeout_s: float) -> bytes:
    """Encode seconds as a `grpc-timeout`, rounded up: the sender gives up first.

    >>> encode_timeout(1.5), encode_timeout(200.0001), encode_timeout(1e9), encode_timeout(-1.0)
    (b'1500000u', b'200001m', b'99999999S', b'0n')
    """
    if timeout_s <= 0:
        return b"0n"
    if timeout_s < _MAX_MICROSECONDS_S:
        return b"%du" % max(math.ceil(round(timeout_s * 1e6, 3)), 1)
    for unit in (b"m", b"S"):
        count = math.ceil(round(timeout_s / _UNIT_S[unit], 3))
        if count <= _MAX_TIMEOUT:
            return b"%d%s" % (max(count, 1), unit)
    return b"%dS" % _MAX_TIMEOUT


def decode_timeout(value: bytes) -> float:
    """Decode a `grpc-timeout` to seconds. Raises `ValueError`.

    >>> decode_timeout(b"1500000u"), decode_timeout(b"2H")
    (1.5, 7200.0)
    """
    found = _TIMEOUT.fullmatch(value)
    if found is None:
        raise ValueError(f"grpc-timeout: {value[:40]!r} is not up to 8 digits and one of HMSmun")
    return int(found[1]) * _UNIT_S[found[2]]


# --- metadata --------------------------------------------------------------------------------------


def to_headers(metadata: Metadata) -> list[tuple[bytes, bytes]]:
    """Encode metadata as header fields. Raises `ValueError` naming the key."""
    return [(_key(key), _value(key, value)) for key, value in metadata]


def _key(key: str) -> bytes:
    if not _KEY.fullmatch(key):
        raise ValueError(f"metadata key {key[:100]!r} is not lower-case letters, digits and _.-")
    name = key.encode()
    if name in _OWN:
        raise ValueError(f"metadata key {key!r} belongs to gRPC itself")
    return name


def _value(key: str, value: str | bytes) -> bytes:
    if key.endswith("-bin"):
        if isinstance(value, str):
            raise ValueError(f"metadata value of {key!r} must be bytes")
        return b64encode(value).rstrip(b"=")
    text = value if isinstance(value, str) else value.decode("latin-1")
    if not _VALUE.fullmatch(text):
        raise ValueError(f"metadata value of {key!r} is not printable ASCII")
    return text.strip(" ").encode()


def to_metadata(headers: Headers) -> tuple[tuple[str, str | bytes], ...]:
    """The metadata among header fields. Raises `WireError` naming a key with an unreadable value."""
    metadata: list[tuple[str, str | bytes]] = []
    for name, value in headers:
        if name in _OWN:
            continue
        key = name.decode("latin-1")
        if not name.endswith(b"-bin"):
            metadata.append((key, value.decode("latin-1")))
            continue
        # Peers may join the values of one key, and may leave the padding out.
        metadata.extend((key, _from_base64(key, part.strip())) for part in value.split(b","))
    return tuple(metadata)


def _from_base64(key: str, text: bytes) -> bytes:
    try:
        return b64decode(text + b"=" * (-len(text) % 4), validate=True)
    except binascii.Error as error:
        raise WireError(
            grpc.StatusCode.INTERNAL, f"metadata value of {key[:100]!r} is no base64"
        ) from error


# --- status ----------------------------------------------------------------------------------------


def encode_message(message: str) -> bytes:
    """Encode a `grpc-message`: UTF-8, with everything but printable ASCII percent-encoded.

    >>> encode_message("100% né")
    b'100%25 n%C3%A9'
    """
    return b"".join(
        b"%c" % byte if 0x20 <= byte <= 0x7E and byte != 0x25 else b"%%%02X" % byte
        for byte in message.encode(errors="replace")
    )


def decode_message(value: bytes) -> str:
    """Decode a `grpc-message`; bytes that are encoded wrongly are kept as they are.

    >>> decode_message(b"100%25 n%C3%A9"), decode_message(b"5%")
    ('100% né', '5%')
    """
    raw = _ESCAPED.sub(lambda found: bytes((int(found[1], 16),)), value)
    return raw.decode(errors="replace")


_OK_TRAILERS = ((b"grpc-status", b"0"),)


def status_headers(status: Status) -> list[tuple[bytes, bytes]]:
    """The trailers of a call with this status. Raises `ValueError` naming a key of bad metadata."""
    if status is OK:
        return [*_OK_TRAILERS]
    headers = [(b"grpc-status", b"%d" % status.code.value[0])]
    if status.message:
        headers.append((b"grpc-message", encode_message(status.message)))
    return headers + to_headers(status.trailers)


def status_of_headers(headers: Headers) -> Status:
    """The status of a call, from its trailers, or from the headers of an answer without any."""
    fields = tuple(headers)
    if fields == _OK_TRAILERS:
        return OK
    code: grpc.StatusCode | None = None
    message = ""
    for name, value in fields:
        if name == b"grpc-status":
            # A code that nobody has defined yet is an unknown one, says gRPC.
            known = value.isdigit() and len(value) <= 10
            code = _CODES.get(int(value), grpc.StatusCode.UNKNOWN) if known else None
        elif name == b"grpc-message":
            message = decode_message(value)
    if code is None:
        return Status(grpc.StatusCode.INTERNAL, "the call ended without a status")
    try:
        return Status(code, message, to_metadata(fields))
    except WireError as error:
        return error.status


def refused_by_http(headers: Headers) -> Status | None:
    """The status for a response whose headers are not gRPC's; None where they are."""
    fields = dict(headers)
    http = fields.get(b":status", b"")
    if http == b"200" and is_grpc(fields.get(b"content-type", b"")):
        return None
    if b"grpc-status" in fields:
        return None
    if http == b"200":
        kind = fields.get(b"content-type", b"")[:100].decode("latin-1")
        return Status(
            grpc.StatusCode.UNKNOWN, f"the answer is not gRPC, its content-type is {kind!r}"
        )
    known = http.isdigit() and len(http) == 3
    code = _CODE_OF_HTTP.get(int(http) if known else 0, grpc.StatusCode.UNKNOWN)
    return Status(code, f"HTTP status {http[:20].decode('latin-1')}")


def status_of_reset(code: int, reason: str) -> Status:
    """The status of a call whose stream was reset with this HTTP/2 error code."""
    return Status(_CODE_OF_RESET.get(code, grpc.StatusCode.INTERNAL), reason)


@lru_cache(maxsize=64)  # a server's answers mostly begin with the same headers
def answer_of(headers: tuple[tuple[bytes, bytes], ...]) -> tuple[Status | None, bytes]:
    """(None, message encoding) for the headers of a gRPC response, else (error, identity)."""
    refusal = refused_by_http(headers)
    if refusal is not None:
        return refusal, IDENTITY
    try:
        return None, supported_encoding(headers)
    except WireError as error:
        return error.status, IDENTITY
