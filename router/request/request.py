"""One request: parsed once, checked before any worker hears of it, its bytes kept as they came."""

import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from google.protobuf.message import DecodeError

from slagate.pools.prefix.overlap import Prompt
from slagate.pools.prefix.trie import Root
from slagate.proto import openengine_pb2 as oe
from slagate.router.request.errors import InvalidRequest, TooLarge, Unsupported
from slagate.router.request.metadata import ITL, TTFT
from slagate.router.request.sla import looks_like_ours
from slagate.workers.legs import REQUEST_TYPE
from slagate.workers.sampling_limits import SamplingFault, sampling_fault, stopping_fault

MAX_ID_BYTES = 1024
"""Of a request id; TensorRT-LLM's own server has the same limit."""

MAX_FIELDS_TO_BLAME = 10_000
"""Fields looked at to name the one that makes a request too large; an honest request has a dozen."""

DEFAULT_MAX_TOKENS = 4096
"""Output budget where neither the client nor the worker's context window says one."""

# Where clients of other gateways put their targets.
_CARRIERS_OF_OTHERS = frozenset({"nvext", "router", "slo"})


_LITTLE_ENDIAN = np.dtype("<u4")


class Request(NamedTuple):
    """A valid request and what the gateway needs to know of it."""

    data: bytes  # as the client sent it
    id: str  # the client's
    model: str
    isl_tokens: int
    max_tokens: int | None  # None: the client gave no budget
    min_tokens: int
    prompt: Prompt | None  # None: no prefix cache is of use to it, or nobody can tell which


def parse_request(data: bytes, *, max_bytes: int) -> Request:
    """Check a serialised `GenerateRequest`.

    Raises `TooLarge`, `Unsupported` or `InvalidRequest`, each naming the field.
    """
    if len(data) > max_bytes:
        raise TooLarge(_largest_field(data), _over(len(data), max_bytes))
    message = parse_message(data)
    request_id, model = message.request_id, message.model
    if not request_id:
        raise InvalidRequest("request_id", "must not be empty")
    if len(request_id.encode()) > MAX_ID_BYTES:
        raise InvalidRequest("request_id", f"is over the limit of {MAX_ID_BYTES} bytes")
    if not model:
        raise InvalidRequest("model", "must not be empty")
    _check_private(message)
    if message.WhichOneof("input") == "prompt":
        raise InvalidRequest("prompt", "no tokenizer is configured; send token_ids")
    ids = message.token_ids.ids
    isl_tokens = len(ids)
    if not isl_tokens:
        raise InvalidRequest("token_ids", "must not be empty")
    # Most requests lack most of the messages in them, and to ask for one makes an object.
    if message.HasField("sampling"):
        sampling = message.sampling
        if sampling.HasField("num_sequences") and sampling.num_sequences != 1:
            if sampling.num_sequences == 0:
                raise InvalidRequest("sampling.num_sequences", "must be at least 1")
            raise Unsupported("sampling.num_sequences", "one sequence a request is served")
        _refuse(sampling_fault(sampling))
    max_tokens, min_tokens = None, 0
    if message.HasField("stopping"):
        max_tokens, min_tokens = _max_tokens(message.stopping), message.stopping.min_tokens
        _refuse(stopping_fault(message.stopping))
    return Request(
        data, request_id, model, isl_tokens, max_tokens, min_tokens, _prompt(message, ids)
    )


def parse_message(data: bytes) -> oe.GenerateRequest:
    """Parse a serialised `GenerateRequest`. Raises `InvalidRequest` for bytes that are none."""
    try:
        return oe.GenerateRequest.FromString(data)
    except DecodeError:
        raise InvalidRequest("request", "is not a serialised GenerateRequest") from None


def output_budget(request: Request, infos: Iterable[oe.ModelInfo | None]) -> int:
    """How many output tokens a request may have on its workers.

    `infos` is what each of them says of the model (None: nothing yet): the shortest context window counts.
    Raises `InvalidRequest` for a prompt that leaves no room in it.
    """
    windows = [
        info.max_context_length for info in infos if info and info.HasField("max_context_length")
    ]
    if not windows:
        return request.max_tokens or DEFAULT_MAX_TOKENS
    check_length(request, min(windows))
    room = min(windows) - request.isl_tokens
    return room if request.max_tokens is None else min(request.max_tokens, room)


def check_length(request: Request, window_tokens: int | None) -> None:
    """Raise `InvalidRequest` for a prompt that leaves no room in a context window (None: not known)."""
    if window_tokens is not None and request.isl_tokens >= window_tokens:
        reason = f"{request.isl_tokens} tokens do not fit the context window of {window_tokens}"
        raise InvalidRequest("token_ids", reason)


def _check_private(message: oe.GenerateRequest) -> None:
    """Refuse what belongs to the gateway: merged into a leg, a client's value would survive there."""
    if message.HasField("kv") and message.kv.HasField("session"):
        raise InvalidRequest("kv.session", "is set by the gateway only")
    if not message.HasField("extra"):
        return
    for key in message.extra.fields:
        if key == REQUEST_TYPE:
            raise InvalidRequest(f"extra.{key}", "is set by the gateway only")
        # The engine ignores what it does not know, so a target left here would be dropped without a word.
        if key in _CARRIERS_OF_OTHERS or looks_like_ours(key):
            reason = f"is not read; targets travel in metadata, {TTFT} and {ITL}"
            raise InvalidRequest(f"extra.{key[:80]}", reason)


def _refuse(fault: SamplingFault | None) -> None:
    if fault is not None:
        raise InvalidRequest(fault.field, fault.reason)


def _prompt(message: oe.GenerateRequest, ids: Sequence[int]) -> Prompt | None:
    # Where in the prompt a picture stands is for the engine to say, and its tokens do not tell which one.
    if message.media:
        return None
    cache_salt = ""
    if message.HasField("kv"):
        if message.kv.bypass_prefix_cache:
            return None
        cache_salt = message.kv.cache_salt
    return Prompt(_little_endian(ids), Root(message.lora_name, cache_salt))


def _little_endian(ids: Sequence[int]) -> bytes:
    """Token ids as uint32."""
    # Newer protobuf hands the numbers over as they lie in memory, a hundred times faster than one by one.
    if hasattr(ids, "__array__"):
        return np.asarray(ids, _LITTLE_ENDIAN).tobytes()
    numbers = array("I", ids[:])
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def _max_tokens(stopping: oe.StoppingOptions) -> int | None:
    if not stopping.HasField("max_tokens"):
        return None
    if stopping.max_tokens == 0:
        raise InvalidRequest("stopping.max_tokens", "must be at least 1")
    if stopping.min_tokens > stopping.max_tokens:
        raise InvalidRequest("stopping.min_tokens", "is over stopping.max_tokens")
    return stopping.max_tokens


def _largest_field(data: bytes) -> str:
    """The field to blame for a request that is too large.

    Reads tags and lengths only: a parse of tens of megabytes would hold up everybody else.
    """
    sizes: dict[int, int] = {}
    try:
        at = 0
        for _ in range(MAX_FIELDS_TO_BLAME):
            if at >= len(data):
                break
            start = at
            tag, at = _varint(data, at)
            wire_type = tag & 7
            if wire_type == 0:
                _, at = _varint(data, at)
            elif wire_type == 2:
                length, at = _varint(data, at)
                at += length
            elif wire_type in (1, 5):
                at += 8 if wire_type == 1 else 4
            else:
                return "request"
            sizes[tag >> 3] = sizes.get(tag >> 3, 0) + at - start
    except IndexError:
        return "request"
    largest = max(sizes, key=lambda number: sizes[number], default=0)
    field = oe.GenerateRequest.DESCRIPTOR.fields_by_number.get(largest)
    return "request" if field is None else field.name


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A base-128 number and where it ends. Raises `IndexError` behind the end of the data."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80 or shift > 63:
            return value, at
        shift += 7


def _over(n_bytes: int, max_bytes: int) -> str:
    return f"the request of {n_bytes} bytes is over the limit of {max_bytes} bytes"
