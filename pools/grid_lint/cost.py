"""Lint, G3: cells compared with the predictions of profiles, in time and in GPUs.

The worst case of a cell is the longest prompt with the tightest target; the table of Dynamo's planner is
made for that, too. A single cell that no pool meets is no finding, as every grid has long prompts with
tight targets. A band of which no cell is met is one.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from slagate.pools.grid.grid import number_text
from slagate.pools.grid_lint.times import BUSY, Times
from slagate.pools.grid_lint.view import (
    Band,
    Index,
    LintedStage,
    band_words,
    brackets,
    is_above,
    ms,
    sampled_sizes,
    tokens,
    word,
)
from slagate.workers.findings import Finding, FindingPlace, FindingPlaces

_TO_SPARE = 0.1
"""The share of its target that a cheaper pool must keep free, as plans do."""


def cost_findings(view: LintedStage) -> Iterator[Finding]:
    """Yield G301 to G304: cells and latency axes that predictions of profiles contradict."""
    if all(profile is not None for profile in view.profiles):
        yield from _unmet(view)
    yield from _misses(view)
    yield from _expensive(view)


_Pairs = tuple[tuple[Times, Times], ...]
"""The times of the cell's own pool and of another one, by latency of the grid."""


class _Rival(NamedTuple):
    """Another pool than that of a cell, and the times of both at a size and for the longest prompts."""

    pool: int
    size: float
    times: _Pairs
    longest: tuple[_Pairs, ...]


def _unmet(view: LintedStage) -> Iterator[Finding]:
    shortest = min(band.low for band in view.size_bands)
    never, long = FindingPlaces(), FindingPlaces()
    for axis_at in view.latency_axes:
        axis = view.grid.axes[axis_at]
        time_ms, pool = _fastest(view, shortest, axis.field)
        for at in range(axis.resolution):
            if is_above(time_ms, axis.edges[at + 1]):
                never.count(_never_met, view, axis_at, at, shortest, time_ms, pool)
        if is_above(time_ms, axis.high):
            continue  # all of its bands are findings already
        *inner, last = view.size_bands
        # The last of several bands has all longer prompts too, so its end is not the longest of them.
        for size in (*(band.high for band in inner), last.low if inner else last.high):
            time_ms, pool = _fastest(view, size, axis.field)
            if is_above(time_ms, axis.high):
                long.count(_too_long, view, axis_at, size, time_ms, pool)
    yield from never.warnings(
        "G301", "Begin the latency axis at what the fastest pool can do, or add a faster pool."
    )
    yield from long.warnings(
        "G302", "Extend the latency axis to what the fastest pool takes, or add a faster pool."
    )


def _fastest(view: LintedStage, size: float, field: str) -> tuple[float, int]:
    """The least time of any pool with a profile, in ms, and that pool."""
    times = ((view.times_ms(pool, size, field), pool) for pool in sorted({*view.kinds}))
    return min((time.idle, pool) for time, pool in times if time is not None)


def _never_met(
    view: LintedStage, axis_at: int, at: int, size: float, time_ms: float, pool: int
) -> FindingPlace:
    axis = view.grid.axes[axis_at]
    message = (
        f"no request of the {word(axis.field)} band {band_words(axis, at)} is ever met; {view.names[pool]},"
        f" the fastest, takes {ms(time_ms)} for {tokens(size)} on an idle worker"
    )
    return FindingPlace(view.paths.bands(axis.field), f"{band_words(axis, at)}", message)


def _too_long(
    view: LintedStage, axis_at: int, size: float, time_ms: float, pool: int
) -> FindingPlace:
    axis = view.grid.axes[axis_at]
    message = (
        f"the {word(axis.field)} axis ends at {number_text(axis.high)} ms; {view.names[pool]}, the fastest,"
        f" takes {ms(time_ms)} for {tokens(size)} on an idle worker"
    )
    return FindingPlace(view.paths.axis_end(axis.field, last=True), tokens(size), message)


def _misses(view: LintedStage) -> list[Finding]:
    hits = FindingPlaces()
    rivals: dict[tuple[Band, int], list[_Rival]] = {}
    for index, (own, *_) in view.cells.items():
        key = view.sizes(index), view.kinds[own]
        if key not in rivals:
            rivals[key] = list(_rivals(view, *key))
        targets = view.targets(index)
        for rival in rivals[key]:
            if (field := _missed(rival, targets)) is not None:
                hits.count(_missed_at, view, index, rival, field)
                break
    advice = "Give the cell the faster pool, or begin its band at what its own pool can do."
    return hits.warnings("G303", advice)


def _rivals(view: LintedStage, sizes: Band, own: int) -> Iterator[_Rival]:
    """Pools that are faster than `own` in some latency at some size, longest prompts first.

    A pool must be faster under all loads. Slower ones for the longest prompts are ruled out by `_missed`.
    """
    others = sorted({*view.kinds} - {own})
    longest = {
        other: tuple(_pairs(view, own, other, size) for size in view.longest(sizes))
        for other in others
    }
    for size in sampled_sizes(sizes):
        for other in others:
            times = _pairs(view, own, other, size)
            if any(theirs.less(mine) for mine, theirs in times):
                yield _Rival(other, size, times, longest[other])


def _pairs(view: LintedStage, own: int, other: int, size: float) -> _Pairs:
    """The times of both pools by latency; empty where one of them has no profile."""
    pairs = (
        tuple(view.times_ms(pool, size, field) for pool in (own, other)) for field in view.fields
    )
    return tuple((a, b) for a, b in pairs if a is not None and b is not None)


def _missed(rival: _Rival, targets: Mapping[str, Band]) -> int | None:
    """The number of a latency with a target that the cell's own pool misses and the rival meets."""
    for pairs in rival.longest:
        for (own, other), (low_ms, _) in zip(pairs, targets.values(), strict=True):
            if not other.at_most(own) and other.busy > low_ms:
                return None
    found = None
    for at, ((own, other), (low_ms, high_ms)) in enumerate(
        zip(rival.times, targets.values(), strict=True)
    ):
        if other.idle >= high_ms:
            return None  # the other one does not meet it either
        if found is None and other.less(own) and is_above(own.idle, max(low_ms, other.idle)):
            found = at
    return found


def _missed_at(view: LintedStage, index: Index, rival: _Rival, at: int) -> FindingPlace:
    field, (low_ms, _) = list(view.targets(index).items())[at]
    own_times, other_times = rival.times[at]
    message = (
        f"{view.cell_words(index)} goes to {view.names[view.cells[index][0]]}, whose idle workers take"
        f" {ms(own_times.idle)} {word(field)} for {tokens(rival.size)}; {view.names[rival.pool]} meets"
        f" targets from {ms(max(low_ms, other_times.idle))}"
    )
    return FindingPlace(view.paths.cell(index), brackets(index), message)


def _expensive(view: LintedStage) -> list[Finding]:
    hits = FindingPlaces()
    by_cost = sorted(
        {
            (view.gpus[pool], kind): pool for pool, kind in reversed([*enumerate(view.kinds)])
        }.values(),
        key=lambda pool: (view.gpus[pool], pool),
    )
    for index, (own, *_) in view.cells.items():
        if view.is_open_ended(index):
            continue
        for pool in by_cost:
            if view.gpus[pool] >= view.gpus[own]:
                break
            if view.is_met_when_busy(pool, index, to_spare=_TO_SPARE):
                hits.count(_cheaper, view, index, pool)
                break
    advice = (
        f"Give the cell the cheaper pool. Busy means {BUSY:.0%} of its time, or of its batch, among"
        " prompts that are as long as the axis goes."
    )
    return hits.warnings("G304", advice)


def _cheaper(view: LintedStage, index: Index, pool: int) -> FindingPlace:
    own, size = view.cells[index][0], view.sizes(index).high
    busy = {field: view.times_ms(pool, size, field) for field in view.fields}
    takes = " and ".join(f"{ms(t.busy)} {word(field)}" for field, t in busy.items() if t)
    message = (
        f"{view.cell_words(index)} goes to {view.names[own]} at {number_text(view.gpus[own])} GPUs a"
        f" worker; {view.names[pool]} at {number_text(view.gpus[pool])} takes {takes} for {tokens(size)},"
        " even when busy"
    )
    return FindingPlace(view.paths.cell(index), brackets(index), message)
