"""The content of a table or picture of a pool grid: names, units, bands, figures, notes, colours of pools.

The colours are those of Okabe and Ito (https://jfly.uni-koeln.de/color/), which people with any colour
vision tell apart. A cell has the name or the number of its pool as well, so that it can be read without
colours.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from slagate.pools.fleet_file.load import FleetConfig
from slagate.pools.fleet_file.models import ANY_CLASS, Scheduling, default_for
from slagate.pools.grid.grid import SIZE_FIELDS, AnyAxis, Axis, Number, StageGrid, number_text
from slagate.router.receipts.attainment import CellTraffic

MAX_NAME = 60


def printable(text: str, most: int = MAX_NAME) -> str:
    r"""`text` on one line with unprintable characters escaped; if longer than `most`, without its middle.

    >>> printable("a\x1b[31m"), printable("prefill-pool-of-the-fast-tier", 16)
    ('a\\x1b[31m', 'prefill…ast-tier')
    """
    escaped = "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )
    if len(escaped) <= most:
        return escaped
    return f"{escaped[: (most - 1) // 2]}…{escaped[-(most // 2) :]}"


def percent(part: int, whole: int) -> str:
    """A part of a whole in percent, rounded down to a tenth, so that no 94.99 % is shown as 95 %.

    >>> percent(9499, 10000), percent(1, 1), percent(1, 3000)
    ('94.9%', '100%', '<0.1%')
    """
    tenths = math.floor(1000 * part / whole)
    if part and not tenths:
        return "<0.1%"
    return f"{tenths / 10:g}%"


Traffic = Mapping[tuple[str, tuple[int, ...]], CellTraffic]
"""Traffic by stage and index of a cell; a cell without an entry had no request."""

LOW_RATIO = 0.95
"""A cell is marked if a smaller share of its requests met their targets."""

FAILED_RATIO = 0.05
"""A cell is marked if this share of its requests failed, or more."""

_TITLES = {
    "isl": "ISL (tokens)",
    "context_length": "context length (tokens)",
    "ttft_ms": "TTFT target (ms)",
    "itl_ms": "ITL target (ms)",
}


class BandLabel(NamedTuple):
    """The edges of one band of an axis, as text."""

    low: str
    high: str
    is_default: bool  # a request without this target lands in it

    def __str__(self) -> str:
        return f"{self.low} to {self.high}"


class AxisView(NamedTuple):
    """One axis: its name with the unit, its bands, and whether these are equally wide."""

    title: str
    bands: tuple[BandLabel, ...]
    is_even: bool


class PoolRow(NamedTuple):
    """A row of the table of pools, with figures as text, `-` for none; the columns are `POOL_COLUMNS`."""

    number: int
    name: str
    tp: str
    gpus: str
    n_workers: str
    priority: str


POOL_COLUMNS = ("pool", "tp", "GPUs per worker", "workers", "priority (lower is faster)")


class Figure(NamedTuple):
    """A figure of a cell: its text, and whether it is marked."""

    text: str
    is_bad: bool


class Panel(NamedTuple):
    """A table over the last two axes of a grid; of a third axis it has one band, which `title` names."""

    title: str
    layer: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StageGridView:
    """The grid of one stage, as a table or a picture shows it."""

    stage: str
    title: str
    grid: StageGrid
    rows: AxisView
    columns: AxisView
    panels: tuple[Panel, ...]
    pools: tuple[PoolRow, ...]
    notes: tuple[str, ...]
    traffic: Mapping[tuple[int, ...], CellTraffic] | None  # None: it is not shown
    n_requests: int
    # Pools whose number and not name is in cells, whatever the room.
    numbered_pools: frozenset[int] = frozenset()

    def cell_name(self, pool: int) -> str:
        """The text for a pool, by number, in a cell with room for names."""
        return str(pool) if pool in self.numbered_pools else self.pools[pool].name

    def order(self, index: tuple[int, ...]) -> tuple[int, ...]:
        """Numbers of the pools of a cell: the first choice, then those that it spills to."""
        return self.grid.pools_at(index)

    def share(self, index: tuple[int, ...]) -> str:
        """The cell's share of the stage's requests, in percent. Needs `traffic`."""
        assert self.traffic is not None
        cell = self.traffic.get(index)
        return percent(cell.n_requests, self.n_requests) if cell and self.n_requests else "0%"

    def figures(self, index: tuple[int, ...]) -> list[Figure]:
        """Percent of the cell's requests that failed, and of those judged that met their targets."""
        cell = CellTraffic() if self.traffic is None else self.traffic.get(index, CellTraffic())
        found = []
        if cell.n_failed:
            text = f"{percent(cell.n_failed, cell.n_requests)} failed"
            found.append(Figure(text, cell.n_failed / cell.n_requests >= FAILED_RATIO))
        if cell.n_judged:
            text = f"{percent(cell.n_met, cell.n_judged)} met"
            found.append(Figure(text, cell.n_met < LOW_RATIO * cell.n_judged))
        return found

    def is_bad(self, index: tuple[int, ...]) -> bool:
        """Whether too many of the cell's requests failed, or too few met their targets."""
        return any(figure.is_bad for figure in self.figures(index))


def stage_view(config: FleetConfig, stage: str, traffic: Traffic | None = None) -> StageGridView:
    """The view of one stage of `config`, with the traffic of its cells if there is any to show."""
    grid = config.stages[stage]
    defaults = _defaults(config, grid)
    *outer, rows, columns = grid.axes
    panels = [Panel("", ())]
    for axis in outer:
        shown = _axis_view(axis, None)
        panels = [Panel(f"{shown.title} {band}", (at,)) for at, band in enumerate(shown.bands)]
    mine = None
    if traffic is not None:
        mine = {index: cell for (of, index), cell in traffic.items() if of == stage}
    return StageGridView(
        stage=stage,
        title=f"{printable(config.source)}, mode {config.mode}: {stage}",
        grid=grid,
        rows=_axis_view(rows, defaults.get(rows.field)),
        columns=_axis_view(columns, defaults.get(columns.field)),
        panels=tuple(panels),
        pools=tuple(_pool_row(config, grid, number) for number in range(len(grid.pool_names))),
        notes=(*_notes(config, grid, defaults), *_traffic_notes(mine)),
        traffic=mine,
        n_requests=sum(cell.n_requests for cell in (mine or {}).values()),
    )


def with_escapes(view: StageGridView, missing: Collection[str]) -> StageGridView:
    """The view with these characters escaped; in cells, pools whose names had one show their numbers."""
    escapes = {ord(char): char.encode("unicode_escape").decode() for char in missing}
    pools = [pool._replace(name=printable(pool.name.translate(escapes))) for pool in view.pools]
    return replace(
        view,
        title=view.title.translate(escapes),
        pools=tuple(pools),
        notes=tuple(note.translate(escapes) for note in view.notes),
        numbered_pools=frozenset(
            old.number for old, new in zip(view.pools, pools, strict=True) if old != new
        ),
    )


def _defaults(config: FleetConfig, grid: StageGrid) -> dict[str, Number]:
    """By axis field, the target that counts for a request without a target and without a class."""
    everyone = default_for(config.objectives, "")
    found: dict[str, Number] = {}
    for axis in grid.axes:
        if axis.field not in SIZE_FIELDS:
            given = None if everyone is None else getattr(everyone, axis.field)
            found[axis.field] = axis.midpoint if given is None else given
    return found


def _axis_view(axis: AnyAxis, default: Number | None) -> AxisView:
    at = None if default is None else axis.index(default)
    edges = [number_text(edge) for edge in axis.edges]
    bands = [BandLabel(*pair, at == band) for band, pair in enumerate(pairwise(edges))]
    return AxisView(_TITLES[axis.field], tuple(bands), isinstance(axis, Axis) or len(bands) == 1)


def _pool_row(config: FleetConfig, grid: StageGrid, number: int) -> PoolRow:
    name = grid.pool_names[number]
    spec = config.pools.get(name)
    return PoolRow(
        number=number,
        name=printable(name),
        tp="-" if spec is None or spec.tp is None else str(spec.tp),
        gpus="-" if spec is None else number_text(spec.gpus),
        n_workers="-" if spec is None or not spec.workers else str(len(spec.workers)),
        priority=str(grid.priorities[number]),
    )


def _notes(config: FleetConfig, grid: StageGrid, defaults: Mapping[str, Number]) -> list[str]:
    everyone = default_for(config.objectives, "")
    notes = []
    for field, ms in defaults.items():
        is_given = everyone is not None and getattr(everyone, field) is not None
        why = f'as objective "{ANY_CLASS}" says' if is_given else "the middle of the range"
        name = field.removesuffix("_ms").upper()
        notes.append(f"default: without a target the {name} counts as {number_text(ms)} ms, {why}.")
    notes.append("A value on an edge is in the upper band, one outside in the first or last band.")
    if any(len(pools) > 1 for pools in grid.cells):
        notes.append("Behind > are the pools that a cell spills to, in order.")
    names = [printable(name) for name in grid.pool_names]
    if grid.rules:
        notes.append("Priority overrides, the first that fits counts:")
    for rule in grid.rules:
        low, high = number_text(rule.low), number_text(rule.high)
        notes.append(f"    priority {low} to {high}: pool {rule.pool}, {names[rule.pool]}")
    if grid.retry:
        notes.append("Retry: what failed goes on to the strictly faster pools, slowest first.")
    if config.scheduling != Scheduling():
        modes = ", ".join(f"{key} {mode}" for key, mode in config.scheduling.model_dump().items())
        notes.append(f"Scheduling: {modes}.")
    return notes


def _traffic_notes(traffic: Mapping[tuple[int, ...], CellTraffic] | None) -> list[str]:
    if traffic is None:
        return []
    n_requests = sum(cell.n_requests for cell in traffic.values())
    n_failed = sum(cell.n_failed for cell in traffic.values())
    n_judged = sum(cell.n_judged for cell in traffic.values())
    n_met = sum(cell.n_met for cell in traffic.values())
    failed = f", {n_failed:,} of them failed here" if n_failed else ""
    met = f", {percent(n_met, n_judged)} of those met it" if n_judged else ""
    return [
        f"Traffic: {n_requests:,} requests have ended{failed}, {n_judged:,} are judged by a target{met}.",
        "In a cell: its share of them, how many of its own failed"
        f" (!: {FAILED_RATIO:.0%} or more), and how many of those judged met their target"
        f" (!: below {LOW_RATIO:.0%}).",
    ]


class PoolColours(NamedTuple):
    """The colours of a pool's cells and text, as #rrggbb."""

    fill: str
    ink: str
    hatched: bool  # its fill is that of a pool before it


_FILLS = ["#56b4e9", "#e69f00", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7", "#bbbbbb"]
_DARK = "#0072b2"


def shade(pool: int) -> PoolColours:
    """The colours of the pool with this number."""
    fill = _FILLS[pool % len(_FILLS)]
    ink = "#ffffff" if fill == _DARK else "#000000"
    return PoolColours(fill, ink, pool >= len(_FILLS))
