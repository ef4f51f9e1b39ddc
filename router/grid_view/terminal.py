"""A pool grid as tables for the terminal: the cells, then the pools, then notes."""

from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from slagate.router.grid_view.view import POOL_COLUMNS, BandLabel, Panel, StageGridView, shade
from slagate.router.tables import BORDER, blocks, print_table


def print_stage(console: Console, view: StageGridView) -> None:
    """Print one stage's cells, pools and notes, in as many tables as the console's width asks for."""
    console.print(Text(view.title, style="bold"), soft_wrap=True)
    for panel in view.panels:
        written = _panel_text(view, panel, console.width)
        for columns in written.blocks:
            # A title that the table has itself would be wrapped to the table's width.
            console.print(Text(_title(view, panel, columns)), soft_wrap=True)
            console.print(_cell_table(view, panel, written, columns))
    console.print("pools", style="bold")
    print_table(console, _pool_table(view), n_keys=2)
    for note in view.notes:
        console.print(Text(note), soft_wrap=True)


class _PanelText(NamedTuple):
    """The texts of a panel's tables, and which columns go into each table."""

    rows: list[str]
    columns: list[str]
    cells: list[list[str]]
    blocks: list[range]


def _panel_text(view: StageGridView, panel: Panel, width: int) -> _PanelText:
    """With names of pools if all columns fit into the width, else with numbers, in blocks that fit."""
    rows = [_header(band, " to ", " ") for band in view.rows.bands]
    room = width - 1 - BORDER - _width(rows)
    for with_names, to in ((True, " to "), (False, "\n")):
        columns = [_header(band, to, "\n") for band in view.columns.bands]
        cells = [
            [
                _cell_text(view, (*panel.layer, row, col), with_names=with_names)
                for col in range(len(columns))
            ]
            for row in range(len(rows))
        ]
        widths = [
            BORDER + _width([header, *(line[col] for line in cells)])
            for col, header in enumerate(columns)
        ]
        if sum(widths) <= room:
            break
    return _PanelText(rows, columns, cells, list(blocks(widths, room)))


def _header(band: BandLabel, to: str, before_mark: str) -> str:
    return f"{band.low}{to}{band.high}" + (f"{before_mark}default" if band.is_default else "")


def _title(view: StageGridView, panel: Panel, columns: range) -> str:
    title = f"{panel.title}: " if panel.title else ""
    title += f"{view.rows.title} down, {view.columns.title} across"
    n_columns = len(view.columns.bands)
    if len(columns) < n_columns:
        title += f", columns {columns.start + 1} to {columns.stop} of {n_columns}"
    return title


def _cell_table(view: StageGridView, panel: Panel, written: _PanelText, columns: range) -> Table:
    tall = any("\n" in cell for line in written.cells for cell in line)
    table = Table(padding=0, show_lines=tall)
    table.add_column("", no_wrap=True)
    for col in columns:
        table.add_column(_padded(written.columns[col]), no_wrap=True)
    for row, header in enumerate(written.rows):
        line: list[RenderableType] = [_padded(header)]
        for col in columns:
            index = (*panel.layer, row, col)
            style = _style(view.order(index)[0])
            line.append(
                _padded(written.cells[row][col], f"bold {style}" if view.is_bad(index) else style)
            )
        table.add_row(*line)
    return table


def _style(pool: int) -> str:
    colours = shade(pool)
    return f"{colours.ink} on {colours.fill}{' underline' if colours.hatched else ''}"


def _padded(text: str, style: str = "") -> Padding:
    # The style covers the padding, so that a cell is coloured from border to border.
    return Padding(Text(text, no_wrap=True), (0, 1), style=style or "none")


def _cell_text(view: StageGridView, index: tuple[int, ...], *, with_names: bool) -> str:
    order = view.order(index)
    names = [view.cell_name(pool) if with_names else str(pool) for pool in order]
    lines = [names[0], *(f"> {name}" for name in names[1:])] if with_names else [">".join(names)]
    if view.traffic is not None:
        figures = [f"{'! ' * figure.is_bad}{figure.text}" for figure in view.figures(index)]
        shown = [view.share(index), *figures]
        lines += [", ".join(shown)] if with_names else shown
    return "\n".join(lines)


def _width(texts: Sequence[str]) -> int:
    return max(Text(line).cell_len for text in texts for line in text.split("\n"))


def _pool_table(view: StageGridView) -> Table:
    table = Table()
    table.add_column("#", justify="right")
    for name in POOL_COLUMNS:
        table.add_column(name, justify="left" if name == "pool" else "right")
    for pool in view.pools:
        style = _style(pool.number)
        figures = (pool.tp, pool.gpus, pool.n_workers, pool.priority)
        table.add_row(Text(str(pool.number), style), Text(pool.name, style), *figures)
    return table
