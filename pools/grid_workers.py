"""Whether a gateway can serve with the pools of a file: whether each has workers of its own."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from slagate.pools.grid_draft import ABSENT, Path
from slagate.pools.json_text import named, short_path

HALF = "is the prefill half of a fleet; add the decode keys to serve requests"


class Fault(NamedTuple):
    """One thing that is wrong with the pools."""

    path: Path
    reason: str
    got: object


def worker_faults(
    roles: Mapping[str, str], addresses: Mapping[str, Sequence[object] | None]
) -> Iterator[Fault]:
    """What keeps the gateway from serving with `addresses` by pool.

    Those of a pool are None when they were refused already, and () when there is no key for them. `roles`
    has the stage of each pool of the grids.
    """
    for name, stage in roles.items():
        if name not in addresses:
            reason = f"is required, as a {stage} pool has this name"
            yield Fault(("pools", name), reason, ABSENT)
        elif addresses[name] is not None and not addresses[name]:
            got = ABSENT if addresses[name] == () else addresses[name]
            yield Fault(("pools", name, "workers"), "must not be empty", got)
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
                yield Fault(path, f"is at {short_path(first)} already", address)
