"""Tables for people: columns that do not fit the terminal go into further tables, and nothing is cut."""

import os
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.measure import Measurement
from rich.table import Column, Table

PIPED_COLUMNS = 200
"""Width where stdout is no terminal: enough for every figure of the tables."""

BORDER = 3
"""Terminal columns that a table's column takes besides its text."""


def stdout_console(*, piped: int = PIPED_COLUMNS, width: int | None = None) -> Console:
    """The console of stdout, `width` columns wide; None: as wide as the terminal, `piped` without one.

    Rich's markup is off, as "[fd00::1]" is a tag in it.
    """
    is_piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(
        width=width or (piped if is_piped else None), markup=False, emoji=False, highlight=False
    )


class _Size(NamedTuple):
    """Terminal columns of a table's column: at least, with its lines broken at blanks, and at most."""

    least: int
    most: int


def print_table(console: Console, table: Table, *, n_keys: int = 1) -> None:
    """Print a table, or if it is too wide several, each with the first `n_keys` columns."""
    sizes = [_size(console, column) for column in table.columns]
    room = console.width - 1
    if sum(size.most + BORDER for size in sizes) <= room:
        console.print(table)
        return
    least = [size.least + BORDER for size in sizes]
    parts = list(blocks(least[n_keys:], room - sum(least[:n_keys])))
    for number, block in enumerate(parts):
        part = [*range(n_keys), *(n_keys + at for at in block)]
        widths = _widths([sizes[index] for index in part], room)
        shown = Table(
            title=None if number else table.title,
            title_justify="left",
            caption=table.caption if number == len(parts) - 1 else None,
        )
        columns = [table.columns[index] for index in part]
        for column, width in zip(columns, widths, strict=True):
            shown.add_column(column.header, justify=column.justify, width=width, overflow="fold")
        for row, *cells in zip(table.rows, *(column.cells for column in columns), strict=True):
            shown.add_row(*cells, style=row.style)
        console.print(shown)


def _size(console: Console, column: Column) -> _Size:
    texts = [
        Measurement.get(console, console.options.update(max_width=10_000), text)
        for text in (column.header, *column.cells)
    ]
    most = max(text.maximum for text in texts)
    return _Size(most if column.no_wrap else max(text.minimum for text in texts), most)


def blocks(widths: Sequence[int], room: int) -> Iterator[range]:
    """Divide columns of these widths into ranges: as many in each as `room` allows, at least one."""
    start, used = 0, 0
    for at, width in enumerate(widths):
        if at > start and used + width > room:
            yield range(start, at)
            start, used = at, 0
        used += width
    yield range(start, len(widths))


def _widths(sizes: Sequence[_Size], room: int) -> list[int]:
    """The widths of a part's columns: no word is broken, unless one column is too wide by itself."""
    widths = [size.least for size in sizes]
    spare = room - sum(width + BORDER for width in widths)
    if spare < 0:
        widest = widths.index(max(widths))
        widths[widest] = max(1, widths[widest] + spare)
    by_need = sorted(range(len(sizes)), key=lambda index: sizes[index].most - sizes[index].least)
    for n_done, index in enumerate(by_need):
        given = min(sizes[index].most - sizes[index].least, max(0, spare) // (len(sizes) - n_done))
        widths[index] += given
        spare -= given
    return widths
