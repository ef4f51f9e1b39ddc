"""The leg rules: what the gateway appends to a client's bytes for each call to a worker.

Concatenated protobuf messages merge: a scalar's last value wins, sub-messages and maps merge, repeated
fields grow. So a leg is the client's own bytes plus a few fields, and a 32k-token prompt is never
serialised again. The same property would let a client's own values survive, so `kv.session` and
`extra.request_type` are refused at the door (`slagate.router.request.request`).
"""

from slagate.proto import openengine_pb2 as oe

REQUEST_TYPE = "request_type"
CONTEXT_ONLY = "context_only"

TARGET_RANK = "openengine-target-dp-rank"
"""Metadata: the attention-DP rank of a request that has no handoff yet."""

DECODE_RANK = "x-slagate-dp-rank"
"""Metadata, ours: the rank of a decode leg, where the key above must not be given."""


_PLAIN_ID_BYTES = 0x7F
"""An id of at most so many bytes has its length in one byte."""

_HEADS = tuple(bytes((1 << 3 | 2, n_bytes)) for n_bytes in range(_PLAIN_ID_BYTES + 1))
"""Tag (field 1, bytes) and length of an id: both messages have it in the same field."""


def prefill_leg(request: bytes, leg_id: str, *, min_tokens: int = 0) -> bytes:
    """The context-only leg: one token of budget, ends in `prefill_ready`.

    `min_tokens` is the client's. One of them falls to this leg, or an end-of-text as its one token would
    end a request that was to go on (docs/decisions/0005-min-tokens-on-prefill.md).
    """
    stopping = oe.StoppingOptions(max_tokens=1, min_tokens=min(min_tokens, 1))
    added = oe.GenerateRequest(request_id=leg_id, stopping=stopping)
    added.extra.fields[REQUEST_TYPE].string_value = CONTEXT_ONLY
    return request + added.SerializeToString()


def decode_leg(
    request: bytes, leg_id: str, *, session: oe.KvSessionRef, max_tokens: int | None
) -> bytes:
    """The generation-only leg; `max_tokens` is None where the client gave its own budget."""
    added = oe.GenerateRequest(request_id=leg_id, kv=oe.KvOptions(session=session))
    if max_tokens is not None:
        added.stopping.max_tokens = max_tokens
    return request + added.SerializeToString()


def agg_leg(request: bytes, leg_id: str, *, max_tokens: int | None) -> bytes:
    """The one leg of an aggregated worker; `max_tokens` as in `decode_leg`."""
    if max_tokens is None:
        return request + _id_field(leg_id)
    added = oe.GenerateRequest(request_id=leg_id)
    added.stopping.max_tokens = max_tokens
    return request + added.SerializeToString()


def client_id_suffix(client_id: str) -> bytes:
    """Bytes that give a relayed response the client's own id back: the last value wins."""
    return _id_field(client_id)


def _id_field(text: str) -> bytes:
    """A message with this id and nothing else, as protobuf has it."""
    data = text.encode()
    if 0 < len(data) <= _PLAIN_ID_BYTES:
        return _HEADS[len(data)] + data
    return oe.GenerateResponse(request_id=text).SerializeToString()
