"""The cells of a picture: what is written in them, and how large that makes them. Lengths are points."""

from collections.abc import Sequence
from typing import NamedTuple

from slagate.router.grid_view.scene import (
    LINE_RATIO,
    MAX_WIDTH,
    SMALL,
    TEXT,
    TINY,
    Label,
    text_width,
    wrapped,
)
from slagate.router.grid_view.view import AxisView, Panel, StageView, shade

NAME_WIDTH = 130.0
"""Of a pool's name in a cell, before it is wrapped."""


class Cells(NamedTuple):
    """How large every cell of a stage is, and what is written in each."""

    width: float
    height: float
    lines: dict[tuple[int, ...], list[Label]]  # relative to the middle of the cell's upper edge


def cells_of(view: StageView) -> Cells:
    """Cells with the names of their pools, or with their numbers where names make them too large."""
    return _cells_with_names(view) or _cells_with_numbers(view)


def axis_title(axis: AxisView) -> str:
    """The name of an axis in a picture, where all bands of it are of one size."""
    return axis.title if axis.is_even else axis.title.replace(")", ", bands not to scale)")


def _cells_with_names(view: StageView) -> Cells | None:
    """Cells that name their pools; None where that makes them too large."""
    pools = range(len(view.pools))
    names = [wrapped(view.cell_name(pool), NAME_WIDTH, TEXT, bold=True) for pool in pools]
    if max(map(len, names)) > 3:
        return None
    written = {}
    for panel, row, col in _places(view):
        index = (*panel.layer, row, col)
        first, *spill = view.order(index)
        labels = [Label(0, 0, text, TEXT, bold=True) for text in names[first]]
        labels += [
            Label(0, 0, text, TINY)
            for pool in spill
            for text in wrapped(f"> {view.cell_name(pool)}", NAME_WIDTH, TINY)
        ]
        if view.traffic is not None:
            labels.append(Label(0, 0, f"{view.share(index)} of traffic", SMALL))
            labels += _figures(view, index, SMALL)
        written[index] = labels
    cells = _sized(view, written, pad=8.0, least=(64.0, 38.0))
    too_wide = cells.width * len(view.columns.bands) > MAX_WIDTH
    return None if too_wide or cells.height * len(view.rows.bands) > MAX_WIDTH else cells


def _cells_with_numbers(view: StageView) -> Cells:
    """Cells that number their pools, which the legend names."""
    written = {}
    for panel, row, col in _places(view):
        index = (*panel.layer, row, col)
        labels = [Label(0, 0, ">".join(map(str, view.order(index))), TEXT, bold=True)]
        if view.traffic is not None:
            labels.append(Label(0, 0, view.share(index), TINY))
            labels += _figures(view, index, TINY)
        written[index] = labels
    # Room for the numbers, and more where there are few.
    n_rows, n_columns = len(view.rows.bands), len(view.columns.bands)
    least = (min(60.0, 480 / n_columns), min(34.0, 320 / n_rows))
    # A frame takes some of the room.
    return _sized(view, written, pad=4.0 if view.traffic is None else 7.0, least=least)


def _figures(view: StageView, index: tuple[int, ...], size: float) -> list[Label]:
    return [
        Label(0, 0, f"{'! ' * figure.is_bad}{figure.text}", size, bold=figure.is_bad)
        for figure in view.figures(index)
    ]


def _places(view: StageView) -> list[tuple[Panel, int, int]]:
    n_rows, n_columns = len(view.rows.bands), len(view.columns.bands)
    return [(p, row, col) for p in view.panels for row in range(n_rows) for col in range(n_columns)]


def _sized(
    view: StageView,
    written: dict[tuple[int, ...], list[Label]],
    *,
    pad: float,
    least: tuple[float, float],
) -> Cells:
    every = written.values()
    # No axis is shorter than its title.
    across, down = (
        text_width(axis_title(view.columns), SMALL),
        text_width(axis_title(view.rows), SMALL),
    )
    width = max(
        least[0],
        2 * pad + max(each.width for labels in every for each in labels),
        across / len(view.columns.bands),
    )
    height = max(least[1], 2 * pad + max(map(_height, every)), down / len(view.rows.bands))
    for index, labels in written.items():
        ink = shade(view.order(index)[0]).ink
        y = (height - _height(labels)) / 2
        for at, label in enumerate(labels):
            line = label.size * LINE_RATIO
            labels[at] = label._replace(y=y + line / 2, align="center", ink=ink)
            y += line
    return Cells(width, height, written)


def _height(labels: Sequence[Label]) -> float:
    return sum(label.size * LINE_RATIO for label in labels)
