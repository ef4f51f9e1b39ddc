"""Whether a gateway can serve with the pools of a file: workers for each, and profiles it can read."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from slagate.pools.grid_draft import ABSENT, Path, dicts_in
from slagate.pools.json_text import json_path, named, shown
from slagate.workers.profile import load_profile

HALF = "is the prefill half of a fleet; add the decode keys to serve requests"


class Fault(NamedTuple):
    """One thing that is wrong with the workers."""

    path: Path
    reason: str
    got: object

    @property
    def shown(self) -> str:
        """What stands there, for a message."""
        return "nothing" if self.got is ABSENT else shown(self.got)


def worker_faults(
    roles: Mapping[str, str], addresses: Mapping[str, Sequence[object] | None]
) -> Iterator[Fault]:
    """What keeps the gateway from serving with `addresses` (None: refused already) by pool.

    `roles` has the stage of each pool of the grids.
    """
    for name, stage in roles.items():
        if name not in addresses:
            reason = f"is required, as a {stage} pool has this name"
            yield Fault(("pools", name), reason, ABSENT)
        elif addresses[name] is not None and not addresses[name]:
            yield Fault(("pools", name, "workers"), "must not be empty", [])
    first_place: dict[str, Path] = {}
    for name, workers in addresses.items():
        if name not in roles:
            reason = f"is not one of the pools {', '.join(map(named, roles))}"
            yield Fault(("pools", name), reason, name)
        for at, address in enumerate(workers or ()):
            path: Path = ("pools", name, "workers", at)
            if not isinstance(address, str):
                continue
            first = first_place.setdefault(address.lower(), path)
            if first != path:
                yield Fault(path, f"is at {json_path(first)} already", address)


def profile_faults(specs: object) -> Iterator[Fault]:
    """The profiles in `specs`, the pools of a file by name, that cannot be read or have no such `tp`."""
    for name, spec in dicts_in(specs):
        profile, tp = spec.get("profile"), spec.get("tp")
        if not isinstance(profile, str) or not profile.strip():
            continue  # refused for that
        key = "profile"
        try:
            measured = load_profile(profile)
            key = "tp"
            if type(tp) is int:
                measured.tp(tp)
        except ValueError as error:  # a ProfileError, or a path that is none
            yield Fault(("pools", name, key), str(error), spec[key])
