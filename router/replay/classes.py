"""Classes of requests: their shares of the traffic and their targets."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError

from slagate.pools.fleet_file.models import (
    Array,
    ClassPolicy,
    Limit,
    Positive,
    Word,
    is_number,
)
from slagate.pools.fleet_file.validation import problems
from slagate.pools.grid.errors import ConfigError, Problem
from slagate.pools.grid.json_text import ROOT, json_path, read_json, shown

SHARES_WITHIN = 1e-6
"""So far may the sum of all shares be from 1: thirds are written with a few digits."""

MAX_NAME = 200
"""Characters: with a tenant's number behind it, it is the text of a metadata key."""


class RequestClass(NamedTuple):
    """A class of requests. Its `policy` and `weight` are as in the fleet file; None: what that says."""

    name: Annotated[Word, Field(max_length=MAX_NAME)]
    share: Positive  # of the conversations, in (0, 1]
    ttft_ms: Positive
    itl_ms: Positive
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0  # higher is more important
    policy: ClassPolicy | None = None
    weight: Positive | None = None
    max_tokens: Limit = 2048  # the cap that its requests name


def _object(value: object) -> object:
    if not isinstance(value, dict):
        raise PydanticCustomError("object", "must be an object")
    return value


Classes = Annotated[Array[Annotated[RequestClass, BeforeValidator(_object)]], Field(min_length=1)]
KEYS = {"classes": RequestClass._fields}


class _ClassFile(NamedTuple):
    classes: Classes


_FILE = TypeAdapter(_ClassFile, config=ConfigDict(strict=True))


def load_classes(path: str | Path) -> tuple[RequestClass, ...]:
    """The classes in the JSON list at `path`. Raises `ConfigError` with all problems of the file."""
    value = read_file(path, "classes")
    found: list[Problem] = []
    try:
        file = _FILE.validate_python({"classes": value})
    except ValidationError as error:
        found = list(problems(error, KEYS))
    found += contradictions(value)
    if found:
        raise ConfigError(str(path), found)
    return file.classes


def read_file(path: str | Path, *names: str) -> Any:
    """The JSON value in a file. Raises `ConfigError`, also for a key that is there twice.

    `names` are put in front of places in the file.
    """
    try:
        value, problem, repeated = read_json(Path(path).read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError:
        problem, repeated = Problem(ROOT, "cannot be read: save it as UTF-8"), ()
    except (OSError, ValueError) as error:  # a path with a NUL in it is a ValueError
        reason = f"cannot be read: {getattr(error, 'strerror', None) or error}"
        problem, repeated = Problem(ROOT, reason), ()
    found = [
        Problem(json_path((*names, *at)), "is given more than once, keep one") for at in repeated
    ]
    if problem is not None:
        found = [problem]
    if found:
        raise ConfigError(str(path), found)
    return value


def contradictions(classes: object) -> Iterator[Problem]:
    """What is wrong with a list of classes besides single values; malformed ones are skipped."""
    if not isinstance(classes, list):
        return
    parts = [each for each in classes if isinstance(each, dict)]
    names = Counter(name for each in parts if isinstance(name := each.get("name"), str))
    for at, each in enumerate(classes):
        if isinstance(each, dict) and names.get(each.get("name", ""), 0) > 1:
            yield Problem(
                f"classes[{at}].name", f"is of more than one class (got {shown(each['name'])})"
            )
    shares = [each["share"] for each in parts if is_number(each.get("share"))]
    if len(shares) == len(classes):
        total = math.fsum(shares)
        if shares and abs(total - 1) > SHARES_WITHIN:
            yield Problem("classes", f"all shares together must be 1 (got {total:g})")


def drawn(classes: Sequence[RequestClass], seed: int, conversation: int) -> RequestClass:
    """The class of a conversation.

    The first 8 bytes of SHA-256 of `SEED:ID`, as a fraction of 2^64, fall into one of the cumulated shares.
    """
    at, end = _fractions(seed, conversation)[0], 0.0
    for each in classes:
        end += each.share
        if at < end:
            return each
    return classes[-1]


def drawn_tenant(sla: RequestClass, n_tenants: int, seed: int, conversation: int) -> str:
    """The tenant of a conversation of this class, one of so many; all of them are as likely."""
    return f"{sla.name}-{int(_fractions(seed, conversation)[1] * n_tenants) + 1}"


def _fractions(seed: int, conversation: int) -> tuple[float, float]:
    """Two numbers in [0, 1) that have nothing to do with each other: of the first and next 8 bytes."""
    digest = sha256(f"{seed}:{conversation}".encode()).digest()
    first, second = (int.from_bytes(digest[at : at + 8], "big") / 2**64 for at in (0, 8))
    return first, second
