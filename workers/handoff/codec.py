"""The handoff codec: TensorRT-LLM's `DisaggregatedParams` to and from OpenEngine's `KvSessionRef`.

The layout of `attributes_struct` is the one of TensorRT-LLM's own OpenEngine server, so that either end
may be replaced by it: `opaque_state` is base64 text, 64-bit ids are decimal strings (a Struct number is
a double, exact to 2**53 only), `ctx_dp_rank` is present when it is known, 0 included.
"""

import base64
import math
from typing import Any, NamedTuple

import grpc

from slagate.proto import openengine_pb2 as oe
from slagate.workers.errors import RequestRefused

MAX_OPAQUE_STATE_BYTES = 1 << 20
"""More than any transceiver state seen; a bound so that a handoff cannot carry the KV itself."""

MAX_OTHER_BYTES = 64 << 10
"""Of a session without its `opaque_state`: bounds the work before anything in it is known to be good."""

MAX_LIST_ENTRIES = 64
"""Of each list in a session; a prefill leg leaves one token, and a few drafts."""

LOGPROB_FLOOR = -9999.0
"""Stands for a log probability that is not finite, as in TensorRT-LLM's own server."""

_STATE = "kv.session.attributes_struct.opaque_state"
_LOG_PROBS = "kv.session.attributes_struct.first_gen_log_probs"


class FirstLogprob(NamedTuple):
    """A log probability as decode gets it; TensorRT-LLM reads its own `Logprob` by these names too."""

    logprob: float
    rank: int | None


def session_of_params(
    params: Any, *, transfer_backend: str, rank: int | None = None
) -> oe.KvSessionRef:
    """The reference a prefill leg returns. `params` is the engine's, with a handoff in it.

    `rank` is the attention-DP rank the leg was sent to, for engines that do not say which one they took.
    """
    # Early versions of the class have neither rank nor endpoint, later ones a default of None.
    ctx_rank = getattr(params, "ctx_dp_rank", None)
    ctx_rank = rank if ctx_rank is None else ctx_rank
    session = oe.KvSessionRef(
        session_id=str(params.ctx_request_id),
        transfer_backend=transfer_backend,
        dp_rank=ctx_rank or 0,
    )
    attributes: dict[str, Any] = {}
    if params.opaque_state is not None:
        attributes["opaque_state"] = base64.b64encode(params.opaque_state).decode("ascii")
    if params.first_gen_tokens is not None:
        attributes["first_gen_tokens"] = list(params.first_gen_tokens)
    if params.draft_tokens is not None:
        attributes["draft_tokens"] = list(params.draft_tokens)
    disagg_id = getattr(params, "disagg_request_id", None)
    if disagg_id is not None:
        attributes["disagg_request_id"] = str(disagg_id)
    if ctx_rank is not None:
        attributes["ctx_dp_rank"] = ctx_rank
    endpoint = getattr(params, "ctx_info_endpoint", None)
    if endpoint is not None:
        attributes["ctx_info_endpoint"] = endpoint
    style = getattr(params, "schedule_style", None)
    if style is not None:
        attributes["schedule_style"] = int(style)
    log_probs = getattr(params, "first_gen_log_probs", None)
    if log_probs is not None:
        attributes["first_gen_log_probs"] = [_log_prob_out(one) for one in log_probs]
    session.attributes_struct.update(attributes)
    return session


def params_of_session(session: oe.KvSessionRef) -> dict[str, Any]:
    """Keyword arguments of a generation-only `DisaggregatedParams`.

    Raises `RequestRefused` (INVALID_ARGUMENT) that names the field, for whatever cannot be a handoff.
    """
    check_size(session)
    fields = session.attributes_struct.fields
    has_state = "opaque_state" in fields
    endpoint = _text(fields, "ctx_info_endpoint")
    if not has_state and endpoint is None and not session.endpoints:
        raise _bad("kv.session", "has neither an opaque_state nor an endpoint")
    disagg_id = _int64(fields, "disagg_request_id")
    if not session.session_id and disagg_id is None:
        raise _bad("kv.session", "has neither a session_id nor a disagg_request_id")
    params: dict[str, Any] = {
        "request_type": "generation_only",
        "ctx_request_id": _decimal(session.session_id, "kv.session.session_id"),
        "disagg_request_id": disagg_id,
        "opaque_state": _state(_text(fields, "opaque_state")) if has_state else None,
        "first_gen_tokens": _token_list(fields, "first_gen_tokens"),
        "draft_tokens": _token_list(fields, "draft_tokens"),
        "ctx_info_endpoint": endpoint,
    }
    if "ctx_dp_rank" in fields:
        field = "kv.session.attributes_struct.ctx_dp_rank"
        if _whole(fields["ctx_dp_rank"], field) != session.dp_rank:
            raise _bad(field, "is not kv.session.dp_rank")
        params["ctx_dp_rank"] = session.dp_rank
    if "schedule_style" in fields:
        params["schedule_style"] = _whole(
            fields["schedule_style"], "kv.session.attributes_struct.schedule_style"
        )
    if "first_gen_log_probs" in fields:
        params["first_gen_log_probs"] = _log_probs(fields["first_gen_log_probs"])
    return params


def check_size(session: oe.KvSessionRef) -> None:
    """Raises `RequestRefused` (INVALID_ARGUMENT) for a session that is too large to be looked into."""
    fields = session.attributes_struct.fields
    # Looking a missing key up in a message map adds it.
    state = fields["opaque_state"].string_value if "opaque_state" in fields else ""
    if len(state) > MAX_OPAQUE_STATE_BYTES * 4 // 3 + 4:
        raise _bad(_STATE, f"is over the limit of {MAX_OPAQUE_STATE_BYTES} bytes")
    if session.ByteSize() - len(state) > MAX_OTHER_BYTES:
        raise _bad("kv.session", f"is over {MAX_OTHER_BYTES} bytes without its opaque_state")


def _bad(field: str, reason: str) -> RequestRefused:
    return RequestRefused(grpc.StatusCode.INVALID_ARGUMENT, f"{field}: {reason}")


def _decimal(text: str, field: str) -> int | None:
    if not text:
        return None
    # str.isdigit() takes other scripts' digits, and int() takes signs and underscores.
    if not (text.isascii() and text.isdigit() and len(text) <= 20 and int(text) < 2**64):
        raise _bad(field, "must be a decimal 64-bit id")
    return int(text)


def _text(fields: Any, name: str) -> str | None:
    if name not in fields:
        return None
    if fields[name].WhichOneof("kind") != "string_value":
        raise _bad(f"kv.session.attributes_struct.{name}", "must be a string")
    return str(fields[name].string_value)


def _int64(fields: Any, name: str) -> int | None:
    text = _text(fields, name)
    return None if text is None else _decimal(text, f"kv.session.attributes_struct.{name}")


def _state(text: str | None) -> bytes:
    if not text:
        raise _bad(_STATE, "is empty")
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:  # also what a character outside ASCII gives
        raise _bad(_STATE, "is not base64") from None


def _token_list(fields: Any, name: str) -> list[int] | None:
    if name not in fields:
        return None
    field = f"kv.session.attributes_struct.{name}"
    if fields[name].WhichOneof("kind") != "list_value":
        raise _bad(field, "must be a list of token ids")
    return [_whole(value, field) for value in _entries(fields[name], field)]


def _entries(value: Any, field: str) -> list[Any]:
    values = value.list_value.values
    if len(values) > MAX_LIST_ENTRIES:
        raise _bad(field, f"has a list of over {MAX_LIST_ENTRIES} entries")
    return list(values)


def _whole(value: Any, field: str) -> int:
    """A token id, a rank: a whole number of 32 bits."""
    number = value.number_value
    whole = value.WhichOneof("kind") == "number_value" and number.is_integer()
    if not (whole and 0 <= number <= 0xFFFFFFFF):
        raise _bad(field, "must be a whole number of 32 bits, or a list of them")
    return int(number)


def _log_prob_out(entry: Any) -> float | list[list[float | None]]:
    """One position: a number, or [token id, log probability, rank] of each candidate."""
    if not isinstance(entry, dict):
        return floored(float(entry))
    return [[token, logprob_of(one), getattr(one, "rank", None)] for token, one in entry.items()]


def logprob_of(entry: Any) -> float:
    """The number of a `Logprob`, or a bare one, as JSON and a Struct can carry it."""
    return floored(float(entry.logprob if hasattr(entry, "logprob") else entry))


def floored(number: float) -> float:
    """A log probability that can be compared and carried."""
    return number if math.isfinite(number) else LOGPROB_FLOOR


def _log_probs(value: Any) -> list[float | dict[int, FirstLogprob]]:
    return [_log_prob(one) for one in _list(value)]


def _log_prob(value: Any) -> float | dict[int, FirstLogprob]:
    if value.WhichOneof("kind") == "number_value":
        return floored(value.number_value)
    entry: dict[int, FirstLogprob] = {}
    for candidate in _list(value):
        parts = _list(candidate)
        kinds = [part.WhichOneof("kind") for part in parts]
        if kinds not in (["number_value"] * 3, ["number_value", "number_value", "null_value"]):
            raise _bad(_LOG_PROBS, "must be numbers, or lists of [token id, number, rank]")
        rank = None if kinds[2] == "null_value" else _whole(parts[2], _LOG_PROBS)
        token = _whole(parts[0], _LOG_PROBS)
        entry[token] = FirstLogprob(floored(parts[1].number_value), rank)
    return entry


def _list(value: Any) -> list[Any]:
    if value.WhichOneof("kind") != "list_value":
        raise _bad(_LOG_PROBS, "must be numbers, or lists of [token id, number, rank]")
    return _entries(value, _LOG_PROBS)
