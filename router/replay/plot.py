"""Pictures of rows: attainment and goodput against load, and distributions by class.

A line is the mean over seeds; the band around it goes from the least to the most of them.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from slagate.router.grid_view.picture import DPI, save, style
from slagate.router.replay.measure import QUANTILES
from slagate.router.replay.out import Row

ORACLE = "oracle"
_COLOURS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c564b"),
    *("#7f7f7f", "#b2a600", "#5e3c99", "#1b7837"),
)
"""Told apart by most colour-blind readers, in this order."""

_STYLE = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "legend.frameon": False,
}
_MARKERS = "osD^vPX<>ph"


class Setting(NamedTuple):
    """What the lines of one panel have in common."""

    trace: str
    fleet: str


def write_plots(
    rows: Sequence[Row], targets: Mapping[str, tuple[float, float]], path: Path, kind: str
) -> list[Path]:
    """Draw attainment and goodput into `path`, and distributions into a second file beside it.

    `targets` are TTFT and ITL in ms by class; `kind` is svg or png. Returns the files that were written.
    Raises `UsageError` for one that cannot be.
    """
    rows = [row for row in rows if row["find_rate"] is None]
    beside = path.with_stem(f"{path.stem}-latencies")
    with style(_STYLE):
        save(_against_load(rows), path, kind, option="--plot ")
        save(_latencies(rows, targets), beside, kind, option="--plot ")
    return [path, beside]


def _settings(rows: Sequence[Row]) -> list[Setting]:
    return list(dict.fromkeys(Setting(row["trace"], row["fleet"]) for row in rows))


def _policies(rows: Sequence[Row]) -> list[str]:
    """Policies in the order of their rows, the oracle last."""
    names = list(dict.fromkeys(row["policy"] for row in rows))
    return [name for name in names if name != ORACLE] + [name for name in names if name == ORACLE]


def _line_of(policies: Sequence[str], name: str) -> dict[str, Any]:
    if name == ORACLE:
        return {"color": "black", "linestyle": (0, (5, 2)), "linewidth": 1.6, "label": name}
    number = policies.index(name)
    return {
        "color": _COLOURS[number % len(_COLOURS)],
        "marker": _MARKERS[number % len(_MARKERS)],
        "markersize": 4.5,
        "linewidth": 1.6,
        "label": name,
    }


def _figure(width: float, height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DPI, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _against_load(rows: Sequence[Row]) -> Any:
    settings, policies = _settings(rows), _policies(rows)
    figure = _figure(11, 0.8 + 3.3 * len(settings))
    axes = figure.subplots(len(settings), 2, squeeze=False)
    for (left, right), setting in zip(axes, settings, strict=True):
        shown = [row for row in rows if Setting(row["trace"], row["fleet"]) == setting]
        _draw_load(left, shown, policies, "both_met")
        left.set(ylim=(0, 1), ylabel="share that met both targets")
        left.set_title(f"{setting.trace}, {setting.fleet}")
        _draw_load(right, shown, [name for name in policies if name != ORACLE], "goodput_per_gpu")
        right.set(ylabel="met both, requests/s per GPU")
        right.set_ylim(bottom=0)
        for each in (left, right):
            each.set(xlabel="load (1: the trace's own speed)")
            each.set_xticks(sorted({row["load"] for row in shown}))
            each.xaxis.set_major_formatter("{x:g}")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(6, len(labels)))
    return figure


def _draw_load(axes: Any, rows: Sequence[Row], policies: Sequence[str], figure: str) -> None:
    for name in policies:
        points = sorted(
            (load, values)
            for load, values in _by_load(rows, name, figure).items()
            if load is not None
        )
        if not points:
            continue
        loads = [load for load, _ in points]
        how = _line_of(policies, name)
        axes.plot(loads, [np.mean(values) for _, values in points], zorder=3, **how)
        lows, highs = [min(values) for _, values in points], [max(values) for _, values in points]
        axes.fill_between(loads, lows, highs, color=how["color"], alpha=0.12, linewidth=0)


def _by_load(rows: Sequence[Row], policy: str, figure: str) -> dict[float, list[float]]:
    found: dict[float, list[float]] = {}
    for row in rows:
        if row["policy"] == policy and row[figure] is not None:
            found.setdefault(row["load"], []).append(row[figure])
    return found


def _latencies(rows: Sequence[Row], targets: Mapping[str, tuple[float, float]]) -> Any:
    """TTFT and ITL by class, at the load nearest to the trace's own speed.

    What was refused keeps a line below 1.
    """
    settings = _settings(rows)
    policies = [name for name in _policies(rows) if name != ORACLE]
    lines = [(setting, latency) for setting in settings for latency in ("ttft_ms", "itl_ms")]
    figure = _figure(4.2 * len(targets), 0.8 + 3.0 * len(lines))
    axes = figure.subplots(len(lines), len(targets), squeeze=False)
    for line, (setting, latency) in zip(axes, lines, strict=True):
        shown = [row for row in rows if Setting(row["trace"], row["fleet"]) == setting]
        load = min((row["load"] for row in shown), key=lambda load: abs(np.log(load)))
        shown = [row for row in shown if row["load"] == load]
        where = f"{setting.trace}, {setting.fleet}, load {load:g}\n"
        for each, (name, both) in zip(line, targets.items(), strict=True):
            for policy in policies:
                _draw_distribution(each, shown, policies, policy, name, latency)
            target = both[latency == "itl_ms"]
            each.axvline(target, color="#c00000", linewidth=1, linestyle=(0, (4, 3)))
            _scale_log(each)
            what = "TTFT" if latency == "ttft_ms" else "ITL"
            each.set(ylim=(0, 1.02), xlabel=f"{what}, ms (target {target:g})")
            each.set_title(f"{where if each is line[0] else ''}{name}, {what}")
        line[0].set(ylabel="share of requests")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(6, len(labels)))
    return figure


def _draw_distribution(
    axes: Any,
    rows: Sequence[Row],
    policies: Sequence[str],
    policy: str,
    of_class: str,
    latency: str,
) -> None:
    of_seeds, answered = [], []
    for row in rows:
        found = row["classes"].get(of_class) if row["policy"] == policy else None
        if found is not None and found[latency]["percentiles"]:
            of_seeds.append(found[latency]["percentiles"])
            answered.append(1 - found["refused"])
    if of_seeds:
        shares = np.array(QUANTILES) / 100 * np.mean(answered)
        how = _line_of(policies, policy) | {"marker": None}
        axes.plot(np.mean(of_seeds, axis=0), shares, **how)


def _scale_log(axes: Any) -> None:
    """A logarithmic axis of x with plain numbers at it."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_xscale("log")
    low, high = axes.get_xlim()
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high / low < 50 else (1.0,)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
