"""Lint, G5: priority overrides, and what a retry can change."""

import math
from collections.abc import Iterator, Sequence

from slagate.pools.grid import PriorityRule, StageGrid
from slagate.pools.grid_lint_codes import Finding, Hit, grouped
from slagate.pools.grid_lint_view import StageView, brackets, number

_INT32 = (-(2**31), 2**31 - 1)

_Range = tuple[int, int]


def live_rules(grid: StageGrid) -> list[PriorityRule]:
    """The overrides that some priority on the wire can match."""
    return [rule for rule, left in zip(grid.rules, _matched(grid), strict=True) if left]


def overrides(view: StageView) -> Iterator[Finding]:
    """The findings of G5 about one stage."""
    grid = view.grid
    for at, (rule, left) in enumerate(zip(grid.rules, _matched(grid), strict=True)):
        if not _sendable(grid, rule):
            sent = f"{0 if grid.negative_is_none else _INT32[0]:,} to {_INT32[1]:,}"
            yield Finding(
                "G502",
                view.places.rule(at),
                f"{_range(rule)} has no whole number from {sent}, and priorities are such",
                "Correct the range, or take the override out.",
            )
        elif not left:
            yield Finding(
                "G501",
                view.places.rule(at),
                f"{_range(rule)} is covered by the overrides before it, and the first match counts",
                "Move it before them, or take it out.",
            )
        else:
            yield from _demotion(view, at, rule)
    yield from _equals(view)
    yield from _contradictions(view)


def retry_changes_nothing(views: Sequence[StageView]) -> Iterator[Finding]:
    """G505, which is about the whole file."""
    if not any(view.grid.retry for view in views) or any(_has_retry(view) for view in views):
        return
    firsts = sum(len({pools[0] for pools in _orders(view)}) for view in views)
    yield Finding(
        "G505",
        "enable_priority_retry",
        f"none of the {firsts} pools that cells and overrides name first has a strictly faster one to go"
        " on to that is not listed already",
        "Switch it off, or order the pool priorities so that slow pools can go on to fast ones.",
    )


def _orders(view: StageView) -> list[tuple[int, ...]]:
    """The lists of pools that a request can start with: of a cell, or of an override."""
    return [*view.cells.values(), *((rule.pool,) for rule in live_rules(view.grid))]


def _has_retry(view: StageView) -> bool:
    return any(set(view.grid.retry_order(pools[0])) - set(pools) for pools in _orders(view))


def _demotion(view: StageView, at: int, rule: PriorityRule) -> Iterator[Finding]:
    if rule.low <= 0:
        return  # what is less important than the rest may well get less
    hits = []
    for index, (own, *_) in view.cells.items():
        size = view.sizes(index).high
        if view.slower(rule.pool, own, size):
            message = (
                f"{_range(rule)} goes to {view.names[rule.pool]}, but in {view.cell_words(index)}"
                f" requests without a priority get the faster {view.names[own]}:"
                f" {view.why_slower(rule.pool, own, size)}"
            )
            hits.append(Hit(view.places.rule(at), brackets(index), message))
    advice = "Send high priorities to the fastest pool; to hold work back, use priorities below 0."
    yield from grouped("G503", hits, advice)


def _equals(view: StageView) -> Iterator[Finding]:
    if not view.grid.retry:
        return
    lists = _orders(view)
    tried = [{*pools, *view.grid.retry_order(pools[0])} for pools in lists]
    for a in range(view.n_pools):
        for b in range(a + 1, view.n_pools):
            level = view.grid.priorities[a]
            if view.grid.priorities[b] != level:
                continue
            apart = any(
                pools[0] in (a, b) and not {a, b} <= order
                for pools, order in zip(lists, tried, strict=True)
            )
            if apart:
                yield Finding(
                    "G504",
                    view.places.priorities(),
                    f"{view.names[a]} and {view.names[b]} both have priority {level}; a retry goes to"
                    " strictly faster pools only, so neither takes what the other could not",
                    "Give them different priorities, or list the other one as spill in the cells.",
                )


def _contradictions(view: StageView) -> Iterator[Finding]:
    if not view.grid.retry:
        return
    sizes = sorted({size for index in view.cells for size in view.sizes(index)})
    for a in range(view.n_pools):
        for b in range(view.n_pools):
            has_profiles = view.profiles[a] is not None and view.profiles[b] is not None
            faster_by_number = view.grid.priorities[a] < view.grid.priorities[b]
            if has_profiles and faster_by_number and all(view.slower(a, b, s) for s in sizes):
                yield Finding(
                    "G506",
                    view.places.priorities(),
                    f"{view.names[a]} has priority {view.grid.priorities[a]}, faster than"
                    f" {view.grid.priorities[b]} of {view.names[b]}, but is slower at every size:"
                    f" {view.why_slower(a, b, sizes[-1])}; a retry would go to it from there",
                    "Number the pools from fast to slow.",
                )


def _range(rule: PriorityRule) -> str:
    return f"priority {number(rule.low)} to {number(rule.high)}"


def _sendable(grid: StageGrid, rule: PriorityRule) -> _Range | None:
    """The whole numbers of a rule that a request can bring as its priority."""
    least = 0 if grid.negative_is_none else _INT32[0]
    low, high = max(math.ceil(rule.low), least), min(math.floor(rule.high), _INT32[1])
    return (low, high) if low <= high else None


def _matched(grid: StageGrid) -> Iterator[list[_Range]]:
    """For each rule the ranges of priorities that come to it, after the rules before it."""
    free: list[_Range] = [_INT32]
    for rule in grid.rules:
        sendable = _sendable(grid, rule)
        if sendable is None:
            yield []
            continue
        low, high = sendable
        yield [(max(a, low), min(b, high)) for a, b in free if a <= high and b >= low]
        below = [(a, min(b, low - 1)) for a, b in free if a < low]
        free = below + [(max(a, high + 1), b) for a, b in free if b > high]
