"""What the values of a fleet file must say about each other, checked wherever both are usable alone."""

from typing import NamedTuple

from slagate.pools.grid import Axis
from slagate.pools.grid_draft import ABSENT, Draft, Path
from slagate.pools.grid_file import STAGES, STRATEGIES, AxisKeys, StageKeys
from slagate.pools.json_text import shown


class _Side(NamedTuple):
    """How many entries the mapping has along one axis; None when the file does not say."""

    resolution_key: str
    resolution: int | None


def check_rules(draft: Draft, mode: str) -> None:
    """Add to `draft` each contradiction between two values of a file of this mode."""
    taken: dict[str, str] = {}
    for stage, keys in STAGES[mode].items():
        n_pools = draft.get(keys.pool_count)
        _check_lengths(draft, keys, n_pools)
        _check_names(draft, keys, stage, taken)
        strategy = draft.get(keys.strategy)
        if strategy is not None:
            sides = [_check_axis(draft, keys, axis) for axis in _axes_given(strategy, keys)]
            mapping = draft.get(keys.strategy, keys.mapping)
            if mapping is not None:
                _Mapping(draft, sides, n_pools).check((keys.strategy, keys.mapping), mapping)
            _check_overrides(draft, keys, n_pools)
    for name, spec in (draft.get("pools") or {}).items():
        if isinstance(spec, dict) and "profile" in spec and "tp" not in spec:
            draft.refuse(("pools", name, "tp"), "is required with profile", ABSENT)


def _check_lengths(draft: Draft, keys: StageKeys, n_pools: int | None) -> None:
    for key in (keys.names, keys.priorities):
        entries = draft.get(key)
        if n_pools is not None and entries is not None and len(entries) != n_pools:
            size = f"must have {shown(n_pools)} entries, as {keys.pool_count} says"
            draft.refuse((key,), f"{size}, and has {len(entries)}", entries)


def _check_names(draft: Draft, keys: StageKeys, stage: str, taken: dict[str, str]) -> None:
    content = draft.content
    names = content.get(keys.names) if isinstance(content, dict) else None
    for at, name in enumerate(names if isinstance(names, list | tuple) else ()):
        if not isinstance(name, str) or not name.strip():
            continue
        if name not in taken:
            taken[name] = stage
        elif taken[name] == stage:
            draft.refuse((keys.names, at), "is in this list twice", name)
        else:
            reason = f"is a {taken[name]} pool already, and a pool has one role"
            draft.refuse((keys.names, at), reason, name)


def _axes_given(strategy: dict[str, object], keys: StageKeys) -> list[AxisKeys]:
    fields = STRATEGIES[keys.strategy].model_fields
    return [
        axis
        for axis in keys.axes
        if fields[axis.low].is_required()
        or not strategy.keys().isdisjoint((axis.low, axis.high, axis.resolution))
    ]


def _check_axis(draft: Draft, keys: StageKeys, axis: AxisKeys) -> _Side:
    where = keys.strategy
    three = (axis.low, axis.high, axis.resolution)
    fields = STRATEGIES[where].model_fields
    for key in three:
        if key not in draft.get(where) and not fields[key].is_required():
            draft.refuse((where, key), f"is required: {', '.join(three)} go together", ABSENT)
    low, high, resolution = (draft.get(where, key) for key in three)
    if low is not None and high is not None:
        low_key, high_key = draft.written(where, axis.low), draft.written(where, axis.high)
        if low >= high:
            draft.refuse((where, axis.low), f"must be below {high_key}, which is {high}", low)
        elif resolution is not None and not _is_computable(Axis(axis.field, low, high, resolution)):
            reason = (
                f"makes no grid with {low_key} {low} and {axis.resolution} {shown(resolution)}: the width"
                " of a band must be finite and above 0, and the middle finite"
            )
            draft.refuse((where, axis.high), reason, high)
    return _Side(axis.resolution, resolution)


def _is_computable(axis: Axis) -> bool:
    try:
        return 0 < axis.step < float("inf") and abs(axis.midpoint) < float("inf")
    except OverflowError:
        return False


class _Mapping(NamedTuple):
    """The mapping of one stage: its sides from the outermost in, and how many pools there are."""

    draft: Draft
    sides: list[_Side]
    n_pools: int | None

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
        if (
            isinstance(entry, bool)
            or not isinstance(entry, int)
            or not _is_pool(entry, self.n_pools)
        ):
            self.draft.refuse(path, f"{self._name(place)}: {_must_be_pool(self.n_pools)}", entry)

    def _check_size(
        self, path: Path, entry: list[object] | tuple[object, ...], place: tuple[int, ...]
    ) -> None:
        side = self.sides[len(place)]
        if side.resolution is None or len(entry) == side.resolution:
            return
        fault = "missing" if len(entry) < side.resolution else "too many"
        inner = (0,) * (len(self.sides) - len(place) - 1)
        first = self._name((*place, min(len(entry), side.resolution), *inner))
        reason = (
            f"must have {shown(side.resolution)} entries, as {side.resolution_key} says, and has"
            f" {len(entry)}: {first} is {fault}"
        )
        self.draft.refuse(path, reason, entry)

    def _name(self, place: tuple[int, ...]) -> str:
        names = ("layer", "row", "column")[-len(self.sides) :]
        return ", ".join(f"{name} {at}" for name, at in zip(names, place, strict=False))


def _check_overrides(draft: Draft, keys: StageKeys, n_pools: int | None) -> None:
    where: Path = (keys.strategy, "priority_overrides")
    for at in range(len(draft.get(*where) or ())):
        low, high, target = (
            draft.get(*where, at, key) for key in ("min_priority", "max_priority", "target_pool")
        )
        if low is not None and high is not None and low > high:
            reason = f"must not be above max_priority, which is {high}"
            draft.refuse((*where, at, "min_priority"), reason, low)
        if target is not None and not _is_pool(target, n_pools):
            draft.refuse((*where, at, "target_pool"), _must_be_pool(n_pools), target)


def _is_pool(number: int, n_pools: int | None) -> bool:
    return number >= 0 and (n_pools is None or number < n_pools)


def _must_be_pool(n_pools: int | None) -> str:
    last = "" if n_pools is None else f" to {shown(n_pools - 1)}"
    return f"must be a pool number from 0{last}"
