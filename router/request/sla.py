"""The SLA of one request, from its gRPC metadata.

    x-slo-ttft-ms, x-slo-tpot-ms     decimal milliseconds; 0 is the tightest
    openengine-priority              int32, higher is more important
    x-gateway-inference-objective    class
    x-gateway-inference-fairness-id  tenant
    x-dynamo-session-id              conversation

Missing means that no target was given, never 0. Malformed, repeated or misspelt is an error that names
the key: a target that is silently dropped is the failure this gateway exists to end.
"""

import math
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache

import msgspec
from msgspec import structs

from slagate.pools.fleet_file.models import Objective, default_for
from slagate.pools.grid.grid import StageGrid, upper_edge
from slagate.proto.rpc.status import Metadata
from slagate.router.request.errors import InvalidRequest
from slagate.router.request.metadata import (
    FAIRNESS_ID,
    ITL,
    KNOWN,
    OBJECTIVE,
    PRIORITY,
    RECEIPT,
    ROUTING_KEY,
    SESSION_ID,
    TTFT,
)
from slagate.workers.legs import TARGET_RANK
from slagate.workers.runtime.usage import nearest

MAX_TEXT = 256
"""Characters of a class, tenant or conversation id: they end up in receipts of 4 KiB."""

_DECIMAL = re.compile(r"(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_INTEGER = re.compile(r"[+-]?\d{1,10}", re.ASCII)
# Keys that look like one of ours, after `_` and `.` were read as `-`. Any of them that is not read here is
# a misspelling, and would be dropped without a word. `priority` alone is HTTP's own header.
_HINT = re.compile(
    r"^x-?sl[oa](-|$)|^(x-)?slagate|^x-gateway-inference|^x-dynamo-se|openengine|.priority|priority."
    r"|ttft|tpot|(^|-)itl(-|$)|first-token|token-latency"
)


@lru_cache(maxsize=256)
def looks_like_ours(key: str) -> bool:
    """Whether a metadata key looks like one of this gateway, perhaps misspelt."""
    return bool(_HINT.search(key.lower().replace("_", "-").replace(".", "-")))


class Sla(msgspec.Struct, frozen=True, gc=False):
    """What a request asks for in its metadata. Targets stay in ms, as the edges of the grid's cells are.

    A target of 0 is placed in the grid as 0, and judged by what stands in its place here, see `with_edges`.
    """

    ttft_ms: float | None = None
    itl_ms: float | None = None
    priority: int | None = None
    objective: str = ""  # its class
    fairness_id: str = ""  # its tenant
    session_id: str = ""  # its conversation
    receipt: bool = False  # whether the client wants a receipt
    by_objective: tuple[str, ...] = ()  # fields that the default of its class filled in
    is_unlisted: bool = False  # its class is none of the configuration's, and counts as "*"
    as_fast: tuple[str, ...] = ()  # targets that were 0, which asks for as fast as possible
    is_final: bool = False  # a decision was made by it: `with_defaults` leaves it as it is

    def with_defaults(self, objectives: Mapping[str, Objective]) -> "Sla":
        """A copy with the defaults of the request's class for targets and priority it does not give."""
        if self.is_final:
            return self
        is_unlisted = bool(self.objective) and self.objective not in objectives
        default = default_for(objectives, self.objective)
        if default is None and not is_unlisted:
            return self
        found: dict[str, float | int] = {}
        if default is not None:
            if self.ttft_ms is None and default.ttft_ms is not None:
                found["ttft_ms"] = default.ttft_ms
            if self.itl_ms is None and default.itl_ms is not None:
                found["itl_ms"] = default.itl_ms
            if self.priority is None and default.priority is not None:
                found["priority"] = default.priority
        return structs.replace(self, **found, by_objective=tuple(found), is_unlisted=is_unlisted)

    def with_edges(self, grids: Iterable[StageGrid]) -> "Sla":
        """A copy that is judged by the upper edge of its cell on each axis where the target is 0.

        Nobody meets 0 ms, so it is read as the tightest promise that the grid makes. Where no grid has the
        axis, nothing can be promised: the copy has no such target.
        """
        edges = {axis.field: float(upper_edge(axis, 0)) for grid in grids for axis in grid.axes}
        zeros = tuple(name for name in ("ttft_ms", "itl_ms") if getattr(self, name) == 0)
        found = {name: edges.get(name) for name in zeros}
        return structs.replace(self, **found, as_fast=zeros)


NO_TARGETS = Sla()
"""What a request asks for that says nothing."""


def parse_sla(metadata: Metadata, *, receipts: bool = True) -> Sla:
    """Read a request's SLA from its metadata; `receipts` says whether it may ask for a receipt.

    Raises `InvalidRequest` naming the key.

    >>> sla = parse_sla([("x-slo-ttft-ms", "500"), ("openengine-priority", "-3")])
    >>> sla.ttft_ms, sla.itl_ms, sla.priority
    (500.0, None, -3)
    >>> parse_sla([("x-slo-ttft-ms", "fast")])
    Traceback (most recent call last):
    slagate.router.request.errors.InvalidRequest: x-slo-ttft-ms: must be a decimal number of ms (got 'fast')
    """
    values: dict[str, str] = {}
    for key, value in metadata:
        if key not in KNOWN and not looks_like_ours(key):
            continue
        if key in values:
            raise InvalidRequest(key, "is given more than once")
        if isinstance(value, bytes):
            raise InvalidRequest(key, "must be text")
        values[key] = value
    if not values:
        return NO_TARGETS
    if TARGET_RANK in values:
        raise InvalidRequest(TARGET_RANK, "is chosen by the gateway")
    for key in values:
        if key not in KNOWN:
            raise InvalidRequest(key, f"is not a key of this gateway{_did_you_mean(key)}")
    _text(values, ROUTING_KEY)
    wants_receipt = _flag(values, RECEIPT)
    if wants_receipt and not receipts:
        raise InvalidRequest(RECEIPT, "receipts are switched off on this gateway")
    return Sla(
        _milliseconds(values, TTFT),
        _milliseconds(values, ITL),
        _int32(values, PRIORITY),
        _text(values, OBJECTIVE),
        _text(values, FAIRNESS_ID),
        _text(values, SESSION_ID),
        wants_receipt,
    )


def _did_you_mean(key: str) -> str:
    if re.search("itl|tpot|token-latency", key):
        return f"; did you mean {ITL}?"
    near = nearest(key, KNOWN, least=0.4)
    return f"; did you mean {near}?" if near else ""


def _milliseconds(values: dict[str, str], key: str) -> float | None:
    text = values.get(key)
    if text is None:
        return None
    if not _DECIMAL.fullmatch(text):
        raise InvalidRequest(key, f"must be a decimal number of ms (got {text[:40]!r})")
    number = float(text)
    if not math.isfinite(number):
        raise InvalidRequest(key, f"must be finite (got {text[:40]!r})")
    return number


def _int32(values: dict[str, str], key: str) -> int | None:
    text = values.get(key)
    if text is None:
        return None
    if not _INTEGER.fullmatch(text) or not -(2**31) <= int(text) < 2**31:
        raise InvalidRequest(key, f"must be a 32-bit integer (got {text[:40]!r})")
    return int(text)


def _text(values: dict[str, str], key: str) -> str:
    text = values.get(key, "")
    if key in values and not text:
        raise InvalidRequest(key, "must not be empty")
    if not text.isprintable():
        raise InvalidRequest(key, "must not have control characters")
    if len(text) > MAX_TEXT:
        raise InvalidRequest(key, f"is over the limit of {MAX_TEXT} characters")
    return text


def _flag(values: dict[str, str], key: str) -> bool:
    text = values.get(key, "0")
    if text not in ("0", "1"):
        raise InvalidRequest(key, f"must be 0 or 1 (got {text[:40]!r})")
    return text == "1"
