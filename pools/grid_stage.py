"""The grid of one stage, from a fleet file that passed every check."""

from pydantic import BaseModel

from slagate.pools.axis import Axis, UnevenAxis
from slagate.pools.grid import PriorityRule, StageGrid
from slagate.pools.grid_file import AggFile, PrefillFile
from slagate.pools.grid_keys import AxisKeys, StageKeys


def stage_grid(file: PrefillFile | AggFile, keys: StageKeys, *, epp: bool) -> StageGrid:
    """The grid of the stage with `keys`; `epp`: as the endpoint picker counts, and reads unset values."""
    strategy = getattr(file, keys.strategy)
    names: tuple[str, ...] = getattr(file, keys.names)
    axes = [axis for each in keys.axes if (axis := _axis(strategy, each, doubles=epp)) is not None]
    entries: list[object] = list(getattr(strategy, keys.mapping))
    for _ in axes[1:]:
        entries = [entry for row in entries for entry in row]  # type: ignore[attr-defined]
    priorities: tuple[int, ...] | None = getattr(file, keys.priorities)
    return StageGrid(
        axes=tuple(axes),
        cells=tuple(_cell(entry, names) for entry in entries),
        pool_names=names,
        priorities=tuple(range(len(names))) if priorities is None else priorities,
        rules=tuple(
            PriorityRule(rule.min_priority, rule.max_priority, _number(rule.target_pool, names))
            for rule in strategy.priority_overrides
        ),
        retry=file.enable_priority_retry,
        size_optional=any(axis.optional for axis in keys.axes),
        negative_is_none=epp,
    )


def _axis(strategy: BaseModel, keys: AxisKeys, *, doubles: bool) -> Axis | UnevenAxis | None:
    edges = getattr(strategy, keys.edges)
    if edges is not None:
        return UnevenAxis(keys.field, edges)
    low, high, resolution = (getattr(strategy, key) for key in keys.even)
    if low is None:
        return None
    if doubles:
        low, high = float(low), float(high)
    return Axis(keys.field, low, high, resolution)


def _cell(entry: object, names: tuple[str, ...]) -> tuple[int, ...]:
    if isinstance(entry, list | tuple):
        return tuple(_number(pool, names) for pool in entry)
    return (_number(entry, names),)


def _number(pool: object, names: tuple[str, ...]) -> int:
    if isinstance(pool, str):
        return names.index(pool)
    assert isinstance(pool, int), "the file's rules let nothing else pass"
    return pool
