"""Lint, G3: cells against what the profiles predict, in time and in GPUs.

A cell has sizes and targets. Its best case is the shortest prompt with the loosest target, its worst case
the longest with the tightest; the table of Dynamo's planner is made for the worst case, too.
"""

from collections.abc import Iterator, Mapping, Sequence
from operator import le
from typing import NamedTuple

from slagate.pools.grid_lint_codes import Finding, Hit, Hits
from slagate.pools.grid_lint_view import (
    AHEAD,
    Band,
    Index,
    StageView,
    Times,
    brackets,
    is_above,
    ms,
    tokens,
    word,
)
from slagate.pools.grid_words import number_text

_SIZES_LOOKED_AT = 5


def cost(view: StageView) -> Iterator[Finding]:
    """The findings of G3; none about pools without a profile."""
    if all(profile is not None for profile in view.profiles):
        yield from _unmet(view)
    yield from _misses(view)
    yield from _expensive(view)


class _Rival(NamedTuple):
    """A pool beside that of a cell, and what both take at a size of the cell, by latency of the grid."""

    pool: int
    size: float
    times: tuple[tuple[Times, Times], ...]  # the cell's own first


def _unmet(view: StageView) -> Iterator[Finding]:
    never, long = Hits(), Hits()
    fastest: dict[float, dict[str, tuple[float, int]]] = {}
    for band in view.size_bands:
        for size in band:
            fastest[size] = {field: _fastest(view, size, field) for field in view.fields}
    for index in view.cells:
        targets = view.targets(index)
        low, high = view.sizes(index)
        if field := _unmet_field(fastest[low], targets):
            never.add(_unmet_at, view, index, low, field, *fastest[low][field])
        elif field := _unmet_field(fastest[high], targets):
            long.add(_unmet_at, view, index, high, field, *fastest[high][field])
    yield from never.findings(
        "G301", "Begin the latency axis at what the fastest pool can do, or add a faster pool."
    )
    yield from long.findings(
        "G302", "Widen the band, cut the size axis more finely, or add a faster pool."
    )


def _fastest(view: StageView, size: float, field: str) -> tuple[float, int]:
    """The least time of any pool with a profile, in ms, and that pool."""
    times = ((view.times_ms(pool, size, field), pool) for pool in sorted({*view.kinds}))
    return min((time.idle, pool) for time, pool in times if time is not None)


def _unmet_field(
    fastest: Mapping[str, tuple[float, int]], targets: Mapping[str, Band]
) -> str | None:
    """The first latency of which not even the loosest target of a cell is met; None: all are."""
    for field, (_, loosest_ms) in targets.items():
        if is_above(fastest[field][0], loosest_ms):
            return field
    return None


def _unmet_at(
    view: StageView, index: Index, size: float, field: str, time_ms: float, pool: int
) -> Hit:
    loosest_ms = view.targets(index)[field].high
    message = (
        f"{view.cell_words(index)} promises at most {number_text(loosest_ms)} ms {word(field)};"
        f" {view.names[pool]}, the fastest, takes {ms(time_ms)} for {tokens(size)} on an idle worker"
    )
    return Hit(view.places.cell(index), brackets(index), message)


def _misses(view: StageView) -> list[Finding]:
    hits = Hits()
    rivals: dict[tuple[Band, int], list[_Rival]] = {}
    for index, (own, *_) in view.cells.items():
        key = view.sizes(index), view.kinds[own]
        if key not in rivals:
            rivals[key] = list(_rivals(view, *key))
        targets = view.targets(index)
        for rival in rivals[key]:
            if (field := _missed(rival, targets)) is not None:
                hits.add(_missed_at, view, index, rival, field)
                break
    advice = "Give the cell the faster pool, or begin its band at what its own pool can do."
    return hits.findings("G303", advice)


def _rivals(view: StageView, sizes: Band, own: int) -> Iterator[_Rival]:
    """Pools that are faster than `own` in some latency at some size, longest prompts first.

    A pool that is faster only while it is idle is no better.
    """
    low, high = sizes
    n_steps = _SIZES_LOOKED_AT - 1 if high > low else 1
    others = sorted({*view.kinds} - {own})
    for step in range(n_steps, -1, -1):
        size = int(low + (high - low) * step / n_steps)
        for other in others:
            times = []
            for field in view.fields:
                own_times, other_times = (view.times_ms(pool, size, field) for pool in (own, other))
                if own_times is not None and other_times is not None:
                    times.append((own_times, other_times))
            if any(_is_better(*pair) for pair in times):
                yield _Rival(other, size, tuple(times))


def _is_better(own: Times, other: Times) -> bool:
    return other.busy <= own.busy and other.idle < own.idle


def _missed(rival: _Rival, targets: Mapping[str, Band]) -> int | None:
    """The latency, by number, of a target that the cell's own pool misses and the rival meets."""
    found = None
    for at, ((own, other), (low_ms, high_ms)) in enumerate(
        zip(rival.times, targets.values(), strict=True)
    ):
        if other.idle >= high_ms:
            return None  # the other one does not meet it either
        if found is None and _is_better(own, other) and is_above(own.idle, max(low_ms, other.idle)):
            found = at
    return found


def _missed_at(view: StageView, index: Index, rival: _Rival, at: int) -> Hit:
    field, (low_ms, _) = list(view.targets(index).items())[at]
    own_times, other_times = rival.times[at]
    message = (
        f"{view.cell_words(index)} goes to {view.names[view.cells[index][0]]}, whose idle workers take"
        f" {ms(own_times.idle)} {word(field)} for {tokens(rival.size)}; {view.names[rival.pool]} meets"
        f" targets from {ms(max(low_ms, other_times.idle))}"
    )
    return Hit(view.places.cell(index), brackets(index), message)


def _expensive(view: StageView) -> list[Finding]:
    hits = Hits()
    by_cost = sorted(
        {
            (view.gpus[pool], kind): pool for pool, kind in reversed([*enumerate(view.kinds)])
        }.values(),
        key=lambda pool: (view.gpus[pool], pool),
    )
    busy_ms: dict[float, list[tuple[int, list[float]]]] = {}
    for band in view.size_bands:
        busy_ms[band.high] = list(_busy(view, by_cost, band.high))
    for index, (own, *_) in view.cells.items():
        if view.is_open_ended(index):
            continue
        lows = [target.low for target in view.targets(index).values()]
        for pool, times_ms in busy_ms[view.sizes(index).high]:
            if view.gpus[pool] >= view.gpus[own]:
                break
            if all(map(le, times_ms, lows)):
                hits.add(_cheaper, view, index, pool)
                break
    advice = (
        f"Give the cell the cheaper pool. Busy means a full batch, and {AHEAD} prompts ahead that are as"
        " long as the axis goes."
    )
    return hits.findings("G304", advice)


def _busy(view: StageView, pools: Sequence[int], size: float) -> Iterator[tuple[int, list[float]]]:
    """The pools with a profile, and what their busy workers take in ms, by latency of the grid."""
    for pool in pools:
        times = [view.times_ms(pool, size, field) for field in view.fields]
        busy_ms = [each.busy for each in times if each is not None]
        if busy_ms:
            yield pool, busy_ms


def _cheaper(view: StageView, index: Index, pool: int) -> Hit:
    own, size = view.cells[index][0], view.sizes(index).high
    busy = {field: view.times_ms(pool, size, field) for field in view.fields}
    takes = " and ".join(f"{ms(t.busy)} {word(field)}" for field, t in busy.items() if t)
    message = (
        f"{view.cell_words(index)} goes to {view.names[own]} at {number_text(view.gpus[own])} GPUs a"
        f" worker; {view.names[pool]} at {number_text(view.gpus[pool])} takes {takes} for {tokens(size)},"
        " even when busy"
    )
    return Hit(view.places.cell(index), brackets(index), message)
