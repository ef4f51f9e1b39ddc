"""Checking what names pools in a strategy: the entries of the mapping, and the targets of overrides."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from slagate.pools.fleet_file.draft import ConfigReport, Path
from slagate.pools.grid.json_text import shown


class MappingSide(NamedTuple):
    """How many entries the mapping has along one axis; None when the file does not say."""

    key: str
    resolution: int | None


class PoolNames(NamedTuple):
    """The pools of a stage; None for what the file does not say."""

    stage: str
    n_pools: int | None
    names: Sequence[object] | None
    elsewhere: Mapping[str, str]  # pool to stage, of the other stages

    def number(self, entry: object) -> int | None:
        """The number of the pool that `entry` names, if it names one."""
        if isinstance(entry, str):
            return list(self.names or ()).index(entry) if entry in (self.names or ()) else None
        return entry if isinstance(entry, int) else None

    def fault(self, entry: object) -> str | None:
        """Why `entry` names no pool of this stage."""
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
    """The mapping of one stage: its sides from the outermost in, and the pools there are."""

    draft: ConfigReport
    sides: Sequence[MappingSide]
    pools: PoolNames

    def check(self, path: Path, entry: object, place: tuple[int, ...] = ()) -> None:
        """Check `entry`, which is at `place` in the mapping, and all that is in it."""
        if len(place) == len(self.sides):
            self._check_cell(path, entry, place)
        elif not isinstance(entry, list | tuple):
            self.draft.refuse(path, f"{self._name(place)}: must be a list", entry)
        else:
            self._check_size(path, entry, place)
            for at, part in enumerate(entry):
                self.check((*path, at), part, (*place, at))

    def _check_cell(self, path: Path, entry: object, place: tuple[int, ...]) -> None:
        if not isinstance(entry, list | tuple):
            self._check_pool(path, entry, place)
            return
        if not entry:
            self.draft.refuse(path, f"{self._name(place)}: must have a pool", entry)
        seen: dict[int, int] = {}
        for at, part in enumerate(entry):
            self._check_pool((*path, at), part, place)
            number = self.pools.number(part)
            if number in seen:
                reason = f"is in this cell twice, first at [{seen[number]}]"
                self.draft.refuse((*path, at), f"{self._name(place)}: {reason}", part)
            elif number is not None:
                seen[number] = at

    def _check_pool(self, path: Path, entry: object, place: tuple[int, ...]) -> None:
        fault = self.pools.fault(entry)
        if fault is not None:
            self.draft.refuse(path, f"{self._name(place)}: {fault}", entry)

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
        self.draft.refuse(path, reason, entry)

    def _name(self, place: tuple[int, ...]) -> str:
        names = ("layer", "row", "column")[-len(self.sides) :]
        return ", ".join(f"{name} {at}" for name, at in zip(names, place, strict=False))
