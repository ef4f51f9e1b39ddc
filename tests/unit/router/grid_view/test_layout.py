"""Pictures as scenes: everything is there, readable, and in nobody's way."""

from importlib import import_module
from itertools import combinations
from typing import NamedTuple

import pytest

from slagate.pools.fleet_file.load import FleetConfig
from slagate.router.grid_view.layout import scene
from slagate.router.grid_view.scene import Box, Label, Line, Scene, text_width, wrapped
from slagate.router.grid_view.view import spelled, stage_view
from slagate.workers.runtime.errors import UsageError
from support.fleet.views import (
    example,
    layers,
    long_names,
    prefill_config,
    some_traffic,
    spilling,
    twelve_pools,
)
from support.seeds import n_in

ROUNDING = 1e-6


class Area(NamedTuple):
    """A rectangle."""

    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, other: "Area") -> bool:
        across = min(self.right, other.right) - max(self.left, other.left)
        down = min(self.bottom, other.bottom) - max(self.top, other.top)
        return across > ROUNDING and down > ROUNDING

    def holds(self, other: "Area") -> bool:
        return (
            self.left <= other.left
            and self.top <= other.top
            and other.right <= self.right
            and other.bottom <= self.bottom
        )


def area(shape: Label | Box) -> Area:
    """Where a shape is; letters are as tall as their size says."""
    if isinstance(shape, Box):
        return Area(shape.x, shape.y, shape.x + shape.width, shape.y + shape.height)
    before = {"left": 0.0, "center": 0.5, "right": 1.0}[shape.align] * shape.width
    half = shape.size / 2
    if shape.turned:
        # It reads upwards: its right end is its top.
        end = shape.y - (shape.width - before)
        return Area(shape.x - half, end, shape.x + half, end + shape.width)
    return Area(shape.x - before, shape.y - half, shape.x - before + shape.width, shape.y + half)


def pictured(config: FleetConfig, *, live: bool = False) -> Scene:
    traffic = some_traffic(config) if live else None
    return scene([stage_view(config, stage, traffic) for stage in config.stages])


def labels(of: Scene) -> list[Label]:
    return [shape for shape in of.shapes if isinstance(shape, Label)]


def texts(of: Scene) -> list[str]:
    return [label.text for label in labels(of)]


CONFIGS = {
    "example-disagg": lambda: example("example-disagg"),
    "example-agg": lambda: example("example-agg"),
    "one cell": lambda: example("two-workers"),
    "twelve pools": lambda: twelve_pools(5, 7),
    "many cells": lambda: twelve_pools(20, 32),
    "wide": lambda: twelve_pools(2, 40),
    "high": lambda: twelve_pools(40, 2),
    "uneven": spilling,
    "long names": long_names,
    "three axes": layers,
    "large edges": lambda: prefill_config(
        ["a-pool-of-some-length"], [[0, 0]], ttft_min_ms=-3e12, isl_max=1
    ),
}


@pytest.mark.parametrize("what", ["file", "live"])
@pytest.mark.parametrize("name", CONFIGS)
def test_no_text_is_cut_off_or_in_the_way_of_another(name: str, what: str) -> None:
    of = pictured(CONFIGS[name](), live=what == "live")
    placed = [(label, area(label)) for label in labels(of)]
    page = Area(0, 0, of.width, of.height)
    assert [label for label, at in placed if not page.holds(at)] == []
    placed.sort(key=lambda each: each[1].top)
    for number, (label, at) in enumerate(placed):
        for other, there in placed[number + 1 :]:
            if there.top >= at.bottom:
                break
            assert not at.overlaps(there), (label, other)


@pytest.mark.parametrize("what", ["file", "live"])
@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_written_in_a_cell_fits_into_it(name: str, what: str) -> None:
    of = pictured(CONFIGS[name](), live=what == "live")
    boxes = [area(shape) for shape in of.shapes if isinstance(shape, Box)]
    for label in labels(of):
        at = area(label)
        assert [box for box in boxes if box.overlaps(at) and not box.holds(at)] == [], label
    assert not any(one.overlaps(other) for one, other in combinations(boxes[:200], 2))


def test_a_picture_says_what_the_axes_are_in_which_units_and_where_bands_end() -> None:
    shown = texts(pictured(example("example-disagg")))
    for title in ("ISL (tokens)", "TTFT target (ms)", "context length (tokens)", "ITL target (ms)"):
        assert shown.count(title) == 1
    assert {"0", "4,096", "8,192", "12,288", "16,384", "100", "500", "900", "1,300"} <= set(shown)
    assert {"1,700", "16,384", "32,768", "5", "15", "25", "35", "45"} <= set(shown)
    assert shown.count("default") == 2


def test_cells_name_their_pools_and_where_they_spill_to() -> None:
    of = pictured(spilling())
    shown = texts(of)
    # Once for each cell where it comes first, and once in the legend.
    assert [shown.count(name) for name in ("fast", "mid", "bulk")] == [6 + 1, 2 + 1, 1 + 1]
    assert [shown.count(f"> {name}") for name in ("fast", "mid", "bulk")] == [1, 2, 1]


def test_bands_of_uneven_edges_are_said_to_be_drawn_alike() -> None:
    shown = texts(pictured(spilling()))
    assert "ISL (tokens, bands not to scale)" in shown
    assert "TTFT target (ms, bands not to scale)" in shown
    assert {"512", "131,072", "200", "5,000"} <= set(shown)
    assert "ITL target (ms)" in shown


def test_a_single_band_is_to_scale_whatever_its_edges() -> None:
    config = prefill_config(["p"], [[0]], isl_edges=[0, 4096], ttft_edges_ms=[10.5, 1028806.584362])
    shown = texts(pictured(config))
    assert not any("not to scale" in text for text in shown)
    assert {"10.5", "1,028,807"} <= set(shown)


def test_names_that_a_font_lacks_are_numbers_in_cells_and_escapes_below() -> None:
    config = prefill_config(["数据池", "mid", "😀"], [[[0, 1], 1, [1, 2]]])
    view = stage_view(config, "prefill")
    shown = texts(scene([spelled(view, "数据池😀")]))
    assert [shown.count(text) for text in ("0", "mid", "> mid", "> 2")][1:] == [3, 1, 1]
    assert {r"\u6570\u636e\u6c60", r"\U0001f600"} <= set(shown)
    assert not any(char in text for text in shown for char in "数据池😀")


def test_the_legend_has_every_pool_with_its_figures() -> None:
    of = pictured(example("example-disagg"))
    lines: dict[float, list[str]] = {}
    for label in sorted(labels(of)):
        lines.setdefault(round(label.y, 3), []).append(label.text)
    rows = list(lines.values())
    header = ["pool", "tp", "GPUs per worker", "workers", "priority (lower is faster)"]
    assert rows.count(header) == 2
    for row in (
        ["0", "prefill-tp4", "4", "4", "1", "0"],
        ["1", "prefill-tp1", "1", "1", "2", "1"],
        ["0", "decode-tp4", "4", "4", "1", "0"],
        ["1", "decode-tp2", "2", "2", "2", "1"],
    ):
        assert row in rows


def test_priority_overrides_are_listed_in_order() -> None:
    shown = texts(pictured(spilling()))
    at = shown.index("Priority overrides, the first that fits counts:")
    assert shown[at + 1 : at + 3] == [
        "priority 90 to 100: pool 0, fast",
        "priority -3 to 0.5: pool 2, bulk",
    ]


def test_many_cells_have_numbers_and_the_legend_the_names() -> None:
    of = pictured(twelve_pools(32, 32))
    shown = texts(of)
    assert shown.count("prefill-tp1-a") == 1
    assert shown.count("11") > 32 * 32 // 12


def test_names_that_do_not_fit_into_a_cell_make_way_for_numbers() -> None:
    shown = texts(pictured(long_names()))
    # In its cell, in the legend, and as its priority there.
    assert shown.count("3") == 3
    assert sum("interactive" in text for text in shown) == 1


def test_two_pools_never_look_alike() -> None:
    of = pictured(twelve_pools(1, 12))
    boxes = [shape for shape in of.shapes if isinstance(shape, Box)]
    assert len({(box.fill, box.hatched) for box in boxes[:12]}) == 12


def test_the_legend_has_the_colours_of_the_cells() -> None:
    config = twelve_pools(1, 12)
    view = stage_view(config, "prefill")
    of = scene([view])
    boxes = [shape for shape in of.shapes if isinstance(shape, Box)]
    inside = [[label for label in labels(of) if area(box).holds(area(label))] for box in boxes]
    looks = [
        (box.fill, box.hatched, {label.ink for label in found})
        for box, found in zip(boxes, inside, strict=True)
    ]
    # Of the cells, by the order of their pools, and then of the legend.
    assert [view.order((0, col)) for col in range(12)] == [(pool,) for pool in range(12)]
    assert [found[0].text for found in inside[12:]] == [str(pool) for pool in range(12)]
    assert looks[:12] == looks[12:]


def test_three_axes_are_a_panel_for_each_band_of_the_first() -> None:
    of = pictured(layers())
    panels = [label for label in labels(of) if label.text.startswith("ISL (tokens) ")]
    assert [label.text for label in panels] == [
        "ISL (tokens) 0 to 2,000",
        "ISL (tokens) 2,000 to 4,000",
    ]
    assert panels[0].y == panels[1].y
    shown = texts(of)
    assert shown.count("TTFT target (ms)") == shown.count("ITL target (ms)") == 2
    # Requests without a target have a row and a column of their own in each panel.
    assert shown.count("default") == 4


def test_cells_that_miss_targets_are_framed_and_marked() -> None:
    config = twelve_pools(6, 6)
    traffic = some_traffic(config)
    of = scene([stage_view(config, "prefill", traffic)])
    mine = [cell for (stage, _), cell in traffic.items() if stage == "prefill"]
    low = [cell.n_met < 0.95 * cell.n_judged for cell in mine]
    failed = [cell.n_failed >= 0.05 * cell.n_requests for cell in mine]
    n_bad = sum(map(max, low, failed))
    # Some for one reason, some for both.
    assert 0 < n_bad < sum(low) + sum(failed)
    assert n_bad < len(mine)
    framed = [area(shape) for shape in of.shapes if isinstance(shape, Box) and shape.frame]
    marked = [area(label) for label in labels(of) if label.text.startswith("! ")]
    assert len(framed) == n_bad
    assert len(marked) == sum(low) + sum(failed)
    assert all(any(frame.holds(mark) for frame in framed) for mark in marked)


def test_the_default_column_follows_the_objective_of_all_requests() -> None:
    for ms, column in ((None, 2), (100.0, 0), (250.0, 1)):
        objectives = {} if ms is None else {"*": {"ttft_ms": ms}}
        config = spilling(objectives=objectives)
        view = stage_view(config, "prefill")
        assert [band.is_default for band in view.columns.bands].index(True) == column
        says = (
            "2,500 ms, the middle of the range"
            if ms is None
            else f'{ms:g} ms, as objective "*" says'
        )
        assert any(says in note for note in view.notes)


def test_a_grid_that_no_screen_shows_is_refused() -> None:
    with pytest.raises(UsageError, match="prefill: a picture has at most 128 bands an axis"):
        pictured(prefill_config(["p"], [[0]] * 129))


def test_edges_have_a_tick_at_the_place_they_name() -> None:
    config = example("example-disagg")
    of = scene([stage_view(config, "prefill")])
    ticks = [shape for shape in of.shapes if isinstance(shape, Line)]
    assert len(ticks) == 5 + 5
    cells = [shape for shape in of.shapes if isinstance(shape, Box)][:16]
    assert {tick.x for tick in ticks if tick.x == tick.to_x} == {
        *(cell.x for cell in cells),
        cells[-1].x + cells[-1].width,
    }


@pytest.mark.parametrize("width", [30.0, 60.0, 130.0])
def test_wrapped_text_is_all_there_and_fits(width: float) -> None:
    for text in ("prefill-tp4-h200", "W" * 50, "a b-c_d.e/f:g" * 5, "x", "", "数据池" * 9):
        lines = wrapped(text, width, 9)
        assert "".join(lines) == text
        assert all(text_width(line, 9) <= width for line in lines)


def test_the_estimate_of_a_width_is_never_less_than_the_font_of_pictures_takes() -> None:
    textpath = import_module("matplotlib.textpath")
    properties = import_module("matplotlib.font_manager").FontProperties
    for bold in (False, True):
        font = properties(family="DejaVu Sans", weight="bold" if bold else "normal")
        for code in range(33, 127, n_in(gate=3, long=1)):
            # Of many: the space beside a letter belongs to its width.
            path = textpath.TextPath((0, 0), chr(code).replace("$", r"\$") * 10, size=10, prop=font)
            estimate = text_width(chr(code) * 10, 10, bold=bold)
            assert path.get_extents().width <= estimate, chr(code)
