"""The shape of a fleet file: Dynamo's global-router JSON, plus `pools`.

These models state keys, types and single-value bounds. What one value says about another is in
`grid_rules`; docs/grid.md is the page for operators.
"""

import ipaddress
import math
import re
from typing import Annotated, Literal, NamedTuple, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator
from pydantic_core import PydanticCustomError

from slagate.pools.json_text import is_finite_number

T = TypeVar("T")

_ADDRESS = re.compile(r"(?P<host>\[[^\]]+\]|[A-Za-z0-9._-]+):(?P<port>[1-9][0-9]{0,4})", re.ASCII)


def _number(value: object) -> int | float:
    try:
        finite = is_finite_number(value) and math.isfinite(value)  # type: ignore[arg-type]
    except OverflowError:  # an int that no double can hold
        finite = False
    if not finite:
        raise PydanticCustomError("number", "must be a finite number")
    return value  # type: ignore[return-value]


def _array(value: object) -> object:
    if not isinstance(value, list | tuple):
        raise PydanticCustomError("array", "must be a list")
    return tuple(value)


def _given(value: object) -> object:
    # Absent is the one way to leave a key out: null reads as "nothing" to some and as "zero" to others.
    if value is None:
        raise PydanticCustomError("null", "must not be null, leave the key out instead")
    return value


def _name(value: str) -> str:
    if not value.strip():
        raise PydanticCustomError("blank", "must not be empty")
    # Names go into logs, metric labels and messages; half a surrogate pair breaks all of them.
    if not value.isprintable():
        raise PydanticCustomError("unprintable", "must have printable characters only")
    return value


def _address(value: str) -> str:
    match = _ADDRESS.fullmatch(value)
    if match is None or int(match["port"]) > 65535:
        raise PydanticCustomError("address", "must be host:port with a port from 1 to 65535")
    if match["host"].startswith("["):
        try:
            ipaddress.IPv6Address(match["host"][1:-1])
        except ValueError:
            raise PydanticCustomError(
                "address", "must have an IPv6 address inside the brackets"
            ) from None
    return value


# Not converted to float: a bound keeps its type, and so the arithmetic its exact result.
Number = Annotated[int | float, PlainValidator(_number)]
Array = Annotated[tuple[T, ...], BeforeValidator(_array)]
Maybe = Annotated[T | None, BeforeValidator(_given)]
Count = Annotated[int, Field(ge=1)]
# Tables of workers hold 64 bits; nobody means more than half of that.
Limit = Annotated[int, Field(ge=1, le=2**31 - 1)]
Name = Annotated[str, AfterValidator(_name)]
Address = Annotated[str, AfterValidator(_address)]
# How deep the table goes depends on the axes, so its content is a cross-field rule.
Table = Array[object]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class OverrideRule(_Part):
    """Requests with a priority in this range, ends included, go to this pool whatever the grid says."""

    min_priority: Number
    max_priority: Number
    target_pool: int


class PrefillStrategy(_Part):
    """The grid of ISL (tokens) by TTFT target (ms); the mapping is `[isl][ttft]`."""

    isl_min: Number
    isl_max: Number
    isl_resolution: Count
    ttft_min_ms: Number
    ttft_max_ms: Number
    ttft_resolution: Count
    prefill_pool_mapping: Table
    priority_overrides: Array[OverrideRule] = ()


class DecodeStrategy(_Part):
    """The grid of context length (tokens) by ITL target (ms); the mapping is `[context][itl]`."""

    context_length_min: Number
    context_length_max: Number
    context_length_resolution: Count
    itl_min_ms: Number
    itl_max_ms: Number
    itl_resolution: Count
    decode_pool_mapping: Table
    priority_overrides: Array[OverrideRule] = ()


class AggStrategy(_Part):
    """The grid of TTFT by ITL target (ms): `[ttft][itl]`, or `[isl][ttft][itl]` with the isl keys."""

    isl_min: Maybe[Number] = None
    isl_max: Maybe[Number] = None
    isl_resolution: Maybe[Count] = None
    ttft_min_ms: Number
    ttft_max_ms: Number
    ttft_resolution: Count
    itl_min_ms: Number
    itl_max_ms: Number
    itl_resolution: Count
    agg_pool_mapping: Table
    priority_overrides: Array[OverrideRule] = ()


class PoolSpec(_Part):
    """Where the workers of one pool are, and how fast they are before anything was measured.

    `profile` is the name of a packaged profile or the path of one, `tp` the tensor parallel size to read
    from it. A worker gets at most `max_inflight` requests at once (absent: decode what its engine runs at
    once, prefill any number), and no further prompt while it has `max_queued_tokens` or more to process.
    """

    workers: Array[Address] = ()
    profile: Maybe[Name] = None
    tp: Maybe[Count] = None
    max_inflight: Maybe[Limit] = None
    max_queued_tokens: Maybe[Limit] = None


class _File(_Part):
    enable_priority_retry: bool = False
    pools: dict[str, PoolSpec] = Field(default_factory=dict)


class DisaggFile(_File):
    """A fleet with prefill pools and decode pools."""

    mode: Literal["disagg"] = "disagg"
    num_prefill_pools: Count
    num_decode_pools: Count
    prefill_pool_dynamo_namespaces: Array[Name]
    decode_pool_dynamo_namespaces: Array[Name]
    prefill_pool_priorities: Maybe[Array[int]] = None
    decode_pool_priorities: Maybe[Array[int]] = None
    prefill_pool_selection_strategy: PrefillStrategy
    decode_pool_selection_strategy: DecodeStrategy


class AggFile(_File):
    """A fleet of pools that do both phases."""

    mode: Literal["agg"]
    num_agg_pools: Count
    agg_pool_dynamo_namespaces: Array[Name]
    agg_pool_priorities: Maybe[Array[int]] = None
    agg_pool_selection_strategy: AggStrategy


class AxisKeys(NamedTuple):
    """The keys of one axis in a strategy."""

    field: str
    low: str
    high: str
    resolution: str


class StageKeys(NamedTuple):
    """The keys of one stage in the file."""

    pool_count: str
    names: str
    short_names: str
    priorities: str
    strategy: str
    mapping: str
    axes: tuple[AxisKeys, ...]


def _size(name: str) -> AxisKeys:
    return AxisKeys(name, f"{name}_min", f"{name}_max", f"{name}_resolution")


def _latency(name: str) -> AxisKeys:
    return AxisKeys(f"{name}_ms", f"{name}_min_ms", f"{name}_max_ms", f"{name}_resolution")


def _stage(name: str, *axes: AxisKeys) -> StageKeys:
    pool = f"{name}_pool"
    return StageKeys(
        pool_count=f"num_{pool}s",
        names=f"{pool}_dynamo_namespaces",
        short_names=f"{pool}s",
        priorities=f"{pool}_priorities",
        strategy=f"{pool}_selection_strategy",
        mapping=f"{pool}_mapping",
        axes=axes,
    )


STAGES = {
    "disagg": {
        "prefill": _stage("prefill", _size("isl"), _latency("ttft")),
        "decode": _stage("decode", _size("context_length"), _latency("itl")),
    },
    "agg": {"agg": _stage("agg", _size("isl"), _latency("ttft"), _latency("itl"))},
}
STRATEGIES: dict[str, type[BaseModel]] = {
    "prefill_pool_selection_strategy": PrefillStrategy,
    "decode_pool_selection_strategy": DecodeStrategy,
    "agg_pool_selection_strategy": AggStrategy,
}
FILES: dict[str, type[DisaggFile] | type[AggFile]] = {"disagg": DisaggFile, "agg": AggFile}
