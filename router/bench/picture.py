"""The Pareto picture of `slagate bench`: tokens/s per user against tokens/s of the hardware; and TTFT."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from slagate.router.bench.report import QUANTILES, Figure
from slagate.router.grid_view.picture import DPI, need_matplotlib, save, style
from slagate.workers.runtime.usage import UsageError

KINDS = ("png", "svg")
_SIZE = (11.5, 5.6)  # inches
_PLACES = [(ha, dx, dy) for ha, dx in (("left", 7), ("right", -7)) for dy in (4, -13)]

_INK, _GREY, _LINE, _MISSED = "#222222", "#9a9a9a", "#1f5fa8", "#c0392b"
_TTFT = dict(zip(QUANTILES, ("#9cc3e6", "#4f8fc9", "#1f5fa8"), strict=True))
_STYLE = {
    "font.size": 10,
    "axes.edgecolor": _GREY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#ececec",
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
}
_PER = {"gpu": "per GPU", "worker": "per worker", "fleet": "of the fleet"}


class Point(NamedTuple):
    """One level: tokens/s of the median user, tokens/s of each GPU, worker or the fleet, and SLA met."""

    concurrency: int
    user: float
    share: float
    sla_met: float | None


def points(rows: Sequence[Mapping[str, Figure]]) -> list[Point]:
    """A point for each row (of `report.figures`) in which both throughputs are known."""
    found = []
    for row in rows:
        user, share, met = (
            row[name] for name in ("tokens_per_s_per_user", "tokens_per_s_per_share", "sla_met")
        )
        if isinstance(user, float) and isinstance(share, float):
            concurrency = row["concurrency"]
            assert isinstance(concurrency, int)
            found.append(Point(concurrency, user, share, met if isinstance(met, float) else None))
    return found


def frontier(of: Sequence[Point]) -> list[Point]:
    """The Pareto frontier: points that no other is better than or equal to in both speeds; by `user`.

    >>> levels = [Point(1, 90, 5, None), Point(2, 80, 9, None), Point(4, 79, 8, None)]
    >>> [point.concurrency for point in frontier(levels)]
    [2, 1]
    """
    best = [
        one
        for one in of
        if not any(
            other.user >= one.user and other.share >= one.share and other[1:3] != one[1:3]
            for other in of
        )
    ]
    return sorted(best, key=lambda point: (point.user, -point.share))


def kind_of(path: Path) -> str:
    """A picture's format, by its file's name. Raises `UsageError` for others, and without matplotlib."""
    kind = path.suffix.removeprefix(".").lower()
    if kind not in KINDS:
        raise UsageError(f"--plot {path}: must end in .png or .svg")
    need_matplotlib()
    return kind


def write_pareto(
    rows: Sequence[Mapping[str, Figure]], path: Path, *, title: str, subtitle: str
) -> None:
    """Draw the Pareto picture into `path`. Raises `UsageError`, also if no level was answered."""
    kind = kind_of(path)
    if not points(rows):
        raise UsageError(f"--plot {path}: no level was answered, so there is nothing to draw")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    with style(_STYLE):
        canvas = Canvas(figsize=_SIZE, dpi=DPI, facecolor="white")
        FigureCanvasAgg(canvas)  # measures text
        grid = canvas.add_gridspec(
            1, 2, width_ratios=(3, 2), left=0.07, right=0.975, top=0.8, bottom=0.12, wspace=0.22
        )
        canvas.text(0.07, 0.945, title, fontsize=14, fontweight="bold")
        canvas.text(0.07, 0.895, subtitle, fontsize=9.5, color="#555555")
        _draw_pareto(canvas.add_subplot(grid[0]), rows)
        _draw_ttft(canvas.add_subplot(grid[1]), rows)
        save(canvas, path, kind, option="--plot ")


def _draw_pareto(axes: Any, rows: Sequence[Mapping[str, Figure]]) -> None:
    shown = points(rows)
    best = frontier(shown)
    beaten = [point for point in shown if point not in best]
    axes.plot(
        [p.user for p in best], [p.share for p in best], "o-", color=_LINE, linewidth=2, zorder=3,
        markersize=8, markeredgecolor="white", markeredgewidth=1.2, label="Pareto frontier",
    )  # fmt: skip
    if beaten:
        axes.scatter(
            [p.user for p in beaten], [p.share for p in beaten], s=44, zorder=3,
            facecolors="white", edgecolors=_GREY, linewidths=1.4, label="beaten by another level",
        )  # fmt: skip
    axes.set(
        xlim=(0, max(p.user for p in shown) * 1.16), ylim=(0, max(p.share for p in shown) * 1.12)
    )
    _label_all(axes, shown)
    itl_ms = rows[0]["itl_target_ms"]
    if isinstance(itl_ms, float) and itl_ms > 0:
        axes.axvspan(0, 1000 / itl_ms, color=_MISSED, alpha=0.06, linewidth=0, zorder=0)
        axes.axvline(
            1000 / itl_ms, color=_MISSED, linewidth=1, linestyle=(0, (4, 3)), zorder=1,
            label=f"ITL target {itl_ms:g} ms",
        )  # fmt: skip
    axes.set(xlabel="output tokens/s per user (1 / median ITL)")
    axes.set(ylabel=f"output tokens/s {_PER[str(rows[0]['share'])]}")
    _legend(axes, 3)


def _label_all(axes: Any, shown: Sequence[Point]) -> None:
    """Label each point, at the first of four places beside it where nothing else is."""
    from matplotlib.transforms import Bbox

    spots = axes.transData.transform([(p.user, p.share) for p in shown])
    occupied = [Bbox.from_extents(x - 8, y - 8, x + 8, y + 8) for x, y in spots]
    for point in shown:
        text = f"{point.concurrency}"
        if point.sla_met is not None:
            text += f"  ({point.sla_met:.0%})"
        label = axes.annotate(
            text, (point.user, point.share), (0, 0), textcoords="offset points", fontsize=9, zorder=4,
            bbox={"facecolor": "white", "alpha": 0.7, "pad": 0.6, "linewidth": 0},
        )  # fmt: skip
        # The first place once more at the end: the label stays there where none is free.
        for ha, dx, dy in (*_PLACES, _PLACES[0]):
            label.set(ha=ha, position=(dx, dy))
            if not label.get_window_extent().count_overlaps(occupied):
                break
        occupied.append(label.get_window_extent())


def _draw_ttft(axes: Any, rows: Sequence[Mapping[str, Figure]]) -> None:
    from matplotlib.ticker import LogLocator

    levels: list[Any] = [row["concurrency"] for row in rows]
    for quantile, colour in _TTFT.items():
        pairs = [
            (row["concurrency"], row[f"ttft_p{quantile}_ms"])
            for row in rows
            if row[f"ttft_p{quantile}_ms"] is not None
        ]
        axes.plot(
            [x for x, _ in pairs], [y for _, y in pairs], color=colour, marker="o", markersize=4.5,
            linewidth=1.8, label=f"p{quantile}",
        )  # fmt: skip
    target_ms = rows[0]["ttft_target_ms"]
    if isinstance(target_ms, float) and target_ms > 0:
        axes.axhline(
            target_ms, color=_MISSED, linewidth=1, linestyle=(0, (4, 3)),
            label=f"target {target_ms:g} ms",
        )  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="requests at once", ylabel="TTFT (ms)")
    axes.set_xticks(levels, levels)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    _legend(axes, 4)


def _legend(axes: Any, columns: int) -> None:
    axes.legend(
        loc="lower left", bbox_to_anchor=(0, 1.0), ncols=columns, frameon=False, fontsize=9,
        borderaxespad=0.2, handlelength=1.8, columnspacing=1.2,
    )  # fmt: skip
