"""The rules between values of a fleet file, each checked where all its values are valid by themselves.

Rules for serving are here too: `worker_faults` says why a gateway cannot serve with the pools of a file,
and `read_profiles` reads the timing profiles that they name.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from slagate.pools.fleet_file.keys import OVERRIDES, PREFILL, STAGES, AxisKeys, Form, StageKeys
from slagate.pools.fleet_file.models import ANY_CLASS, is_number
from slagate.pools.fleet_file.report import ABSENT, ConfigReport, Path, dicts_in
from slagate.pools.grid.grid import Axis, Number
from slagate.pools.grid.json_text import named, short_path, shown
from slagate.workers.profiles.profile import Profile, TpProfile, load_profile


class MappingSide(NamedTuple):
    """How many entries the mapping must have along one axis (None: not known); `key` says so."""

    key: str
    resolution: int | None


class PoolNames(NamedTuple):
    """The pools of a stage; None for what the file does not say."""

    stage: str
    n_pools: int | None
    names: Sequence[object] | None
    elsewhere: Mapping[str, str]  # pool to stage, of the other stages

    def number(self, entry: object) -> int | None:
        """The number of the pool that `entry` names; None: of none. A number is not checked."""
        if isinstance(entry, str):
            return list(self.names or ()).index(entry) if entry in (self.names or ()) else None
        return entry if isinstance(entry, int) else None

    def fault(self, entry: object) -> str | None:
        """Why `entry` names no pool of this stage; None: it does, or the names are not known."""
        if isinstance(entry, str):
            if self.names is None or entry in self.names:
                return None
            if entry in self.elsewhere:
                return f"is a {self.elsewhere[entry]} pool, and this grid is of {self.stage} pools"
            return f"must be one of the pools {', '.join(map(shown, self.names))}"
        if (
            isinstance(entry, int)
            and not isinstance(entry, bool)
            and entry >= 0
            and (self.n_pools is None or entry < self.n_pools)
        ):
            return None
        last = "" if self.n_pools is None else f" to {shown(self.n_pools - 1)}"
        return f"must be a pool number from 0{last}"


class MappingCheck(NamedTuple):
    """Checks the mapping of one stage, with these sides from the outermost in, and these pools."""

    report: ConfigReport
    sides: Sequence[MappingSide]
    pools: PoolNames

    def check(self, path: Path, entry: object, place: tuple[int, ...] = ()) -> None:
        """Report the problems of `entry`, at `place` in the mapping, and of all entries in it."""
        if len(place) == len(self.sides):
            self._check_cell(path, entry, place)
        elif not isinstance(entry, list | tuple):
            self.report.refuse(path, f"{self._name(place)}: must be a list", entry)
        else:
            self._check_size(path, entry, place)
            for at, part in enumerate(entry):
                self.check((*path, at), part, (*place, at))

    def _check_cell(self, path: Path, entry: object, place: tuple[int, ...]) -> None:
        if not isinstance(entry, list | tuple):
            self._check_pool(path, entry, place)
            return
        if not entry:
            self.report.refuse(path, f"{self._name(place)}: must have a pool", entry)
        seen: dict[int, int] = {}
        for at, part in enumerate(entry):
            self._check_pool((*path, at), part, place)
            number = self.pools.number(part)
            if number in seen:
                reason = f"is in this cell twice, first at [{seen[number]}]"
                self.report.refuse((*path, at), f"{self._name(place)}: {reason}", part)
            elif number is not None:
                seen[number] = at

    def _check_pool(self, path: Path, entry: object, place: tuple[int, ...]) -> None:
        fault = self.pools.fault(entry)
        if fault is not None:
            self.report.refuse(path, f"{self._name(place)}: {fault}", entry)

    def _check_size(self, path: Path, entry: Sequence[object], place: tuple[int, ...]) -> None:
        side = self.sides[len(place)]
        if side.resolution is None or len(entry) == side.resolution:
            return
        fault = "missing" if len(entry) < side.resolution else "too many"
        inner = (0,) * (len(self.sides) - len(place) - 1)
        first = self._name((*place, min(len(entry), side.resolution), *inner))
        reason = (
            f"must have {shown(side.resolution)} entries, as {side.key} says, and has"
            f" {len(entry)}: {first} is {fault}"
        )
        self.report.refuse(path, reason, entry)

    def _name(self, place: tuple[int, ...]) -> str:
        names = ("layer", "row", "column")[-len(self.sides) :]
        return ", ".join(f"{name} {at}" for name, at in zip(names, place, strict=False))


def check_rules(report: ConfigReport, form: Form) -> None:
    """Add a problem to `report` for each rule between values that the file breaks."""
    roles: dict[str, str] = {}
    for stage, keys in STAGES[form.mode].items():
        _check_lengths(report, keys)
        _check_names(report, keys, stage, roles)
    for stage, keys in STAGES[form.mode].items():
        if report.get(keys.strategy) is not None:
            others = {name: role for name, role in roles.items() if role != stage}
            pools = PoolNames(stage, report.get(keys.pool_count), report.get(keys.names), others)
            doubles = form.epp and keys is PREFILL
            sides = [
                _check_axis(report, keys, axis, doubles=doubles)
                for axis in keys.axes
                if not axis.optional or _is_given(report, keys, axis)
            ]
            mapping = report.get(keys.strategy, keys.mapping)
            if mapping is not None:
                MappingCheck(report, sides, pools).check((keys.strategy, keys.mapping), mapping)
            _check_overrides(report, keys, pools)
    for name, spec in dicts_in(report.get("pools")):
        if "profile" in spec and "tp" not in spec:
            report.refuse(("pools", name, "tp"), "is required with profile", ABSENT)
    if "" in (report.get("objectives") or {}):
        reason = f'must be a class, or "{ANY_CLASS}" for requests of none'
        report.refuse(("objectives", ""), reason, report.get("objectives", ""))


def _check_lengths(report: ConfigReport, keys: StageKeys) -> None:
    n_pools = report.get(keys.pool_count)
    said_by = report.written(keys.pool_count)
    for key in (keys.names, keys.priorities):
        entries = report.get(key)
        if n_pools is not None and entries is not None and len(entries) != n_pools:
            size = f"must have {shown(n_pools)} entries, as {said_by} says"
            report.refuse((key,), f"{size}, and has {len(entries)}", entries)


def _check_names(report: ConfigReport, keys: StageKeys, stage: str, roles: dict[str, str]) -> None:
    names = report.content.get(keys.names)
    names = names if isinstance(names, list | tuple) else ()
    for at, name in enumerate(names):
        if not isinstance(name, str) or not name:
            continue
        if name not in roles:
            roles[name] = stage
        elif roles[name] == stage:
            first = f"{report.written(keys.names)}[{names.index(name)}]"
            report.refuse((keys.names, at), f"is in this list twice, first at {first}", name)
        else:
            reason = f"is a {roles[name]} pool already, and a pool has one role"
            report.refuse((keys.names, at), reason, name)


def _is_given(report: ConfigReport, keys: StageKeys, axis: AxisKeys) -> bool:
    return any(key in report.get(keys.strategy) for key in (*axis.even, axis.edges))


def _check_axis(
    report: ConfigReport, keys: StageKeys, axis: AxisKeys, *, doubles: bool
) -> MappingSide:
    where = keys.strategy
    strategy = report.get(where)
    if axis.edges in strategy:
        return _check_edges(report, keys, axis)
    for key in axis.even:
        if key not in strategy:
            reason = "is required"
            if axis.optional:
                reason = f"is required: {', '.join(axis.even)} go together"
            report.refuse((where, key), reason, ABSENT)
    low, high, resolution = (report.get(where, key) for key in axis.even)
    resolution_key = report.written(where, axis.resolution)
    if low is not None and high is not None:
        _check_ends(report, keys, axis, doubles=doubles)
    return MappingSide(resolution_key, resolution)


def _check_ends(report: ConfigReport, keys: StageKeys, axis: AxisKeys, *, doubles: bool) -> None:
    where = keys.strategy
    low, high, resolution = (report.get(where, key) for key in axis.even)
    low_key, high_key, resolution_key = (report.written(where, key) for key in axis.even)
    ends: tuple[Number, Number] = (float(low), float(high)) if doubles else (low, high)
    if ends[0] >= ends[1]:
        reason = f"must be below {high_key}, which is {shown(high)}"
        report.refuse((where, axis.low), reason, low)
    elif resolution is not None:
        with suppress(OverflowError):
            if Axis(axis.field, *ends, resolution).step > 0:
                return
        reason = (
            f"makes no grid with {low_key} {shown(low)} and {resolution_key} {shown(resolution)}:"
            " the width of a band must be a double above 0"
        )
        report.refuse((where, axis.high), reason, high)


def _check_edges(report: ConfigReport, keys: StageKeys, axis: AxisKeys) -> MappingSide:
    path: Path = (keys.strategy, axis.edges)
    strategy, edges = report.get(keys.strategy), report.get(*path)
    beside = [report.written(keys.strategy, key) for key in axis.even if key in strategy]
    if beside:
        reason = f"is there beside {', '.join(beside)}: keep one or the other"
        report.refuse(path, reason, strategy[axis.edges])
    if edges is None:
        return MappingSide(axis.edges, None)
    if len(edges) < 2:
        report.refuse(path, "must have at least 2 numbers, for one band", edges)
        return MappingSide(axis.edges, None)
    for at in range(1, len(edges)):
        if is_number(edges[at - 1]) and is_number(edges[at]) and edges[at] <= edges[at - 1]:
            reason = f"must be above the edge before it, which is {shown(edges[at - 1])}"
            report.refuse((*path, at), reason, edges[at])
    return MappingSide(axis.edges, len(edges) - 1)


def _check_overrides(report: ConfigReport, keys: StageKeys, pools: PoolNames) -> None:
    for at, _ in dicts_in(report.get(keys.strategy, OVERRIDES)):
        path = (keys.strategy, OVERRIDES, at)
        low, high = (report.get(*path, key) for key in ("min_priority", "max_priority"))
        if low is not None and high is not None and low > high:
            high_key = report.written(*path, "max_priority")
            reason = f"must not be above {high_key}, which is {shown(high)}"
            report.refuse((*path, "min_priority"), reason, low)
        target = report.get(*path, "target_pool")
        fault = None if target is None else pools.fault(target)
        if fault is not None:
            report.refuse((*path, "target_pool"), fault, target)


HALF = "is the prefill half of a fleet; add the decode keys to serve requests"


class FleetFault(NamedTuple):
    """Why a gateway cannot serve with the value `got` at `path`, or with nothing there."""

    path: Path
    reason: str
    got: object


def worker_faults(
    roles: Mapping[str, str], addresses: Mapping[str, Sequence[object] | None]
) -> Iterator[FleetFault]:
    """Yield each reason why a gateway cannot serve with these `addresses` by pool.

    They are None for a pool whose addresses were refused already, and () for one without the key. `roles`
    has the stage of each pool of the grids.
    """
    for name, stage in roles.items():
        if name not in addresses:
            reason = f"is required, as a {stage} pool has this name"
            yield FleetFault(("pools", name), reason, ABSENT)
        elif addresses[name] is not None and not addresses[name]:
            got = ABSENT if addresses[name] == () else addresses[name]
            yield FleetFault(("pools", name, "workers"), "must not be empty", got)
    first_place: dict[str, Path] = {}
    for name, workers in addresses.items():
        if name not in roles:
            reason = f"is not one of the pools {', '.join(map(named, roles))}"
            yield FleetFault(("pools", name), reason, name)
        for at, address in enumerate(workers or ()):
            path: Path = ("pools", name, "workers", at)
            if not isinstance(address, str):
                continue
            first = first_place.setdefault(address.lower(), path)
            if first != path:
                yield FleetFault(path, f"is at {short_path(first)} already", address)


def read_profiles(
    specs: Mapping[str, tuple[str, int | None]],
) -> tuple[dict[str, TpProfile], list[FleetFault]]:
    """Read the profiles that pools name: those that can be used, by pool, and faults.

    `specs` has for each pool the name or path of its profile, and its tensor parallel size. Faults
    are at `pools.NAME.profile` or `pools.NAME.tp`. A size of None was refused already: such a pool
    gets no profile, and a fault only where its profile cannot be read.
    """
    found: dict[str, TpProfile] = {}
    faults: list[FleetFault] = []
    files: dict[str, Profile] = {}
    for name, (profile, tp) in specs.items():
        key = "profile"
        try:
            if profile not in files:
                files[profile] = load_profile(profile)
            measured = files[profile]
            if tp is not None:
                key = "tp"
                found[name] = measured.tp(tp)
        except ValueError as error:  # a ProfileError, or a path that is none
            got: object = profile if key == "profile" else tp
            faults.append(FleetFault(("pools", name, key), str(error), got))
    return found, faults
