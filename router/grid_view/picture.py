"""Pictures of pool grids as SVG and PNG files. matplotlib draws them: an extra, imported when one is made.

A figure has the size of one point (1/72 inch), so that all positions in it are in points, from the title
of the first stage down. The file is cut to the drawn area.
"""

import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from rich.cells import cell_len

from slagate.router.grid_view.view import POOL_COLUMNS, AxisView, Panel, StageGridView, shade
from slagate.workers.runtime.usage import UsageError

DPI = 150
MAX_BANDS, MAX_CELLS = 128, 128 * 128
"""The most bands of an axis, and cells of a stage: more make a picture that no screen shows."""

MAX_WIDTH = 1200.0
"""The most points of cells with names, and of panels side by side: 16 inches."""

_GAP, _LINE = 16.0, 15.0
_TITLE, _TEXT, _SMALL, _TINY = 13.0, 9.0, 8.0, 7.0
_CHIP = 2.4 * _TEXT
_CELL = {"size": _TEXT, "va": "baseline"}
_FRAME = "#c00000"
_ARROW = {"width": 0, "headwidth": 7, "headlength": 5, "shrink": 0, "fc": "black", "lw": 0}
_NAME_LINE = re.compile(r".{1,22}$|.{1,21}[-_./: ]|.{22}")
"""The lines of a name in a cell: broken behind a separator, else anywhere."""

# Text stays text in SVG, so that it can be searched; the same grid gives the same bytes everywhere.
_FONT = "DejaVu Sans"
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "slagate",
    "font.family": [_FONT],
    "text.parse_math": False,
}
GRID_STYLE = {
    "font.size": _SMALL,
    "axes.labelsize": _SMALL,
    "axes.titlesize": _TEXT,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 2.5 * _SMALL,  # above the mark of a default
    "axes.edgecolor": "none",
    "xtick.labelsize": _SMALL,
    "ytick.labelsize": _SMALL,
    "hatch.linewidth": 0.6,
    "text.hinting": "no_hinting",  # hinting makes sizes of text depend on that of pixels
}


def need_matplotlib() -> None:
    """Raise `UsageError` where there is no matplotlib."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"pictures need the extra plots: pip install 'slagate[plots]' (for matplotlib: {error})"
        ) from error


def missing_glyphs(views: Sequence[StageGridView]) -> str:
    """Characters in these stages that PNG's font lacks. Raises `UsageError` without matplotlib."""
    need_matplotlib()
    from matplotlib.font_manager import FontProperties, findfont
    from matplotlib.ft2font import FT2Font

    missing: set[str] = set()
    used = {c for v in views for c in "".join((v.title, *v.notes, *(p.name for p in v.pools)))}
    for weight in ("normal", "bold"):
        known = FT2Font(findfont(FontProperties(family=_FONT, weight=weight))).get_charmap()
        missing |= {char for char in used if ord(char) not in known}
    return "".join(sorted(missing))


def write_picture(views: Sequence[StageGridView], path: Path, *, kind: str) -> None:
    """Draw these stages into the file at `path`, one below the other; `kind` is svg or png.

    Raises `UsageError` without matplotlib, for a grid too large, and for a file that cannot be written.
    """
    need_matplotlib()
    with style(GRID_STYLE):
        figure = picture(views)
        save(figure, path, kind, bbox_inches=figure.get_tightbbox().padded(0.25))


@contextmanager
def style(more: Mapping[str, Any]) -> Iterator[None]:
    """Within the `with`, matplotlib has its defaults and these settings, not the user's own."""
    import matplotlib

    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({**_STYLE, **more})
        # SVG files hold text, for whichever font shows it.
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        yield


def save(figure: Any, path: Path, kind: str, *, option: str = "", **how: Any) -> None:
    """Write a figure without a date; a `UsageError` names the file, and the `option` that it comes from."""
    metadata = {"Date": None, "Creator": None} if kind == "svg" else {"Software": None}
    try:
        figure.savefig(path, format=kind, dpi=DPI, metadata=metadata, **how)
    except OSError as error:
        raise UsageError(f"{option}{path}: cannot be written: {error.strerror}") from error


def picture(views: Sequence[StageGridView]) -> Any:
    """A figure of these stages. Raises `UsageError` for a grid that is too large."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    for view in views:
        counts = (len(view.panels), len(view.rows.bands), len(view.columns.bands))
        if max(counts) > MAX_BANDS or math.prod(counts) > MAX_CELLS:
            raise UsageError(
                f"{view.stage}: a picture has at most {MAX_BANDS} bands an axis and {MAX_CELLS:,} cells"
            )
    figure = Figure(figsize=(1 / 72, 1 / 72), dpi=72, facecolor="white")
    FigureCanvasAgg(figure)  # needed to measure text
    y = 0.0
    for view in views:
        title = figure.text(0, y, view.title, size=_TITLE, weight="bold", va="top")
        y = _add_panels(figure, view, title.get_window_extent().y0 - _GAP / 2)
        y = _add_pools(figure, view, y - _GAP) - _GAP / 2
        # XML drops spaces at the start of a text.
        text = "\n".join(note.replace("    ", "\N{EM SPACE}" * 2) for note in view.notes)
        notes = figure.text(0, y, text, size=_SMALL, va="top", linespacing=1.3)
        y = notes.get_window_extent().y0 - 2 * _GAP
    return figure


def _add_panels(figure: Any, view: StageGridView, y: float) -> float:
    """Add the panels of a stage from `y` down, side by side if there is room; returns where they end."""
    cells = _cells(figure, view)
    x, bottom = 0.0, y
    for panel in view.panels:
        axes = _add_panel(figure, view, panel, cells)
        box = axes.get_tightbbox()
        if x and x + box.width > MAX_WIDTH:
            x, y = 0.0, bottom - _GAP
        axes.set_position((x - box.x0, y - box.y1, *axes.get_position().size))
        x, bottom = x + box.width + _GAP, min(bottom, y - box.height)
    return bottom


def _cells(figure: Any, view: StageGridView) -> tuple[float, float, dict[tuple[int, ...], Any]]:
    """Size and texts of cells: with names of pools, or with numbers if names make the cells too large."""
    across, down = len(view.columns.bands), len(view.rows.bands)
    places = [(*panel.layer, *at) for panel in view.panels for at in np.ndindex(down, across)]
    lines = [_NAME_LINE.findall(view.cell_name(pool.number)) for pool in view.pools]
    names = ["\n".join(each) for each in lines]
    # Glyphs of a fallback font are as wide as they are high.
    widest = _TEXT / 2 * max(map(cell_len, sum(lines, [""]))) + 16
    least = [(max(64.0, widest), 38.0), (min(60, 480 / across), min(34, 320 / down))]
    has_room = max(least[0][0] * across, least[0][1] * down) <= MAX_WIDTH
    # No axis is shorter than its title.
    titles = [0.6 * _SMALL * len(_title(of)) / len(of.bands) for of in (view.columns, view.rows)]
    for is_named in (True, False) if has_room else (False,):
        texts = {at: _cell_text(view, at, names if is_named else None) for at in places}
        for text in texts.values():
            text.set_figure(figure)
        sizes = [text.get_window_extent().size for text in texts.values()]
        width, height = np.max([least[not is_named], titles, *sizes], axis=0)
        if max(width * across, height * down) <= MAX_WIDTH:
            break
    return width, height, texts


def _cell_text(view: StageGridView, index: tuple[int, ...], names: list[str] | None) -> Any:
    """The text of a cell, with numbers of pools if `names` is None."""
    from matplotlib.offsetbox import TextArea, VPacker

    order = view.order(index)
    if names is None:
        small, lines = _TINY, [(">".join(map(str, order)), _TEXT, True)]
    else:
        small, lines = _SMALL, [(line, _TEXT, True) for line in names[order[0]].split("\n")]
        spill = "\n".join(f"> {names[pool]}" for pool in order[1:])
        lines += [(line, _TINY, False) for line in spill.splitlines()]
    if view.traffic is not None:
        share = view.share(index) + ("" if names is None else " of traffic")
        lines.append((share, small, False))
        lines += [(f"{'! ' * f.is_bad}{f.text}", small, f.is_bad) for f in view.figures(index)]
    look = {"color": shade(order[0]).ink, "ha": "center"}
    areas: list[Any] = [
        TextArea(text, textprops={"size": size, "weight": 700 if bold else 400, **look})
        for text, size, bold in lines
    ]
    # Leaves room for a frame.
    pad = 4.0 if names is None and view.traffic is None else 8.0
    return VPacker(children=areas, align="center", pad=pad, sep=2.0)


def _add_panel(
    figure: Any, view: StageGridView, panel: Panel, cells: tuple[float, float, Any]
) -> Any:
    """Axes at the origin with the cells of one panel; `cells` is the result of `_cells`."""
    from matplotlib.offsetbox import AnnotationBbox
    from matplotlib.patches import Rectangle

    (width, height, texts), right, bottom = cells, len(view.columns.bands), len(view.rows.bands)
    axes = figure.add_axes((0, 0, right * width, bottom * height))
    axes.set(xlim=(0, right), xlabel=_title(view.columns), title=panel.title)
    axes.set(ylim=(bottom, 0), ylabel=_title(view.rows))
    axes.set_xticks(range(right + 1), _edges(view.columns))
    axes.set_yticks(range(bottom + 1), _edges(view.rows))
    if max(edge.get_window_extent().width for edge in axes.get_xticklabels()) > width - 4:
        axes.tick_params(axis="x", rotation=90)
    dx, dy = 2 / width, 2 / height
    for row, col in np.ndindex(bottom, right):
        index = (*panel.layer, row, col)
        pool = view.order(index)[0]
        axes.add_patch(_patch((col, row), 1, 1, pool))
        # White under the red frame separates it from a fill of a similar colour.
        for colour, thick in (("white", 4.0), (_FRAME, 2.2)) if view.is_bad(index) else ():
            spot, size = (col + dx, row + dy), (1 - 2 * dx, 1 - 2 * dy)
            axes.add_patch(Rectangle(spot, *size, fill=False, ec=colour, lw=thick))
        text = AnnotationBbox(
            texts[index], (col + 0.5, row + 0.5), annotation_clip=False, pad=-0.5,
            frameon=shade(pool).hatched, bboxprops={"fc": shade(pool).fill, "lw": 0},
        )  # fmt: skip
        text.set_in_layout(False)
        axes.add_artist(text)
    look: dict[str, Any] = {"textcoords": "offset points", "arrowprops": _ARROW}
    for at, band in enumerate(view.columns.bands):
        if band.is_default:
            axes.annotate("default", (at + 0.5, 0), (0, 7), ha="center", **look)
    for at, band in enumerate(view.rows.bands):
        if band.is_default:
            axes.annotate("default", (right, at + 0.5), (9, 0), va="center", **look)
    return axes


def _patch(spot: tuple[float, float], width: float, height: float, pool: int, **where: Any) -> Any:
    """A rectangle in the colours of a pool."""
    from matplotlib.patches import Rectangle

    fill, _, hatched = shade(pool)
    hatch = "/////" if hatched else None
    return Rectangle(spot, width, height, fc=fill, ec="white", lw=0.8, hatch=hatch, **where)


def _title(axis: AxisView) -> str:
    """The title of an axis in a picture, which draws all bands in one size."""
    return axis.title if axis.is_even else axis.title.replace(")", ", bands not to scale)")


def _edges(axis: AxisView) -> list[str]:
    return [axis.bands[0].low, *(band.high for band in axis.bands)]


def _add_pools(figure: Any, view: StageGridView, y: float) -> float:
    """Add a table of the pools from `y` down; returns where it ends."""
    bases = [y - _LINE * (at + 0.75) for at in range(1 + len(view.pools))]
    for pool, base in enumerate(bases[1:]):
        spot = (0, base - 0.2 * _LINE)
        chip = _patch(spot, _CHIP, 0.84 * _LINE, pool, transform=figure.transFigure)
        figure.add_artist(chip)
        # The hatch is left out behind the text.
        look = {"color": shade(pool).ink, "bbox": {"fc": shade(pool).fill, "lw": 0, "pad": -1}}
        figure.text(_CHIP / 2, base, str(pool), ha="center", weight="bold", **_CELL, **look)
    x = _CHIP + _GAP
    for column, texts in enumerate(zip(POOL_COLUMNS, *(p[1:] for p in view.pools), strict=True)):
        drawn = [figure.text(x, at, text, **_CELL) for at, text in zip(bases, texts, strict=True)]
        drawn[0].set(weight="bold")
        width = max(text.get_window_extent().width for text in drawn)
        width = max(width, _TEXT / 2 * max(map(cell_len, texts)))
        for text in drawn if column else ():
            text.set(ha="right", x=x + width)
        x += width + _GAP
    return bases[-1] - _LINE / 4
