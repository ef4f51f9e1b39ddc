"""The values that may stand at a key of a fleet file, each with what JSON schema says of it."""

import ipaddress
import math
import re
from typing import Annotated, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

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


def _number(value: object) -> object:
    if not is_number(value):
        if is_finite_number(value):
            raise PydanticCustomError("double", "must be a number that a double can hold")
        raise PydanticCustomError("number", "must be a finite number")
    return value


def _any_number(value: object) -> object:
    if not is_finite_number(value):
        raise PydanticCustomError("number", "must be a finite number")
    return value


def _positive(value: object) -> object:
    if not is_number(value) or not value > 0:  # type: ignore[operator]
        raise PydanticCustomError("positive", "must be a finite number above 0")
    return value


def _target(value: object) -> object:
    if not is_number(value) or value < 0:  # type: ignore[operator]
        raise PydanticCustomError("target", "must be a finite number, 0 or above")
    return value


def _pool(value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise PydanticCustomError("pool", "must be a pool number or the name of a pool")
    return value


def _array(value: object) -> object:
    if not isinstance(value, list | tuple):
        raise PydanticCustomError("array", "must be a list")
    return tuple(value)


def _given(value: object) -> object:
    # Absent is the one way to leave a key out: null reads as "nothing" to some and as "zero" to others.
    if value is None:
        raise PydanticCustomError("null", "must not be null, leave the key out instead")
    return value


def _whole(value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, int):
        raise PydanticCustomError("integer", "must be an integer")
    return value


def _name(value: str) -> str:
    if not value:
        raise PydanticCustomError("blank", "must not be empty")
    # Names travel in gRPC messages, which are UTF-8, and half a surrogate pair has no UTF-8.
    if any("\ud800" <= char <= "\udfff" for char in value):
        raise PydanticCustomError("surrogate", "must not have half of a surrogate pair")
    return value


def _word(value: str) -> str:
    if not value.strip() or not value.isprintable():
        raise PydanticCustomError("word", "must have printable characters, and some besides spaces")
    return value


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


# Not converted to float: a bound keeps its type, and so the arithmetic its exact result.
Number = Annotated[int | float, PlainValidator(_number), WithJsonSchema({"type": "number"})]
Positive = Annotated[
    int | float,
    PlainValidator(_positive),
    WithJsonSchema({"type": "number", "exclusiveMinimum": 0}),
]
TargetMs = Annotated[
    int | float, PlainValidator(_target), WithJsonSchema({"type": "number", "minimum": 0})
]
# Compared and never calculated with, so that it need not fit a double.
AnyNumber = Annotated[int | float, PlainValidator(_any_number), WithJsonSchema({"type": "number"})]
# pydantic's own limits its digits.
Whole = Annotated[int, PlainValidator(_whole), WithJsonSchema({"type": "integer"})]
PoolRef = Annotated[
    int | str,
    PlainValidator(_pool),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string"}]}),
]
Array = Annotated[tuple[T, ...], BeforeValidator(_array)]
Maybe = Annotated[T | None, BeforeValidator(_given)]
Count = Annotated[int, Field(ge=1)]
# Tables of workers hold 64 bits; nobody means more than half of that.
Limit = Annotated[int, Field(ge=1, le=2**31 - 1)]
Name = Annotated[str, AfterValidator(_name), Field(json_schema_extra={"minLength": 1})]
Word = Annotated[str, AfterValidator(_word), Field(json_schema_extra={"pattern": r"\S"})]
Address = Annotated[
    str,
    AfterValidator(_address),
    Field(json_schema_extra={"pattern": f"^{_HOST}:[1-9][0-9]{{0,4}}$"}),
]
