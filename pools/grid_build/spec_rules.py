"""The rules between values of a build spec, checked on its content as it was read.

Values of a wrong type are ignored here: the check of the spec's shape has a message for each of them.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from slagate.pools.grid.errors import Problem
from slagate.pools.grid.json_text import is_finite_number, json_path, shown

Path = tuple[str | int, ...]

_CURVES = {"prefill": ("ttft_curve",), "decode": ("itl_curve",), "agg": ("ttft_curve", "itl_curve")}
_UNIFORM = ("min", "max", "resolution")

MAX_EDGE = 2**31 - 1
"""The limit of every axis, in tokens or milliseconds: no prompt is longer, and no target is 24 days."""


def contradictions(
    content: Mapping[str, Any], stages: Sequence[str], axes: Mapping[str, Sequence[str]]
) -> Iterator[Problem]:
    """Yield a problem for each broken rule between values of `stages`; `axes` has the axes by stage."""
    names: dict[str, str] = {}
    for stage in stages:
        part = content.get(stage)
        if not isinstance(part, dict):
            continue
        for axis in axes[stage]:
            if isinstance(part.get(axis), dict):
                yield from _axis((stage, axis), part[axis])
        pools = part.get("pools")
        for at, pool in enumerate(pools if isinstance(pools, list) else ()):
            if isinstance(pool, dict):
                path = (stage, "pools", at)
                yield from _name(path, pool.get("name"), names)
                yield from _speed(path, pool, _CURVES[stage])
                yield from _workers(path, pool)
        traffic = content.get("traffic")
        has_isl = isinstance(traffic, dict) and "isl" in traffic
        if stage == "agg" and "isl" not in part and not has_isl:
            yield _problem((stage, "isl"), "is required without traffic.isl (got nothing)")


def _axis(path: Path, axis: Mapping[str, Any]) -> Iterator[Problem]:
    uniform = [key for key in _UNIFORM if key in axis]
    if "edges" in axis:
        if uniform:
            yield _problem((*path, uniform[0]), "does not go together with edges", axis[uniform[0]])
        edges = axis["edges"]
        if isinstance(edges, list):
            if len(edges) < 2:
                yield _problem((*path, "edges"), "must have at least 2 entries", edges)
            yield from _ascending((*path, "edges"), edges)
            yield from _not_negative((*path, "edges", 0), edges[0] if edges else None)
            for at, edge in enumerate(edges):
                yield from _not_huge((*path, "edges", at), edge)
        return
    for key in _UNIFORM:
        if key not in axis:
            yield _problem((*path, key), "is required without edges (got nothing)")
    low, high = axis.get("min"), axis.get("max")
    yield from _not_negative((*path, "min"), low)
    if is_finite_number(low) and is_finite_number(high) and low >= high:
        yield _problem((*path, "max"), f"must be above min, which is {shown(low)}", high)
    yield from _not_huge((*path, "max"), high)


def _not_huge(path: Path, value: object) -> Iterator[Problem]:
    if is_finite_number(value) and value > MAX_EDGE:
        yield _problem(path, f"must be at most {MAX_EDGE}", value)


def _not_negative(path: Path, value: object) -> Iterator[Problem]:
    if is_finite_number(value) and value < 0:
        yield _problem(path, "must be at least 0", value)


def _ascending(path: Path, values: Sequence[Any]) -> Iterator[Problem]:
    for at in range(1, len(values)):
        before, value = values[at - 1], values[at]
        if is_finite_number(before) and is_finite_number(value) and value <= before:
            yield _problem((*path, at), f"must be above the one before, {shown(before)}", value)


def _name(path: Path, name: object, names: dict[str, str]) -> Iterator[Problem]:
    if isinstance(name, str):
        first = names.setdefault(name, json_path(path))
        if first != json_path(path):
            yield _problem((*path, "name"), f"is the name of {first} already", name)


def _speed(path: Path, pool: Mapping[str, Any], curves: Sequence[str]) -> Iterator[Problem]:
    given = [key for key in ("ttft_curve", "itl_curve") if key in pool]
    for key in given:
        if key not in curves:
            yield _problem((*path, key), "says nothing of a pool of this stage", pool[key])
        elif "profile" in pool:
            yield _problem((*path, key), "does not go together with profile", pool[key])
        elif isinstance(pool[key], list):
            points = pool[key]
            if len(points) < 2:
                yield _problem((*path, key), "must have at least 2 points", points)
            tokens = [p[0] if isinstance(p, list) and len(p) == 2 else None for p in points]
            yield from _ascending((*path, key), tokens)
    if "profile" in pool:
        if "tp" not in pool:
            yield _problem((*path, "tp"), "is required with profile (got nothing)")
        return
    for key in curves:
        if key not in pool:
            yield _problem((*path, key), "is required without profile (got nothing)")


def _workers(path: Path, pool: Mapping[str, Any]) -> Iterator[Problem]:
    workers, replicas = pool.get("workers"), pool.get("replicas")
    if not isinstance(workers, list) or not workers or not isinstance(replicas, int):
        return
    if replicas != len(workers):
        reason = f"must be {len(workers)}, the number of workers, or left out"
        yield _problem((*path, "replicas"), reason, replicas)


_NOTHING = object()


def _problem(path: Path, reason: str, got: object = _NOTHING) -> Problem:
    return Problem(json_path(path), reason if got is _NOTHING else f"{reason} (got {shown(got)})")
