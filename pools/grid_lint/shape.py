"""Lint, G1: contradictions within the mapping, between its pools and between its bands."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from slagate.pools.grid.grid import Axis
from slagate.pools.grid_lint.view import Index, LintedStage, band_words, brackets, word
from slagate.workers.findings import Finding, FindingPlace, FindingPlaces, warning


def shape_findings(view: LintedStage) -> Iterator[Finding]:
    """Yield G101 to G109: contradictions in the mapping of cells to pools."""
    if view.n_pools == 1:
        return  # there is no choice to be wrong
    yield from _tighter_is_slower(view)
    yield from _longer_is_slower(view)
    yield from _reach(view)
    yield from _sameness(view)
    yield from _spill_order(view)


def _tighter_is_slower(view: LintedStage) -> list[Finding]:
    hits = FindingPlaces()
    for axis_at in view.latency_axes:
        fields = (view.grid.axes[axis_at].field,)
        for line in view.lines(axis_at):
            for tight, loose in pairwise(line):
                a, b = view.cells[tight][0], view.cells[loose][0]
                if a != b and view.slower_in(tight, a, b, fields):
                    hits.count(_slower, view, tight, f"looser {brackets(loose)}", b, fields)
    advice = "Swap the pools of the two cells, or correct the pool priorities or profiles."
    return hits.warnings("G101", advice)


def _longer_is_slower(view: LintedStage) -> list[Finding]:
    hits = FindingPlaces()
    for line in () if view.size_axis is None else view.lines(view.size_axis):
        for short, long in pairwise(line):
            a, b = view.cells[long][0], view.cells[short][0]
            if a != b and view.slower_in(long, a, b) and view.takes_longer_for(a, long, than=short):
                beside = f"shorter {brackets(short)} with the same target"
                hits.count(_slower, view, long, beside, b)
    advice = (
        "Give the longer prompts the faster pool; or, where the slower one meets the target as it is, the"
        " shorter prompts that one, too."
    )
    return hits.warnings("G102", advice)


def _slower(
    view: LintedStage, index: Index, beside: str, other: int, fields: tuple[str, ...] = ()
) -> FindingPlace:
    own = view.cells[index][0]
    message = (
        f"{view.cell_words(index)} goes to {view.names[own]}, which is slower than {view.names[other]} of"
        f" the {beside}: {view.why_slower(own, other, view.sizes(index).high, fields)}"
    )
    return FindingPlace(view.paths.cell(index), brackets(index), message)


def _reach(view: LintedStage) -> Iterator[Finding]:
    first = {pools[0] for pools in view.starts}
    listed = {pool for pools in view.starts for pool in pools}
    reached = view.grid.reached()
    for pool, name in enumerate(view.names):
        advice = "Give it cells of its own, or leave it as a reserve and ignore this code."
        if pool in first:
            continue
        if pool in listed:
            code, why = "G105", "is the first choice of no cell and of no override, only spill"
        elif pool in reached:
            came = f"only a request that another {view.stage} pool could not take comes to it"
            code, why = "G104", f"is in no cell and no override; {came}"
        else:
            alone = "no retry leads to it: its workers never get a request"
            code, why = "G103", f"is in no cell and no override that can match, and {alone}"
            advice = "Name it in the mapping or in an override, or take it out of the file."
        yield warning(code, view.paths.pool(pool), f"pool {name} {why}", advice)


def _sameness(view: LintedStage) -> Iterator[Finding]:
    if len(view.cells) == 1:
        return
    firsts = {pools[0] for pools in view.cells.values()}
    if len(firsts) == 1:
        name = view.names[next(iter(firsts))]
        yield warning(
            "G108",
            view.paths.cell(()),
            f"all {len(view.cells)} cells go to {name}, so neither size nor target matters",
            "Spread the cells over the pools, or make the grid a single cell.",
        )
    if len(set(view.cells.values())) == 1:
        return
    for axis_at, axis in enumerate(view.grid.axes):
        n_bands = axis.resolution
        lines = [[view.cells[index] for index in line] for line in view.lines(axis_at)]
        slices = list(zip(*lines, strict=True))
        name, where = word(axis.field), view.paths.bands(axis.field)
        if n_bands > 1 and len(set(slices)) == 1:
            yield warning(
                "G106",
                where,
                f"all {n_bands} {name} bands go to the same pools, so {name} never matters",
                "Map the bands differently, or cut this axis into one band.",
            )
        elif isinstance(axis, Axis):
            if coarser := _coarser(slices):
                yield warning(
                    "G107",
                    where,
                    f"{n_bands} {name} bands say no more than {coarser} would: each"
                    f" {n_bands // coarser} of them have the same pools",
                    f"Cut this axis into {coarser} bands, unless the finer statistics are wanted.",
                )
        else:
            hits = FindingPlaces()
            for at in [at for at, (a, b) in enumerate(pairwise(slices)) if a == b]:
                bands = f"{band_words(axis, at)} and {band_words(axis, at + 1)}"
                message = f"the {name} bands {bands} have the same pools"
                hits.count(FindingPlace, where, f"bands {at} and {at + 1}", message)
            advice = "Join the two bands, unless the finer statistics are wanted."
            yield from hits.warnings("G107", advice)


def _coarser(slices: Sequence[object]) -> int | None:
    """The least number of equal bands that would do the same; None: all are needed."""
    n_bands = len(slices)
    for coarser in range(2, n_bands):
        width, rest = divmod(n_bands, coarser)
        if not rest and all(slices[at] == slices[at - at % width] for at in range(n_bands)):
            return coarser
    return None


def _spill_order(view: LintedStage) -> list[Finding]:
    hits = FindingPlaces()
    for index, pools in view.cells.items():
        own = pools[0]
        for before, after in pairwise(pools[1:]):
            if view.slower_in(index, before, own) and view.slower_in(index, own, after):
                hits.count(_spilled, view, index, before, after)
                break
    advice = (
        "List the faster pools first: what the cell's own pool just meets, a slower one misses."
    )
    return hits.warnings("G109", advice)


def _spilled(view: LintedStage, index: Index, before: int, after: int) -> FindingPlace:
    own = view.cells[index][0]
    message = (
        f"{view.cell_words(index)} spills from {view.names[own]} to the slower {view.names[before]} before"
        f" the faster {view.names[after]}: {view.why_slower(before, own, view.sizes(index).high)}"
    )
    return FindingPlace(view.paths.cell(index), brackets(index), message)
