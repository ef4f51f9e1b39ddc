"""The shape of a fleet file: Dynamo's global-router JSON, and what slagate has besides.

These models state keys, types and single-value bounds, each type with what JSON schema says of it. Rules
between values are in `rules`; docs/grid.md is the page for operators. The descriptions go into
`slagate grid schema`.
"""

import ipaddress
import math
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError
from typing_extensions import LiteralString

from slagate.pools.grid.json_text import is_finite_number

T = TypeVar("T")

_HOST = r"(\[[^\]]+\]|[A-Za-z0-9._-]+)"
_ADDRESS = re.compile(rf"{_HOST}:([1-9][0-9]{{0,4}})", re.ASCII)


def is_number(value: object) -> bool:
    """Whether `value` is a finite number that fits a double."""
    try:
        return is_finite_number(value) and math.isfinite(value)
    except OverflowError:  # an int that no double can hold
        return False


def must(message: LiteralString, holds: Callable[[Any], bool]) -> Callable[[Any], Any]:
    """A validator that lets a value pass where this holds; `message` says what must."""

    def check(value: Any) -> Any:
        if not holds(value):
            raise PydanticCustomError("value", message)
        return value

    return check


def _array(value: object) -> object:
    if not isinstance(value, list | tuple):
        raise PydanticCustomError("array", "must be a list")
    return tuple(value)


def _address(value: str) -> str:
    match = _ADDRESS.fullmatch(value)
    if match is None or int(match[2]) > 65535:
        raise PydanticCustomError("address", "must be host:port with a port from 1 to 65535")
    if match[1].startswith("["):
        try:
            ipaddress.IPv6Address(match[1][1:-1])
        except ValueError:
            raise PydanticCustomError(
                "address", "must have an IPv6 address inside the brackets"
            ) from None
    return value


_FINITE = PlainValidator(must("must be a finite number", is_finite_number))
_POSITIVE = must("must be a finite number above 0", lambda v: is_number(v) and v > 0)
_TARGET = must("must be a finite number, 0 or above", lambda v: is_number(v) and v >= 0)
_POOL = must(
    "must be a pool number or the name of a pool",
    lambda v: isinstance(v, int | str) and not isinstance(v, bool),
)
_INTEGER = must("must be an integer", lambda v: isinstance(v, int) and not isinstance(v, bool))
# A key is left out by its absence alone: null means "nothing" to some readers and "zero" to others.
_GIVEN = must("must not be null, leave the key out instead", lambda v: v is not None)

# These are only compared, so that they need not fit a double.
AnyNumber = Annotated[int | float, _FINITE, WithJsonSchema({"type": "number"})]
# These are not converted to float, so that the arithmetic of integer bounds stays exact.
Number = Annotated[
    int | float,
    _FINITE,
    AfterValidator(must("must be a number that a double can hold", is_number)),
    WithJsonSchema({"type": "number"}),
]
Positive = Annotated[
    int | float,
    PlainValidator(_POSITIVE),
    WithJsonSchema({"type": "number", "exclusiveMinimum": 0}),
]
TargetMs = Annotated[
    int | float, PlainValidator(_TARGET), WithJsonSchema({"type": "number", "minimum": 0})
]
# pydantic's own integer type limits the number of digits.
Whole = Annotated[int, PlainValidator(_INTEGER), WithJsonSchema({"type": "integer"})]
PoolRef = Annotated[
    int | str,
    PlainValidator(_POOL),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string"}]}),
]
Array = Annotated[tuple[T, ...], BeforeValidator(_array)]
Maybe = Annotated[T | None, BeforeValidator(_GIVEN)]
Count = Annotated[int, Field(ge=1)]
# Tables of workers hold 64 bits; no sensible limit needs more than half of them.
Limit = Annotated[int, Field(ge=1, le=2**31 - 1)]
Name = Annotated[
    str,
    AfterValidator(must("must not be empty", bool)),
    # Names travel in gRPC messages, which are UTF-8, and half a surrogate pair has no UTF-8.
    AfterValidator(
        must(
            "must not have half of a surrogate pair",
            lambda v: not any("\ud800" <= char <= "\udfff" for char in v),
        )
    ),
    Field(json_schema_extra={"minLength": 1}),
]
Word = Annotated[
    str,
    AfterValidator(
        must(
            "must have printable characters, and some besides spaces",
            lambda v: v.isprintable() and v.strip() != "",
        )
    ),
    Field(json_schema_extra={"pattern": r"\S"}),
]
Address = Annotated[
    str,
    AfterValidator(_address),
    Field(json_schema_extra={"pattern": f"^{_HOST}:[1-9][0-9]{{0,4}}$"}),
]


SpillMode = Literal["none", "listed", "any"]
AdmissionMode = Literal["off", "shadow", "on"]
BypassMode = Literal["off", "auto"]
ClassPolicy = Literal["protect", "shed", "relegate"]

ADMISSION_MODES: tuple[AdmissionMode, ...] = get_args(AdmissionMode)

ANY_CLASS = "*"
"""The entry of `objectives` for requests of no class, or of one that is not listed."""

# The depth of the table depends on the axes, so its content is checked in `rules`.
Table = Array[object]


def _says(text: str) -> Any:
    return Field(description=text)


SizeBound = Annotated[Maybe[Number], _says("An end of the axis, in tokens.")]
LatencyBound = Annotated[Maybe[Number], _says("An end of the axis, in milliseconds.")]
Bands = Annotated[Maybe[Count], _says("How many bands of equal width the axis has.")]
SizeEdges = Annotated[
    Maybe[Array[Number]],
    _says("Instead of min, max and resolution: n+1 ascending numbers of tokens make n bands."),
]
LatencyEdges = Annotated[
    Maybe[Array[Number]],
    _says("Instead of min, max and resolution: n+1 ascending numbers of ms make n bands."),
]
Pool = Annotated[PoolRef, _says("A pool: its position in the list of pools, or its name.")]
Names = Annotated[Array[Name], _says("The names of the pools, by position.")]
Speeds = Annotated[
    Maybe[Array[Whole]], _says("An integer for each pool, lower is faster; without it 0, 1, 2, ...")
]
NPools = Annotated[Count, _says("How many pools the stage has.")]


class _FileObject(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class OverrideRule(_FileObject):
    """Requests with a priority in this range, ends included, go to this pool whatever the grid says."""

    min_priority: AnyNumber
    max_priority: AnyNumber
    target_pool: Pool


Rules = Annotated[
    Array[OverrideRule], _says("Rules over the grid; the first one with the priority counts.")
]


class PrefillStrategy(_FileObject):
    """The grid of ISL (tokens) by TTFT target (ms); the mapping is `[isl][ttft]`."""

    isl_min: SizeBound = None
    isl_max: SizeBound = None
    isl_resolution: Bands = None
    isl_edges: SizeEdges = None
    ttft_min_ms: LatencyBound = None
    ttft_max_ms: LatencyBound = None
    ttft_resolution: Bands = None
    ttft_edges_ms: LatencyEdges = None
    prefill_pool_mapping: Table
    priority_overrides: Rules = ()


class DecodeStrategy(_FileObject):
    """The grid of context length (tokens) by ITL target (ms); the mapping is `[context][itl]`."""

    context_length_min: SizeBound = None
    context_length_max: SizeBound = None
    context_length_resolution: Bands = None
    context_length_edges: SizeEdges = None
    itl_min_ms: LatencyBound = None
    itl_max_ms: LatencyBound = None
    itl_resolution: Bands = None
    itl_edges_ms: LatencyEdges = None
    decode_pool_mapping: Table
    priority_overrides: Rules = ()


class AggStrategy(_FileObject):
    """The grid of TTFT by ITL target (ms): `[ttft][itl]`, or `[isl][ttft][itl]` with the isl keys."""

    isl_min: SizeBound = None
    isl_max: SizeBound = None
    isl_resolution: Bands = None
    isl_edges: SizeEdges = None
    ttft_min_ms: LatencyBound = None
    ttft_max_ms: LatencyBound = None
    ttft_resolution: Bands = None
    ttft_edges_ms: LatencyEdges = None
    itl_min_ms: LatencyBound = None
    itl_max_ms: LatencyBound = None
    itl_resolution: Bands = None
    itl_edges_ms: LatencyEdges = None
    agg_pool_mapping: Table
    priority_overrides: Rules = ()


class PoolSpec(_FileObject):
    """Where the workers of one pool are, how fast they are to begin with, and what plans count with."""

    workers: Annotated[Array[Address], _says("Addresses as host:port or [IPv6]:port.")] = ()
    profile: Annotated[
        Maybe[Word], _says("The name of a packaged profile, or the path of one; needs tp.")
    ] = None
    tp: Annotated[Maybe[Count], _says("The tensor parallel size to read from the profile.")] = None
    max_inflight: Annotated[
        Maybe[Limit],
        _says(
            "The most requests a worker gets at once. Without it a decode or agg worker gets as many as "
            "its engine runs at once, a prefill worker any number."
        ),
    ] = None
    max_queued_tokens: Annotated[
        Maybe[Limit],
        _says("A worker with as many prompt tokens left to process gets no further prompt."),
    ] = None
    cost: Annotated[Maybe[Positive], _says("GPUs per worker; without it tp, or else 1.")] = None
    replicas: Annotated[
        Maybe[Count],
        _says(
            "How many workers plans count with; without it those of workers, or else 1. Serving ignores it."
        ),
    ] = None
    batch: Annotated[
        Maybe[Limit],
        _says(
            "How many requests its engine runs at once, for plans, which take no more than max_inflight; "
            "without both 256. Serving ignores it."
        ),
    ] = None

    @property
    def planned_workers(self) -> int:
        """How many workers plans count with: `replicas`, else those listed, else 1."""
        return self.replicas or len(self.workers) or 1

    @property
    def gpus(self) -> int | float:
        """What one worker costs, in GPUs: `cost`, else `tp`, else 1."""
        return self.cost if self.cost is not None else self.tp or 1


class Scheduling(_FileObject):
    """What becomes of requests that are predicted to miss their targets, and where prompts are computed."""

    spill: Annotated[
        SpillMode,
        _says(
            "The pools among which load decides for a request with targets, which goes to the first where "
            "it is predicted to meet them: the first of its cell only (none); those that the cell lists "
            "(listed); or all of the stage, the cheapest by cost first (any)."
        ),
    ] = "listed"
    admission: Annotated[
        AdmissionMode,
        _says(
            "Whether requests that are predicted to miss their targets everywhere are refused, by the "
            "policy of their class: never (off), only counted as if they were (shadow), or refused (on). "
            "A gateway that runs can be told otherwise, until its next reload."
        ),
    ] = "off"
    bypass: Annotated[
        BypassMode,
        _says(
            "Whether a decode worker computes the prompt too, without a prefill worker: never (off), or "
            "where it is predicted to meet both targets by itself, and prefill and decode workers to miss "
            "one or to take longer to the first token (auto)."
        ),
    ] = "off"


class Objective(_FileObject):
    """A class: the targets and priority of requests that name none, and how it fares under overload."""

    ttft_ms: Annotated[Maybe[TargetMs], _says("TTFT target, milliseconds.")] = None
    itl_ms: Annotated[Maybe[TargetMs], _says("ITL target, milliseconds.")] = None
    priority: Annotated[
        Maybe[Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]],
        _says("Higher is more important; it is the rank of the class as well."),
    ] = None
    policy: Annotated[
        ClassPolicy,
        _says(
            "What happens to a request that is predicted to miss its targets, where admission is on: it is "
            "refused (shed), waits behind all others (relegate), or is served late (protect). Room is kept "
            "for protected classes, whatever the admission."
        ),
    ] = "shed"
    weight: Annotated[
        Positive, _says("Its share beside other classes of the same priority; not acted on yet.")
    ] = 1


def default_for(objectives: Mapping[str, Objective], name: str) -> Objective | None:
    """The defaults of class `name` (empty: no class), or else of `ANY_CLASS`, if there are any."""
    return objectives.get(name) or objectives.get(ANY_CLASS)


class _File(_FileObject):
    """What all fleet files have. Validation checks values one by one, `rules` how they agree."""

    enable_priority_retry: Annotated[
        bool, _says("Whether a request that failed before its first output may go to faster pools.")
    ] = False
    scheduling: Annotated[
        Scheduling, _says("Spill to other pools, admission, and bypass of prefill workers.")
    ] = Scheduling()
    pools: Annotated[
        dict[str, PoolSpec], _says("By name of the pool: its workers, profile, limits and cost.")
    ] = {}
    objectives: Annotated[
        dict[str, Objective],
        _says(
            f'Defaults by class; "{ANY_CLASS}" is for requests of no class, or of one that is not here.'
        ),
    ] = {}


class PrefillFile(_File):
    """The content of a file with the prefill half of a fleet, without a mode."""

    num_prefill_pools: NPools
    prefill_pool_dynamo_namespaces: Names
    prefill_pool_priorities: Speeds = None
    prefill_pool_selection_strategy: PrefillStrategy


class DisaggFile(PrefillFile):
    """The content of a fleet file with mode "disagg": prefill pools and decode pools."""

    mode: Literal["disagg"] = "disagg"
    num_decode_pools: NPools
    decode_pool_dynamo_namespaces: Names
    decode_pool_priorities: Speeds = None
    decode_pool_selection_strategy: DecodeStrategy


class AggFile(_File):
    """The content of a fleet file with mode "agg": pools that do both phases."""

    mode: Literal["agg"]
    num_agg_pools: NPools
    agg_pool_dynamo_namespaces: Names
    agg_pool_priorities: Speeds = None
    agg_pool_selection_strategy: AggStrategy


FILES: dict[str, type[PrefillFile] | type[AggFile]] = {
    "disagg": DisaggFile,
    "agg": AggFile,
    "prefill": PrefillFile,
}
STRATEGIES: dict[str, type[BaseModel]] = {
    "prefill_pool_selection_strategy": PrefillStrategy,
    "decode_pool_selection_strategy": DecodeStrategy,
    "agg_pool_selection_strategy": AggStrategy,
}
