"""Lint, G3: cells against what the profiles predict, in time and in GPUs.

A cell has sizes and targets. Its best case is the shortest prompt with the loosest target, its worst case
the longest with the tightest; the table of Dynamo's planner is made for the worst case, too.
"""

from collections.abc import Iterable, Iterator

from slagate.pools.grid_lint_codes import Finding, Hit, grouped
from slagate.pools.grid_lint_view import (
    AHEAD,
    Band,
    StageView,
    brackets,
    is_above,
    ms,
    number,
    tokens,
    word,
)

_SIZES_LOOKED_AT = 5


def cost(view: StageView) -> Iterator[Finding]:
    """The findings of G3; none about pools without a profile."""
    if all(profile is not None for profile in view.profiles):
        yield from _unmet(view)
    yield from _misses(view)
    yield from _expensive(view)


def _fastest(view: StageView, size: float, field: str) -> tuple[float, int]:
    """The least time of any pool with a profile, in ms, and that pool."""
    times = ((view.times_ms(pool, size, field), pool) for pool in range(view.n_pools))
    return min((time.idle, pool) for time, pool in times if time is not None)


def _unmet(view: StageView) -> Iterator[Finding]:
    never: list[Hit] = []
    long: list[Hit] = []
    for index in view.cells:
        sizes = view.sizes(index)
        if message := _unmet_at(view, index, sizes.low):
            never.append(Hit(view.places.cell(index), brackets(index), message))
        elif message := _unmet_at(view, index, sizes.high):
            long.append(Hit(view.places.cell(index), brackets(index), message))
    yield from grouped(
        "G301",
        never,
        "Begin the latency axis at what the fastest pool can do, or add a faster pool.",
    )
    yield from grouped(
        "G302",
        long,
        "Widen the band, cut the size axis more finely, or add a faster pool.",
    )


def _unmet_at(view: StageView, index: tuple[int, ...], size: float) -> str:
    """Says that no pool meets the loosest target of the cell at this size; empty: one does."""
    for field, (_, loosest_ms) in view.targets(index).items():
        time_ms, pool = _fastest(view, size, field)
        if is_above(time_ms, loosest_ms):
            return (
                f"{view.cell_words(index)} promises at most {number(loosest_ms)} ms {word(field)};"
                f" {view.names[pool]}, the fastest, takes {ms(time_ms)} for {tokens(size)} on an idle"
                " worker"
            )
    return ""


def _misses(view: StageView) -> list[Finding]:
    hits = []
    for index, (own, *_) in view.cells.items():
        targets = view.targets(index)
        for other, size in _pairs(view, index, own):
            if (found := _missed(view, own, other, size, targets)) is not None:
                field, from_ms, own_ms = found
                message = (
                    f"{view.cell_words(index)} goes to {view.names[own]}, whose idle workers take"
                    f" {ms(own_ms)} {word(field)} for {tokens(size)}; {view.names[other]}"
                    f" meets targets from {ms(from_ms)}"
                )
                hits.append(Hit(view.places.cell(index), brackets(index), message))
                break
    advice = "Give the cell the faster pool, or begin its band at what its own pool can do."
    return grouped("G303", hits, advice)


def _pairs(view: StageView, index: tuple[int, ...], own: int) -> Iterable[tuple[int, float]]:
    """Other pools and sizes to compare the cell's own pool at, longest prompts first."""
    low, high = view.sizes(index)
    n_steps = _SIZES_LOOKED_AT - 1 if high > low else 1
    others = [pool for pool in range(view.n_pools) if pool != own]
    for step in range(n_steps, -1, -1):
        for other in others:
            yield other, int(low + (high - low) * step / n_steps)


def _missed(
    view: StageView, own: int, other: int, size: float, targets: dict[str, Band]
) -> tuple[str, float, float] | None:
    """A target of the cell that `own` misses and `other` meets: field, the least such, what `own` takes.

    A pool that is faster only while it is idle is no better.
    """
    found = None
    for field, (low_ms, high_ms) in targets.items():
        own_times, other_times = (view.times_ms(pool, size, field) for pool in (own, other))
        if own_times is None or other_times is None or other_times.idle >= high_ms:
            return None  # the other one does not meet it either
        from_ms = max(low_ms, other_times.idle)
        is_better = other_times.busy <= own_times.busy
        if found is None and is_better and is_above(own_times.idle, from_ms):
            found = field, from_ms, own_times.idle
    return found


def _expensive(view: StageView) -> list[Finding]:
    hits = []
    by_cost = sorted(range(view.n_pools), key=lambda pool: view.gpus[pool])
    for index, (own, *_) in view.cells.items():
        if view.is_open_ended(index):
            continue
        size = view.sizes(index).high
        for pool in by_cost:
            if view.gpus[pool] >= view.gpus[own]:
                break
            busy = {field: view.times_ms(pool, size, field) for field in view.fields}
            if all(
                times is not None and times.busy <= view.targets(index)[field].low
                for field, times in busy.items()
            ):
                takes = " and ".join(f"{ms(t.busy)} {word(f)}" for f, t in busy.items() if t)
                message = (
                    f"{view.cell_words(index)} goes to {view.names[own]} at"
                    f" {number(view.gpus[own])} GPUs a worker; {view.names[pool]} at"
                    f" {number(view.gpus[pool])} takes {takes} for {tokens(size)}, even when busy"
                )
                hits.append(Hit(view.places.cell(index), brackets(index), message))
                break
    advice = (
        f"Give the cell the cheaper pool. Busy means a full batch, and {AHEAD} prompts ahead that are as"
        " long as the axis goes."
    )
    return grouped("G304", hits, advice)
