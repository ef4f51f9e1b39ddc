"""Below the cells of a picture: a table of the pools, and the notes. All lengths are points."""

from slagate.router.grid_colours import shade
from slagate.router.grid_scene import (
    GAP,
    LINE_RATIO,
    MARGIN,
    MAX_WIDTH,
    SMALL,
    TEXT,
    Box,
    Label,
    Shape,
    text_width,
    wrapped,
)
from slagate.router.grid_view import POOL_COLUMNS, StageView


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
