"""What the gateway appends to the bytes of a client's request for each leg, its call to a worker.

Concatenated protobuf messages merge: a scalar's last value wins, sub-messages and maps merge, repeated
fields grow. So a leg is the client's own bytes plus a few fields, and a 32k-token prompt is never
serialised again. A client's own values would survive the merge in the same way, so `kv.session` and
`extra.request_type` are refused when the request comes in (`slagate.router.request.request`).
"""

from slagate.proto import openengine_pb2 as oe

REQUEST_TYPE = "request_type"
CONTEXT_ONLY = "context_only"
LOCAL = "context_and_generation"

TARGET_RANK = "openengine-target-dp-rank"
"""Metadata key: the attention-DP rank for a request that has no handoff yet."""

DECODE_RANK = "x-slagate-dp-rank"
"""Metadata key, slagate's own: the rank for a decode leg, with which OpenEngine's key must not come."""

_PLAIN_ID_BYTES = 0x7F
"""The length of an id of at most so many bytes is one byte on the wire."""

_HEADS = tuple(bytes((1 << 3 | 2, n_bytes)) for n_bytes in range(_PLAIN_ID_BYTES + 1))
"""Tag (field 1, bytes) and length of `request_id`, which has this number in requests and responses."""


def prefill_leg(request: bytes, leg_id: str, *, min_tokens: int = 0) -> bytes:
    """The bytes of a prefill (context-only) leg: it makes one token and ends in `prefill_ready`.

    `min_tokens` is the client's. One of them counts for this leg: else an end of text as its one token
    would end a request that has to go on (docs/decisions/0005-min-tokens-on-prefill.md).
    """
    stopping = oe.StoppingOptions(max_tokens=1, min_tokens=min(min_tokens, 1))
    added = oe.GenerateRequest(request_id=leg_id, stopping=stopping)
    added.extra.fields[REQUEST_TYPE].string_value = CONTEXT_ONLY
    return request + added.SerializeToString()


def decode_leg(
    request: bytes, leg_id: str, *, session: oe.KvSessionRef, max_tokens: int | None
) -> bytes:
    """The bytes of a decode (generation-only) leg; `max_tokens` None keeps the client's limit."""
    added = oe.GenerateRequest(request_id=leg_id, kv=oe.KvOptions(session=session))
    if max_tokens is not None:
        added.stopping.max_tokens = max_tokens
    return request + added.SerializeToString()


def agg_leg(
    request: bytes, leg_id: str, *, max_tokens: int | None, to_decode: bool = False
) -> bytes:
    """The bytes of the one leg to an aggregated worker; `max_tokens` as in `decode_leg`.

    With `to_decode` it goes to a decode worker, which is to compute the prompt too: one that does not do
    so unasked, since a request without a handoff most often came to the wrong worker.
    """
    if max_tokens is None and not to_decode:
        return request + _id_field(leg_id)
    added = oe.GenerateRequest(request_id=leg_id)
    if max_tokens is not None:
        added.stopping.max_tokens = max_tokens
    if to_decode:
        added.extra.fields[REQUEST_TYPE].string_value = LOCAL
    return request + added.SerializeToString()


def client_id_suffix(client_id: str) -> bytes:
    """Bytes that, appended to a worker's response, replace the leg's id in it by the client's."""
    return _id_field(client_id)


def _id_field(text: str) -> bytes:
    """A serialised message with this id and nothing else."""
    data = text.encode()
    if 0 < len(data) <= _PLAIN_ID_BYTES:
        return _HEADS[len(data)] + data
    return oe.GenerateResponse(request_id=text).SerializeToString()
