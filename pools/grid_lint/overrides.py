"""Lint, G5: priority overrides, and what a retry can change."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence

from slagate.pools.grid.grid import INT32, PriorityRule, number_text
from slagate.pools.grid_lint.view import Index, LintedStage, brackets
from slagate.workers.findings import MAX_LISTED, Finding, FindingPlace, FindingPlaces, warning


def override_findings(view: LintedStage) -> Iterator[Finding]:
    """Yield G501 to G504 and G506: overrides and pool priorities that do harm in one stage."""
    grid = view.grid
    for at, (rule, left) in enumerate(zip(grid.rules, grid.matched(), strict=True)):
        if not grid.sendable(rule):
            sent = f"{0 if grid.negative_is_none else INT32[0]:,} to {INT32[1]:,}"
            yield warning(
                "G502",
                view.paths.rule(at),
                f"{_range(rule)} has no whole number from {sent}, and priorities are such",
                "Correct the range, or take the override out.",
            )
        elif not left:
            yield warning(
                "G501",
                view.paths.rule(at),
                f"{_range(rule)} is covered by the overrides before it, and the first match counts",
                "Move it before them, or take it out.",
            )
        else:
            yield from _demotion(view, at, rule)
    yield from _equals(view)
    yield from _contradictions(view)


def retry_findings(views: Sequence[LintedStage]) -> Iterator[Finding]:
    """Yield G505 if retry is on, and no request of any stage has a pool to go on to."""
    if not any(view.grid.retry for view in views) or any(map(_goes_on, views)):
        return
    firsts = sum(len({pools[0] for pools in view.starts}) for view in views)
    yield warning(
        "G505",
        "enable_priority_retry",
        f"none of the {firsts} pools that cells and overrides name first has a strictly faster one to go"
        " on to that is not listed already",
        "Switch it off, or order the pool priorities so that slow pools can go on to fast ones.",
    )


def _goes_on(view: LintedStage) -> bool:
    """Whether a retry adds a pool to some list, that is one strictly faster than the first."""
    numbers = view.grid.priorities
    ordered = sorted(numbers)
    return view.grid.retry and any(
        bisect_left(ordered, numbers[first]) > sum(numbers[at] < numbers[first] for at in spill)
        for first, *spill in view.starts
    )


def _demotion(view: LintedStage, at: int, rule: PriorityRule) -> Iterator[Finding]:
    if rule.low <= 0:
        return  # less important requests may well get a slower pool
    hits = FindingPlaces()
    for index, (own, *_) in view.cells.items():
        if own != rule.pool and view.slower_in(index, rule.pool, own):
            hits.count(_demoted, view, at, rule, index)
    advice = "Send high priorities to the fastest pool; to hold work back, use priorities below 0."
    yield from hits.warnings("G503", advice)


def _demoted(view: LintedStage, at: int, rule: PriorityRule, index: Index) -> FindingPlace:
    own = view.cells[index][0]
    message = (
        f"{_range(rule)} goes to {view.names[rule.pool]}, but in {view.cell_words(index)} requests without"
        f" a priority get the faster {view.names[own]}:"
        f" {view.why_slower(rule.pool, own, view.sizes(index).high)}"
    )
    return FindingPlace(view.paths.rule(at), brackets(index), message)


def _equals(view: LintedStage) -> Iterator[Finding]:
    if not view.grid.retry:
        return
    # The equals of a pool that are in every list which starts with it; it cannot go on to the others.
    common: dict[int, set[int]] = {}
    for first, *spill in view.starts:
        common[first] = common.get(first, {*spill}).intersection(spill)
    for level, pools in _by_priority(view).items():
        apart: set[int] = set()
        for first in pools:
            if len(apart) == len(pools):
                break
            if first in common and (others := pools - common[first] - {first}):
                apart |= {first, *others}
        if apart:
            yield warning(
                "G504",
                view.paths.priorities(),
                f"pools {_listed(view, sorted(apart))} have the same priority, {level}; a retry goes to"
                " strictly faster pools only, so none of them takes what another could not",
                "Give them different priorities, or list the other one as spill in the cells.",
            )


def _by_priority(view: LintedStage) -> dict[int, set[int]]:
    """The pools by priority number, for numbers that two or more have."""
    times = Counter(view.grid.priorities)
    levels: dict[int, set[int]] = {level: set() for level, n in times.items() if n > 1}
    for pool, level in enumerate(view.grid.priorities):
        if level in levels:
            levels[level].add(pool)
    return levels


def _listed(view: LintedStage, pools: Sequence[int]) -> str:
    names = [view.names[pool] for pool in pools]
    if len(names) > MAX_LISTED:
        return f"{', '.join(names[:MAX_LISTED])}, ... ({len(names):,} pools)"
    return f"{', '.join(names[:-1])} and {names[-1]}"


def _contradictions(view: LintedStage) -> list[Finding]:
    if not view.grid.retry:
        return []
    sizes = sorted({size for band in view.size_bands for size in band})
    numbers = view.grid.priorities
    measured = [pool for pool in range(view.n_pools) if view.profiles[pool] is not None]
    slowest: dict[int, int] = {}  # the highest priority number among equally fast pools, by kind
    for pool in measured:
        kind = view.kinds[pool]
        if numbers[pool] > numbers[slowest.setdefault(kind, pool)]:
            slowest[kind] = pool
    faster = {
        a: [slowest[b] for b in slowest if all(view.slower(a, b, size) for size in sizes)]
        for a in slowest
    }
    hits = FindingPlaces()
    for a in measured:
        b = max(faster[view.kinds[a]], key=lambda pool: numbers[pool], default=a)
        if numbers[a] < numbers[b]:
            hits.count(_contradicted, view, a, b, sizes[-1])
    return hits.warnings("G506", "Number the pools from fast to slow.")


def _contradicted(view: LintedStage, a: int, b: int, size: float) -> FindingPlace:
    message = (
        f"pool {view.names[a]} has priority {view.grid.priorities[a]}, faster than"
        f" {view.grid.priorities[b]} of {view.names[b]}, but is slower at every size:"
        f" {view.why_slower(a, b, size)}; a retry would go to it from there"
    )
    return FindingPlace(view.paths.priorities(), f"{view.names[a]} before {view.names[b]}", message)


def _range(rule: PriorityRule) -> str:
    return f"priority {number_text(rule.low)} to {number_text(rule.high)}"
