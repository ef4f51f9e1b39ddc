"""The differences between two configurations of a fleet, in lines for people. Pools are matched by name."""

from collections.abc import Callable, Iterable, Iterator
from itertools import product

from slagate.pools.fleet.fleet import Prepared
from slagate.pools.fleet_file.models import Objective, PoolSpec, Scheduling
from slagate.pools.grid.grid import AnyAxis, PriorityRule, StageGrid, UnevenAxis
from slagate.pools.grid.json_text import named, shown

MAX_CELLS = 64
"""The most changed cells of one stage that are listed."""


def changes(old: Prepared, new: Prepared) -> Iterator[str]:
    """Yield a line of text for each change in meaning from `old` to `new`, not in spelling."""
    was, now = old.config, new.config
    yield from _changed("mode", was.mode, now.mode)
    for stage in _either(was.stages, now.stages):
        before, after = was.stages.get(stage), now.stages.get(stage)
        if before is None or after is None:
            yield f"{stage} grid: {'added' if before is None else 'removed'}"
        else:
            yield from _grid(stage, before, after)
    for name in _either(was.pools, now.pools):
        yield from _pool(name, old, new)
    for key in Scheduling.model_fields:
        yield from _changed(
            f"scheduling: {key}", getattr(was.scheduling, key), getattr(now.scheduling, key)
        )
    for name in _either(was.objectives, now.objectives):
        objectives = was.objectives.get(name), now.objectives.get(name)
        yield from _changed(f"objective {named(name)}", *objectives, show=_objective)


def _grid(stage: str, old: StageGrid, new: StageGrid) -> Iterator[str]:
    for name in _either(old.pool_names, new.pool_names):
        of = f"{stage} pool {named(name)}"
        if name not in new.pool_names:
            yield f"{of}: removed"
        elif name not in old.pool_names:
            yield f"{of}: added, priority {shown(_priority(new, name))}"
        else:
            yield from _changed(f"{of}: priority", _priority(old, name), _priority(new, name))
    old_axes = {axis.field: axis for axis in old.axes}
    new_axes = {axis.field: axis for axis in new.axes}
    for field in _either(old_axes, new_axes):
        axes = old_axes.get(field), new_axes.get(field)
        yield from _changed(f"{stage} axis {field}", *axes, show=_bands)
    if [axis.resolution for axis in old.axes] == [axis.resolution for axis in new.axes]:
        yield from _cells(stage, old, new)
    else:
        yield from _changed(f"{stage} cells", _shape(old), _shape(new))
    yield from _changed(f"{stage} priority_overrides", _rules(old), _rules(new), show=_rules_text)
    yield from _changed(f"{stage} enable_priority_retry", old.retry, new.retry)
    negatives = old.negative_is_none, new.negative_is_none
    yield from _changed(f"{stage} targets and priorities below 0 count as none", *negatives)


def _cells(stage: str, old: StageGrid, new: StageGrid) -> Iterator[str]:
    n_changed = 0
    for index in product(*(range(axis.resolution) for axis in new.axes)):
        before, after = _names(old, index), _names(new, index)
        if before != after:
            n_changed += 1
            if n_changed <= MAX_CELLS:
                at = "".join(f"[{part}]" for part in index)
                yield f"{stage} cell {at}: {_in_order(before)} -> {_in_order(after)}"
    if n_changed > MAX_CELLS:
        yield f"{stage} cells: {n_changed - MAX_CELLS} more change"


def _pool(name: str, old: Prepared, new: Prepared) -> Iterator[str]:
    was, now = old.config.pools.get(name), new.config.pools.get(name)
    of = f"pool {named(name)}"
    if was is None or now is None:
        n_workers = len((was or now or PoolSpec()).workers)
        workers = "1 worker" if n_workers == 1 else f"{n_workers} workers"
        yield f"{of}: {'added' if was is None else 'removed'}, {workers}"
        return
    yield from (f"{of}: + {address}" for address in _beyond(now.workers, was.workers))
    yield from (f"{of}: - {address}" for address in _beyond(was.workers, now.workers))
    for key in PoolSpec.model_fields:
        if key != "workers":
            yield from _changed(f"{of}: {key}", getattr(was, key), getattr(now, key))
    is_same_table = (was.profile, was.tp) == (now.profile, now.tp)
    if is_same_table and not old.estimators[name].starts_as(new.estimators[name]):
        yield f"{of}: profile {now.profile} has another content"


def _text(value: object) -> str:
    if value is None:
        return "none"
    return named(value) if isinstance(value, str) else shown(value)


def _changed(
    what: str, old: object, new: object, *, show: Callable[..., str] = _text
) -> Iterator[str]:
    if old != new:
        yield f"{what} {show(old)} -> {show(new)}"


def _either(old: Iterable[str], new: Iterable[str]) -> list[str]:
    return list(dict.fromkeys([*old, *new]))


def _beyond(some: Iterable[str], others: Iterable[str]) -> list[str]:
    known = set(others)
    return [each for each in some if each not in known]


def _priority(grid: StageGrid, name: str) -> int:
    return grid.priorities[grid.pool_names.index(name)]


def _names(grid: StageGrid, index: tuple[int, ...]) -> tuple[str, ...]:
    return tuple(grid.pool_names[pool] for pool in grid.pools_at(index))


def _in_order(names: Iterable[str]) -> str:
    return ", ".join(map(named, names))


def _shape(grid: StageGrid) -> str:
    return " x ".join(str(axis.resolution) for axis in grid.axes)


def _bands(axis: AnyAxis | None) -> str:
    if axis is None:
        return "none"
    if isinstance(axis, UnevenAxis):
        return f"edges {', '.join(map(shown, axis.edges))}"
    return f"{shown(axis.low)} to {shown(axis.high)} in {axis.resolution} bands"


def _rules(grid: StageGrid) -> list[tuple[PriorityRule, str]]:
    return [(rule._replace(pool=0), grid.pool_names[rule.pool]) for rule in grid.rules]


def _rules_text(rules: list[tuple[PriorityRule, str]]) -> str:
    lines = (f"{shown(rule.low)} to {shown(rule.high)}: {named(name)}" for rule, name in rules)
    return "; ".join(lines) or "none"


def _objective(objective: Objective | None) -> str:
    if objective is None:
        return "none"
    given = objective.model_dump(exclude_defaults=True)
    return " ".join(f"{key} {_text(value)}" for key, value in given.items()) or "{}"
