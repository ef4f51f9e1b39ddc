"""Pools that are not in the fleet file: a file of their own, and addresses on the command line."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from slagate.pools.fleet_file.draft import ConfigReport, Path


class Overlay(NamedTuple):
    """A value to put over that of a fleet file at `path`, and where it is from."""

    path: Path
    value: object
    prefix: str
    there: Path


def from_file(content: Mapping[str, object], name: str) -> Iterable[Overlay]:
    """The pools section of `content`, which the file `name` holds; what is in no section stays out."""
    prefix = f"{name}: "
    pools = content.get("pools")
    if not isinstance(pools, dict):
        yield Overlay(("pools",), pools, prefix, ("pools",))
        return
    for pool, spec in pools.items():
        path: Path = ("pools", pool)
        if not isinstance(spec, dict):
            yield Overlay(path, spec, prefix, path)
            continue
        yield Overlay(path, {}, prefix, path)
        for key, value in spec.items():
            yield Overlay((*path, key), value, prefix, (*path, key))


def from_options(workers: Mapping[str, Sequence[str]]) -> Iterable[Overlay]:
    """Addresses by pool, as `--pool` gives them."""
    for pool, addresses in workers.items():
        yield Overlay(("pools", pool), {}, "--pool ", (pool,))
        yield Overlay(("pools", pool, "workers"), list(addresses), "--pool ", (pool,))


def lay_over(content: dict[str, Any], overlays: Iterable[Overlay], draft: ConfigReport) -> None:
    """Put each of `overlays` into `content`, whose objects must be copies."""
    for overlay in overlays:
        *parents, key = overlay.path
        at: Any = content
        for parent in parents:
            at = at.setdefault(parent, {}) if isinstance(at, dict) else None
        if not isinstance(at, dict):
            continue  # what is there is no object, and will be refused
        if overlay.value == {} and isinstance(at.get(key), dict):
            continue
        at[key] = overlay.value
        draft.move(overlay.path, overlay.there, prefix=overlay.prefix)
