"""Translates handoffs between TensorRT-LLM's `DisaggregatedParams` and OpenEngine's `KvSessionRef`.

The layout of `attributes_struct` is that of TensorRT-LLM's own OpenEngine server, which can therefore be at
either end: `opaque_state` is base64 text, 64-bit ids are decimal strings (a Struct number is a double,
exact to 2**53 only), `ctx_dp_rank` is present when it is known, also if it is 0.
"""

import base64
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from slagate.proto import openengine_pb2 as oe
from slagate.workers.errors import invalid

MAX_OPAQUE_STATE_BYTES = 1 << 20
"""Larger than any transceiver state that was seen, and too small for the KV cache itself."""

MAX_OTHER_BYTES = 64 << 10
"""Of a session without its `opaque_state`. Bounds the work on one that is not checked yet."""

MAX_LIST_ENTRIES = 64
"""Of each list in a session. A prefill leg leaves one token, and a few drafts."""

CONTEXT_FIRST, GENERATION_FIRST = 0, 1
"""`schedule_style`: whether prefill ran before decode began. The engine's own default is the first."""

INT32_MAX = (1 << 31) - 1
"""Token ids and ranks are signed in the engine's C++; one that does not fit there ends the engine."""

LOGPROB_FLOOR = -9999.0
"""Replaces a log probability that is not finite, as in TensorRT-LLM's own server."""

_ATTRIBUTES = "kv.session.attributes_struct"
_STATE = f"{_ATTRIBUTES}.opaque_state"
_LOG_PROBS = f"{_ATTRIBUTES}.first_gen_log_probs"


class FirstLogprob(NamedTuple):
    """A log probability for a decode leg, with the attributes of TensorRT-LLM's own `Logprob`."""

    logprob: float
    rank: int | None


def session_of_params(
    params: Any, *, transfer_backend: str, rank: int | None = None
) -> oe.KvSessionRef:
    """The session that a prefill leg returns, from the engine's `DisaggregatedParams`.

    `rank` is the attention-DP rank the leg was sent to, for engines that do not say which one they took.
    """
    # Early versions of the class lack some of these, later ones have a default of None.
    names = ("disagg_request_id", "ctx_info_endpoint", "schedule_style", "first_gen_log_probs")
    disagg_id, endpoint, style, log_probs = (getattr(params, name, None) for name in names)
    ctx_rank = getattr(params, "ctx_dp_rank", None)
    ctx_rank = rank if ctx_rank is None else ctx_rank
    state, tokens, drafts = params.opaque_state, params.first_gen_tokens, params.draft_tokens
    attributes: dict[str, Any] = {
        "opaque_state": None if state is None else base64.b64encode(state).decode("ascii"),
        "first_gen_tokens": None if tokens is None else list(tokens),
        "draft_tokens": None if drafts is None else list(drafts),
        "disagg_request_id": None if disagg_id is None else str(disagg_id),
        "ctx_dp_rank": ctx_rank,
        "ctx_info_endpoint": endpoint,
        "schedule_style": None if style is None else int(style),
        "first_gen_log_probs": None if log_probs is None else list(map(_log_prob_out, log_probs)),
    }
    session = oe.KvSessionRef(
        session_id=str(params.ctx_request_id),
        transfer_backend=transfer_backend,
        dp_rank=ctx_rank or 0,
    )
    session.attributes_struct.update({k: v for k, v in attributes.items() if v is not None})
    return session


def params_of_session(
    session: oe.KvSessionRef, logprob: Callable[[float, int | None], Any] = FirstLogprob
) -> dict[str, Any]:
    """The fields of a generation-only `DisaggregatedParams` by name, as the newest version has them.

    The caller leaves out those that the installed class lacks, and checks the seal (`check_seal`). Raises
    `RequestRefused`, naming the field, for a session that is too large, incomplete or malformed.
    """
    check_size(session)
    fields = session.attributes_struct.fields
    state, endpoint = _text(fields, "opaque_state"), _text(fields, "ctx_info_endpoint")
    if state is None and endpoint is None and not session.endpoints:
        raise invalid("kv.session", "has neither an opaque_state nor an endpoint")
    disagg_id = _text(fields, "disagg_request_id")
    if not (session.session_id or disagg_id):
        raise invalid("kv.session", "has neither a session_id nor a disagg_request_id")
    params: dict[str, Any] = {
        "request_type": "generation_only",
        "ctx_request_id": _decimal(session.session_id, "kv.session.session_id"),
        "disagg_request_id": _decimal(disagg_id, f"{_ATTRIBUTES}.disagg_request_id"),
        "opaque_state": None if state is None else _state(state),
        "first_gen_tokens": _token_list(fields, "first_gen_tokens"),
        "draft_tokens": _token_list(fields, "draft_tokens"),
        "ctx_info_endpoint": endpoint,
    }
    for name in ("ctx_dp_rank", "schedule_style"):
        if name in fields:
            params[name] = _whole(fields[name], f"{_ATTRIBUTES}.{name}")
    style = params.get("schedule_style", CONTEXT_FIRST)
    if style not in (CONTEXT_FIRST, GENERATION_FIRST):
        raise invalid(f"{_ATTRIBUTES}.schedule_style", "must be 0 or 1")
    if style == CONTEXT_FIRST and not params["first_gen_tokens"]:
        # The engine's loop reads the first one without looking.
        raise invalid(f"{_ATTRIBUTES}.first_gen_tokens", "is missing")
    if params.get("ctx_dp_rank", session.dp_rank) != session.dp_rank:
        raise invalid(f"{_ATTRIBUTES}.ctx_dp_rank", "is not kv.session.dp_rank")
    if "first_gen_log_probs" in fields:
        entries = _list(fields["first_gen_log_probs"])
        params["first_gen_log_probs"] = [_log_prob(one, logprob) for one in entries]
    return params


def check_size(session: oe.KvSessionRef) -> None:
    """Raises `RequestRefused` for a session that is too large to be read."""
    fields = session.attributes_struct.fields
    # A message map adds a missing key when it is read.
    state = fields["opaque_state"].string_value if "opaque_state" in fields else ""
    if len(state) > MAX_OPAQUE_STATE_BYTES * 4 // 3 + 4:
        raise invalid(_STATE, f"is over the limit of {MAX_OPAQUE_STATE_BYTES} bytes")
    if session.ByteSize() - len(state) > MAX_OTHER_BYTES:
        raise invalid("kv.session", f"is over {MAX_OTHER_BYTES} bytes without its opaque_state")


def _decimal(text: str | None, field: str) -> int | None:
    if not text:
        return None
    # str.isdigit() takes other scripts' digits, and int() takes signs and underscores.
    if not (text.isascii() and text.isdigit() and len(text) <= 20 and int(text) < 2**64):
        raise invalid(field, "must be a decimal 64-bit id")
    return int(text)


def _text(fields: Any, name: str) -> str | None:
    if name not in fields:
        return None
    if fields[name].WhichOneof("kind") != "string_value":
        raise invalid(f"{_ATTRIBUTES}.{name}", "must be a string")
    return str(fields[name].string_value)


def _state(text: str) -> bytes:
    if not text:
        raise invalid(_STATE, "is empty")
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:  # also what a character outside ASCII gives
        raise invalid(_STATE, "is not base64") from None


def _token_list(fields: Any, name: str) -> list[int] | None:
    if name not in fields:
        return None
    field = f"{_ATTRIBUTES}.{name}"
    if fields[name].WhichOneof("kind") != "list_value":
        raise invalid(field, "must be a list of token ids")
    return [_whole(value, field) for value in _entries(fields[name], field)]


def _entries(value: Any, field: str) -> list[Any]:
    values = value.list_value.values
    if len(values) > MAX_LIST_ENTRIES:
        raise invalid(field, f"has a list of over {MAX_LIST_ENTRIES} entries")
    return list(values)


def _whole(value: Any, field: str) -> int:
    """A token id or a rank: a whole number of 31 bits."""
    number = value.number_value
    whole = value.WhichOneof("kind") == "number_value" and number.is_integer()
    if not (whole and 0 <= number <= INT32_MAX):
        raise invalid(field, "must be a whole number of 31 bits, or a list of them")
    return int(number)


def _log_prob_out(entry: Any) -> float | list[list[float | None]]:
    """The log probability of one position, or [token id, log probability, rank] of each candidate."""
    if not isinstance(entry, dict):
        return floored(float(entry))
    return [[token, logprob_of(one), getattr(one, "rank", None)] for token, one in entry.items()]


def logprob_of(entry: Any) -> float:
    """The number of a `Logprob`, or a bare number, made finite for JSON and a Struct."""
    return floored(float(entry.logprob if hasattr(entry, "logprob") else entry))


def floored(number: float) -> float:
    """A log probability, or `LOGPROB_FLOOR` where it is not finite."""
    return number if math.isfinite(number) else LOGPROB_FLOOR


def _log_prob(value: Any, logprob: Callable[[float, int | None], Any]) -> float | dict[int, Any]:
    if value.WhichOneof("kind") == "number_value":
        return floored(value.number_value)
    entry: dict[int, Any] = {}
    for candidate in _list(value):
        parts = _list(candidate)
        kinds = [part.WhichOneof("kind") for part in parts]
        if kinds not in (["number_value"] * 3, ["number_value", "number_value", "null_value"]):
            raise invalid(_LOG_PROBS, "must be numbers, or lists of [token id, number, rank]")
        rank = None if kinds[2] == "null_value" else _whole(parts[2], _LOG_PROBS)
        token = _whole(parts[0], _LOG_PROBS)
        entry[token] = logprob(floored(parts[1].number_value), rank)
    return entry


def _list(value: Any) -> list[Any]:
    if value.WhichOneof("kind") != "list_value":
        raise invalid(_LOG_PROBS, "must be numbers, or lists of [token id, number, rank]")
    return _entries(value, _LOG_PROBS)
