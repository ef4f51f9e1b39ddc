"""Where everything in a picture of pool grids goes: panels of cells with axes, a table of pools, the notes.

All lengths are points.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from slagate.router.grid_view.cells import Cells, axis_title, cells_of
from slagate.router.grid_view.scene import (
    GAP,
    LINE_RATIO,
    MARGIN,
    MAX_WIDTH,
    SMALL,
    TEXT,
    TITLE,
    Arrow,
    Box,
    Label,
    Line,
    Scene,
    Shape,
    text_width,
    wrapped,
)
from slagate.router.grid_view.view import POOL_COLUMNS, AxisView, Panel, StageView, shade
from slagate.workers.runtime.errors import UsageError


def add_legend(shapes: list[Shape], view: StageView, y: float) -> float:
    """Add a table of the pools from `y` on; where it ends."""
    rows = [("", *POOL_COLUMNS)] + [(str(p.number), *p[1:]) for p in view.pools]
    line = TEXT * 1.7
    x = MARGIN
    for column in range(len(rows[0])):
        width = max(text_width(row[column], TEXT, bold=at == 0) for at, row in enumerate(rows))
        width = max(width, 2 * TEXT)
        numeric = column > 1
        for at, row in enumerate(rows):
            middle = y + (at + 0.5) * line
            if column == 0 and at > 0:
                colours = shade(at - 1)
                shapes.append(
                    Box(x, middle - line * 0.42, width, line * 0.84, colours.fill, colours.hatched)
                )
                shapes.append(
                    Label(x + width / 2, middle, row[0], TEXT, "center", colours.ink, bold=True)
                )
            elif row[column]:
                at_x = x + width if numeric else x
                align = "right" if numeric else "left"
                shapes.append(Label(at_x, middle, row[column], TEXT, align, bold=at == 0))
        x += width + GAP
    return y + line * len(rows) + GAP / 2


def add_notes(shapes: list[Shape], view: StageView, y: float) -> float:
    """Add the notes from `y` on; where they end."""
    for note in view.notes:
        text = note.lstrip()
        indent = SMALL * 0.5 * (len(note) - len(text))
        for part in wrapped(text, MAX_WIDTH, SMALL):
            y += SMALL * LINE_RATIO
            shapes.append(Label(MARGIN + indent, y - SMALL / 2, part, SMALL))
    return y


MAX_BANDS, MAX_CELLS = 128, 128 * 128
"""Of an axis, and of a stage: more make a picture that no screen shows."""

TICK = 4.0
DEFAULT = "default"


def scene(views: Sequence[StageView]) -> Scene:
    """One picture of these stages, one below the other.

    Raises `UsageError` for a grid that is too large.
    """
    for view in views:
        counts = (len(view.panels), len(view.rows.bands), len(view.columns.bands))
        if max(counts) > MAX_BANDS or math.prod(counts) > MAX_CELLS:
            raise UsageError(
                f"{view.stage}: a picture has at most {MAX_BANDS} bands an axis and {MAX_CELLS:,} cells"
            )
    shapes: list[Shape] = []
    y = MARGIN
    for view in views:
        y = _add_stage(shapes, view, y) + 2 * GAP
    right = max(_right(shape) for shape in shapes)
    return Scene(right + MARGIN, y - 2 * GAP + MARGIN, tuple(shapes))


def _right(shape: Shape) -> float:
    if isinstance(shape, Label):
        if shape.turned:
            return shape.x + shape.size
        return shape.x + shape.width * {"left": 1.0, "center": 0.5, "right": 0.0}[shape.align]
    return shape.x + (shape.width if isinstance(shape, Box) else TICK)


def _add_stage(shapes: list[Shape], view: StageView, y: float) -> float:
    """Add one stage from `y` on; where it ends."""
    for text in wrapped(view.title, MAX_WIDTH, TITLE, bold=True):
        y += TITLE * LINE_RATIO
        shapes.append(Label(MARGIN, y - TITLE / 2, text, TITLE, bold=True))
    y += GAP / 2
    cells = cells_of(view)
    x, bottom = MARGIN, y
    for panel in view.panels:
        placed = _panel(view, panel, cells, x, y)
        if x > MARGIN and placed.right > MARGIN + MAX_WIDTH:
            x, y = MARGIN, bottom + GAP
            placed = _panel(view, panel, cells, x, y)
        shapes += placed.shapes
        x, bottom = placed.right + GAP, max(bottom, placed.bottom)
    return add_notes(shapes, view, add_legend(shapes, view, bottom + GAP))


class _Placed(NamedTuple):
    """Shapes, and where they end."""

    shapes: list[Shape]
    right: float
    bottom: float


class _Frame(NamedTuple):
    """The outline of all cells of a panel."""

    left: float
    top: float
    right: float
    bottom: float


def _panel(view: StageView, panel: Panel, cells: Cells, x: float, y: float) -> _Placed:
    """One table of cells with its axes, from (`x`, `y`) on."""
    shapes: list[Shape] = []
    if panel.title:
        y += TEXT * LINE_RATIO
        shapes.append(Label(x, y - TEXT / 2, panel.title, TEXT, bold=True))
    down, across = _edges(view.rows), _edges(view.columns)
    widest = max(text_width(edge, SMALL) for edge in across)
    is_turned = widest > cells.width - TICK
    left = x + SMALL * LINE_RATIO + 2 * TICK + max(text_width(edge, SMALL) for edge in down)
    left = max(left, x + (0 if is_turned else text_width(across[0], SMALL) / 2))
    top = y + SMALL * 2.5  # under the marker of a default
    frame = _Frame(
        left,
        top,
        right=left + cells.width * (len(across) - 1),
        bottom=top + cells.height * (len(down) - 1),
    )
    for row in range(len(view.rows.bands)):
        for col in range(len(view.columns.bands)):
            _add_cell(shapes, view, (*panel.layer, row, col), cells, frame)
    for at, edge in enumerate(down):
        edge_y = frame.top + at * cells.height
        shapes.append(Line(frame.left - TICK, edge_y, frame.left, edge_y))
        shapes.append(Label(frame.left - 1.5 * TICK, edge_y, edge, SMALL, "right"))
    for at, edge in enumerate(across):
        edge_x = frame.left + at * cells.width
        shapes.append(Line(edge_x, frame.bottom, edge_x, frame.bottom + TICK))
        edge_y = frame.bottom + 1.5 * TICK + (0 if is_turned else SMALL * LINE_RATIO / 2)
        align = "right" if is_turned else "center"
        shapes.append(Label(edge_x, edge_y, edge, SMALL, align, turned=is_turned))
    end = frame.bottom + 1.5 * TICK + (widest if is_turned else SMALL * LINE_RATIO) + SMALL
    middle_x, middle_y = (frame.left + frame.right) / 2, (frame.top + frame.bottom) / 2
    title = axis_title(view.rows)
    shapes.append(Label(x + SMALL / 2, middle_y, title, SMALL, "center", turned=True))
    shapes.append(Label(middle_x, end, axis_title(view.columns), SMALL, "center"))
    _add_defaults(shapes, view, cells, frame)
    return _Placed(shapes, max(map(_right, shapes)), end + SMALL)


def _add_cell(
    shapes: list[Shape], view: StageView, index: tuple[int, ...], cells: Cells, frame: _Frame
) -> None:
    x, y = frame.left + index[-1] * cells.width, frame.top + index[-2] * cells.height
    colours = shade(view.order(index)[0])
    is_bad = view.is_bad(index)
    shapes.append(Box(x, y, cells.width, cells.height, colours.fill, colours.hatched, is_bad))
    middle = x + cells.width / 2
    shapes.extend(label._replace(x=middle, y=y + label.y) for label in cells.lines[index])


def _add_defaults(shapes: list[Shape], view: StageView, cells: Cells, frame: _Frame) -> None:
    """Mark the bands of requests without a target."""
    for at, band in enumerate(view.columns.bands):
        if band.is_default:
            middle = frame.left + (at + 0.5) * cells.width
            shapes.append(Arrow(middle, frame.top - 2, down=True))
            shapes.append(Label(middle, frame.top - SMALL * 1.6, DEFAULT, SMALL, "center"))
    for at, band in enumerate(view.rows.bands):
        if band.is_default:
            middle = frame.top + (at + 0.5) * cells.height
            shapes.append(Arrow(frame.right + 2, middle, down=False))
            shapes.append(Label(frame.right + 10, middle, DEFAULT, SMALL))


def _edges(axis: AxisView) -> list[str]:
    return [axis.bands[0].low, *(band.high for band in axis.bands)]
