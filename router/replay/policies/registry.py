"""The policies that a replay knows, by name, with their parameters."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from slagate.router.replay.policies.choose import PeerChoice, Router
from slagate.router.replay.policies.dynamo_kv import DynamoKv
from slagate.router.replay.policies.llmd_headroom import LlmdHeadroom
from slagate.router.replay.policies.lmetric import LMetric
from slagate.router.replay.policies.mooncake import Mooncake
from slagate.router.replay.policies.polyserve import PolyServe
from slagate.router.replay.policies.round_robin import RoundRobin
from slagate.router.replay.policies.smg_wait import SmgWait
from slagate.router.replay.policies.static_grid import StaticGrid
from slagate.router.replay.policies.view import PeerPolicy
from slagate.router.request.settings import Settings
from slagate.router.scheduling.policy import choose_by_load
from slagate.workers.runtime.usage import UsageError, nearest

Value = float | str
"""Of a parameter."""

PEERS: Mapping[str, Callable[..., PeerPolicy]] = {
    "round_robin": RoundRobin,
    "static_grid": StaticGrid,
    "dynamo_kv": DynamoKv,
    "lmetric": LMetric,
    "smg_wait": SmgWait,
    "llmd_headroom": LlmdHeadroom,
    "mooncake": Mooncake,
    "polyserve": PolyServe,
}

OWN: Mapping[str, Router] = {
    "slagate": Router(),
    "prefix": Router(choose=choose_by_load),
    "least_loaded": Router("least_loaded", choose_by_load),
}
"""The gateway's own: as it serves; by predicted seconds in the grid's pool; the same without caches."""

NAMES = (*OWN, *PEERS)
"""All policies, the gateway's own first."""


class Parameter(NamedTuple):
    """A parameter of a policy: its default, and the values that a search tries."""

    default: Value
    tried: tuple[Value, ...]


def parameters_of(policy: str) -> Mapping[str, Parameter]:
    """The parameters of a policy, by name. Raises `UsageError` for one that is not known."""
    _check_name(policy, NAMES, "policy")
    peer = PEERS.get(policy)
    if peer is None:
        return {}  # those of the gateway's own are settings of a gateway
    assert isinstance(peer, type)
    assert dataclasses.is_dataclass(peer)
    found = {}
    for field in dataclasses.fields(peer):
        if field.init:
            assert isinstance(field.default, int | float | str)
            found[field.name] = Parameter(field.default, field.metadata["tune"])
    return found


def make(policy: str, parameters: Mapping[str, object]) -> Router:
    """A router for one run. Raises `UsageError` naming the policy or parameter that is wrong."""
    known = parameters_of(policy)
    for name, value in parameters.items():
        if not known:
            raise UsageError(f"parameters.{policy}.{name}: {policy} has no parameters")
        _check_name(name, known, f"parameters.{policy}")
        _check_value(value, known[name], f"parameters.{policy}.{name}")
    if policy in OWN:
        return OWN[policy]
    # The gateway's own index of prefixes is what peers see of caches.
    return Router(Settings.policy, PeerChoice(PEERS[policy](**parameters)))


def _check_name(name: str, known: Iterable[str], where: str) -> None:
    if name not in known:
        near = nearest(name, known)
        meant = f'did you mean "{near}"?' if near else f"known are {', '.join(known)}"
        raise UsageError(f'{where}: "{name}" is not known, {meant}')


def _check_value(value: object, of: Parameter, where: str) -> None:
    if isinstance(of.default, str):
        if value not in of.tried:
            allowed = " or ".join(f'"{each}"' for each in of.tried)
            raise UsageError(f"{where}: must be {allowed}, got {value!r}")
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise UsageError(f"{where}: must be a number from 0 on, got {value!r}")
    if isinstance(of.default, int) and not isinstance(value, int):
        raise UsageError(f"{where}: must be a whole number, got {value!r}")
