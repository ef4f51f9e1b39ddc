"""Seals handoffs with an HMAC-SHA256 over all of their content, between workers that share a key.

A decode worker passes `opaque_state` to native code, so a fleet may want to accept it only from its own
prefill workers. The gateway passes the session on unchanged and needs no key.
"""

import hashlib
import hmac
import struct
from pathlib import Path

from google.protobuf import struct_pb2

from slagate.proto import openengine_pb2 as oe
from slagate.workers.errors import invalid
from slagate.workers.handoff.codec import check_size
from slagate.workers.runtime.usage import UsageError

ATTRIBUTE = "slagate_mac"
"""In `attributes_struct`: the MAC in lower-case hex."""

MIN_KEY_BYTES = 16


def check_key(key: bytes) -> None:
    """Raises `ValueError` for a key of less than `MIN_KEY_BYTES`."""
    if len(key) < MIN_KEY_BYTES:
        raise ValueError(f"the handoff key has {len(key)} bytes, {MIN_KEY_BYTES} are needed")


def read_key(path: Path | None) -> bytes | None:
    """The key in the file that `--handoff-key-file` names; None without. Raises `UsageError`."""
    if path is None:
        return None
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        raise UsageError(f"--handoff-key-file {path}: {error.strerror}") from error
    if len(key) < MIN_KEY_BYTES:
        raise UsageError(
            f"--handoff-key-file {path}: holds {len(key)} bytes, {MIN_KEY_BYTES} are needed"
        )
    return key


def fingerprint(key: bytes) -> str:
    """16 hexadecimal digits that tell keys apart. They are of an HMAC, so they tell nothing of the key."""
    return hmac.new(key, b"slagate.handoff.fingerprint", hashlib.sha256).hexdigest()[:16]


def seal(session: oe.KvSessionRef, key: bytes) -> None:
    """Add the MAC of everything else in the session."""
    session.attributes_struct[ATTRIBUTE] = mac(session, key)


def check_seal(session: oe.KvSessionRef, key: bytes) -> None:
    """Raises `RequestRefused` unless the session has the MAC of its content."""
    check_size(session)
    fields = session.attributes_struct.fields
    # A message map adds a missing key when it is read.
    text = fields[ATTRIBUTE].string_value if ATTRIBUTE in fields else ""
    if not hmac.compare_digest(text.encode(), mac(session, key).encode()):
        field = f"kv.session.attributes_struct.{ATTRIBUTE}"
        raise invalid(field, "is not this fleet's seal on the session")


def mac(session: oe.KvSessionRef, key: bytes) -> str:
    """The MAC of a session, in hexadecimal."""
    return hmac.new(key, canonical(session), hashlib.sha256).hexdigest()


def canonical(session: oe.KvSessionRef) -> bytes:
    """The session without its MAC, as bytes that are different for every other session.

    Every text comes after its length and every value after its type, so that fields cannot run into each
    other; map entries are in order of their keys. Protobuf's own bytes differ between its versions.
    """
    parts = [
        b"slagate.handoff.v1",
        _text(session.session_id),
        _text(session.transfer_backend),
        struct.pack(">II", session.dp_rank, len(session.endpoints)),
    ]
    for endpoint in session.endpoints:
        parts += [_text(endpoint.host), struct.pack(">I", endpoint.port), _text(endpoint.protocol)]
    parts.append(_fields(session.attributes_struct, without=ATTRIBUTE))
    return b"".join(parts)


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack(">I", len(data)) + data


def _fields(message: struct_pb2.Struct, *, without: str | None = None) -> bytes:
    names = sorted(name for name in message.fields if name != without)
    parts = [b"o", struct.pack(">I", len(names))]
    for name in names:
        parts += [_text(name), _value(message.fields[name])]
    return b"".join(parts)


def _value(value: struct_pb2.Value) -> bytes:
    kind = value.WhichOneof("kind")
    if kind == "number_value":
        return b"n" + struct.pack(">d", value.number_value)
    if kind == "string_value":
        return b"s" + _text(value.string_value)
    if kind == "bool_value":
        return b"t" if value.bool_value else b"f"
    if kind == "struct_value":
        return _fields(value.struct_value)
    if kind == "list_value":
        values = value.list_value.values
        return b"l" + struct.pack(">I", len(values)) + b"".join(_value(one) for one in values)
    # A null and a value without any kind mean the same.
    return b"0"
