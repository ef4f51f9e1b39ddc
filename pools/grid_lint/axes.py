"""Lint, G2 and G4: the axes of a grid.

G2 is about axes, and the bands that default targets fall in. G4 compares the size axis with the prompts of
a trace, which has no targets.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

from slagate.pools.fleet_file.models import ANY_CLASS, Objective, default_for
from slagate.pools.grid.grid import Axis, Number, UnevenAxis, number_text
from slagate.pools.grid.json_text import json_path
from slagate.pools.grid_lint.view import LintedStage, band, band_words, share, word
from slagate.workers.findings import Finding, warning

_NARROW_MS = {"ttft_ms": 1.0, "itl_ms": 0.1}


def axis_findings(
    view: LintedStage, objectives: Mapping[str, Objective], *, has_traffic: bool
) -> Iterator[Finding]:
    """Yield G201 to G206: bands and default targets; no G204 with traffic, as G402 is better."""
    for axis_at, axis in enumerate(view.grid.axes):
        if axis.field.endswith("_ms"):
            yield from _no_target(view, axis_at, objectives)
            yield from _class_defaults(view, axis_at, objectives)
            least_ms = _NARROW_MS[axis.field]
            unit = f"{least_ms:g} ms"
            yield from _narrow(view, axis, least_ms, unit, "G206", "no prediction is that exact")
        else:
            yield from _narrow(
                view, axis, 1.0, "a token", "G205", "most of them can hold no prompt"
            )
            if axis.low > 0 and not has_traffic:
                yield _late_start(view, axis)


def _default(objective: Objective | None, field: str) -> Number | None:
    if objective is None:
        return None
    return objective.ttft_ms if field == "ttft_ms" else objective.itl_ms


def _no_target(
    view: LintedStage, axis_at: int, objectives: Mapping[str, Objective]
) -> Iterator[Finding]:
    axis = view.grid.axes[axis_at]
    if _default(default_for(objectives, ""), axis.field) is not None:
        return
    at = axis.index(None)
    for line in view.lines(axis_at):
        size = view.sizes(line[at]).high
        pools = [view.cells[index][0] for index in line]
        mine = pools[at]
        tighter = [
            pool for pool in pools[:at] if view.slower_in(line[at], mine, pool, (axis.field,))
        ]
        if tighter and not any(
            view.slower_in(line[at], pool, mine, (axis.field,)) for pool in pools
        ):
            name = word(axis.field)
            why = "the middle of the range"
            if _is_first_of_band(axis, axis.midpoint):
                why += ", which is an edge and counts to the looser band"
            yield warning(
                "G201",
                view.paths.bands(axis.field),
                f"a request that names no {name} target counts as {number_text(axis.midpoint)} ms ({why})"
                f" and gets {view.names[mine]}, the slowest pool of its row, in"
                f" {view.cell_words(line[at])}:"
                f" {view.why_slower(mine, tighter[0], size, (axis.field,))} of {view.names[tighter[0]]}",
                f'Say what such a request gets: objectives["{ANY_CLASS}"].{axis.field}.',
            )
            return


def _class_defaults(
    view: LintedStage, axis_at: int, objectives: Mapping[str, Objective]
) -> Iterator[Finding]:
    axis = view.grid.axes[axis_at]
    for name, objective in objectives.items():
        target = _default(objective, axis.field)
        if target is None:
            continue
        where = json_path(("objectives", name, axis.field))
        if not axis.low <= target <= axis.high:
            end = "first" if target < axis.low else "last"
            yield warning(
                "G203",
                where,
                f"{number_text(target)} ms is outside {number_text(axis.low)} to"
                f" {number_text(axis.high)} ms, so the class counts to the {end} band of the"
                f" {view.stage} grid",
                "Choose a target on the axis, or extend the axis.",
            )
        elif _is_first_of_band(axis, target):
            yield from _on_edge(view, axis_at, target, where)


def _on_edge(view: LintedStage, axis_at: int, target: Number, where: str) -> Iterator[Finding]:
    axis = view.grid.axes[axis_at]
    at = axis.index(target)
    for line in view.lines(axis_at):
        tight, mine = (view.cells[line[band]][0] for band in (at - 1, at))
        size = view.sizes(line[at]).high
        if view.slower_in(line[at], mine, tight, (axis.field,)):
            yield warning(
                "G202",
                where,
                f"{number_text(target)} ms is the edge between two bands and counts to the looser one,"
                f" {band_words(axis, at)}, which in {view.cell_words(line[at])} goes to"
                f" {view.names[mine]} instead of {view.names[tight]}:"
                f" {view.why_slower(mine, tight, size, (axis.field,))}",
                "Choose a target inside of a band, on the side that is meant.",
            )
            return


def _is_first_of_band(axis: Axis | UnevenAxis, value: Number) -> bool:
    return axis.index(math.nextafter(value, -math.inf)) < axis.index(value)


def _late_start(view: LintedStage, axis: Axis | UnevenAxis) -> Finding:
    return warning(
        "G204",
        view.paths.axis_end(axis.field, last=False),
        f"the {word(axis.field)} axis begins at {number_text(axis.low)} tokens; shorter prompts count to"
        f" the band {band_words(axis, 0)}",
        "Begin at 0: it costs nothing, and shows where short prompts go.",
    )


def _narrow(
    view: LintedStage, axis: Axis | UnevenAxis, least: float, unit: str, code: str, so: str
) -> Iterator[Finding]:
    narrow = [at for at in range(axis.resolution) if _width(axis, at) < least]
    if narrow:
        yield warning(
            code,
            view.paths.bands(axis.field),
            f"{len(narrow)} of {axis.resolution} {word(axis.field)} bands are narrower than {unit}, the"
            f" first {band_words(axis, narrow[0])}: {so}",
            "Use fewer bands, or a wider range.",
        )


def _width(axis: Axis | UnevenAxis, at: int) -> float:
    if isinstance(axis, Axis):
        return axis.step
    low, high = band(axis, at)
    return high - low


MISSED_SHARE = 0.01
"""Fewer requests than this outside of an axis are outliers."""

_LISTED = 6


def traffic_findings(view: LintedStage, traffic: Sequence[int]) -> Iterator[Finding]:
    """Yield G401 to G403: where prompts of these lengths (tokens) do not fit the size axis."""
    if view.size_axis is None or not traffic:
        return
    axis = view.grid.axes[view.size_axis]
    name, total = word(axis.field), len(traffic)
    above = sum(size > axis.high for size in traffic)
    if above >= MISSED_SHARE * total:
        yield warning(
            "G401",
            view.paths.axis_end(axis.field, last=True),
            f"{share(above, total)} of the trace are longer than {number_text(axis.high)} tokens and count"
            f" to the last {name} band; the longest has {number_text(max(traffic))}",
            "Extend the axis to the longest prompts: the last band was planned for shorter ones.",
        )
    below = sum(size < axis.low for size in traffic)
    if below >= MISSED_SHARE * total:
        yield warning(
            "G402",
            view.paths.axis_end(axis.field, last=False),
            f"{share(below, total)} of the trace are shorter than {number_text(axis.low)} tokens and"
            f" count to the first {name} band; the shortest has {number_text(min(traffic))}",
            "Begin the axis at 0, or cut a band for the short prompts.",
        )
    used = {axis.index(size) for size in traffic}
    empty = [at for at in range(axis.resolution) if at not in used]
    if empty:
        listed = ", ".join(band_words(axis, at) for at in empty[:_LISTED])
        more = ", ..." if len(empty) > _LISTED else ""
        yield warning(
            "G403",
            view.paths.bands(axis.field),
            f"{len(empty)} of {axis.resolution} {name} bands get none of the {total:,} requests of"
            f" the trace: {listed}{more}",
            "Place the bands where the prompts are, or check that the trace is of this fleet.",
        )
