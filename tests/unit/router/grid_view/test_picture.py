"""Pictures: everything is there, readable, in nobody's way; their files, and the word without matplotlib.

Places are those of matplotlib's own renderer, in points.
"""

import itertools
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from slagate.pools.fleet_file.load import FleetConfig, parse_config
from slagate.router.grid_view.picture import (
    GRID_STYLE,
    missing_glyphs,
    picture,
    style,
    write_picture,
)
from slagate.router.grid_view.view import StageGridView, shade, stage_view, with_escapes
from slagate.workers.runtime.usage import UsageError
from support.fleet.files import agg_file
from support.fleet.views import (
    REPOSITORY,
    example,
    layers,
    long_names,
    prefill_config,
    some_traffic,
    spilling,
    twelve_pools,
)
from support.seeds import is_long_run

SVG = "{http://www.w3.org/2000/svg}"
CONFIGS: dict[str, Callable[[], FleetConfig]] = {
    "example-disagg": lambda: example("example-disagg"),
    "one cell": lambda: example("two-workers"),
    "twelve pools": lambda: twelve_pools(3, 10),
    "many cells": lambda: twelve_pools(5, 16),
    "wide": lambda: twelve_pools(1, 24),
    "high": lambda: twelve_pools(33, 1),
    "uneven": spilling,
    "long names": long_names,
    "three axes": layers,
    "large edges": lambda: prefill_config(
        ["a-pool-of-some-length"], [[0, 0]], ttft_min_ms=-3e12, isl_max=1
    ),
}
IN_GATE = (
    ("example-disagg", False),
    ("one cell", False),
    ("twelve pools", True),
    ("many cells", False),
    ("many cells", True),
    ("wide", False),
    ("high", True),
    ("uneven", True),
    ("long names", False),
    ("three axes", True),
    ("large edges", False),
)
CASES = tuple(itertools.product(CONFIGS, (False, True))) if is_long_run() else IN_GATE
GRIDS = pytest.mark.parametrize(("name", "live"), CASES)


@pytest.fixture(autouse=True)
def as_files_are_drawn() -> Iterator[None]:
    with style(GRID_STYLE):
        yield


class Drawn(NamedTuple):
    """What is in a figure; places are left, bottom, right and top."""

    figure: Any
    texts: list[Any]
    text_places: Any
    patches: list[Any]  # those of the legend, then cells, panel by panel and row by row
    patch_places: Any

    @property
    def said(self) -> list[str]:
        return [text.get_text() for text in self.texts]

    def inside(self, place: Any) -> list[Any]:
        """The texts that are whole within a place."""
        low, high = self.text_places[:, :2] >= place[:2], self.text_places[:, 2:] <= place[2:]
        return [self.texts[at] for at in np.flatnonzero(low.all(1) & high.all(1))]


def drawn(*views: StageGridView) -> Drawn:
    figure = picture(views)
    figure.draw_without_rendering()
    texts = figure.findobj(
        lambda artist: (
            isinstance(artist, import_module("matplotlib.text").Text)
            and bool(artist.get_visible() and artist.get_text())
        )
    )
    patches = figure.findobj(
        lambda artist: (
            isinstance(artist, import_module("matplotlib.patches").Rectangle)
            and artist.get_linewidth() == 0.8
        )
    )
    # Of text itself: that of an annotation reaches over its arrow.
    extent = import_module("matplotlib.text").Text.get_window_extent
    places = [extent(text).extents for text in texts]
    return Drawn(figure, texts, np.array(places), patches, extents(patches))


def extents(artists: list[Any]) -> Any:
    return np.array([artist.get_window_extent().extents for artist in artists])


def views(config: FleetConfig, *, live: bool = False) -> list[StageGridView]:
    """All stages of an example, and the first one of others, whose second one is always the same."""
    traffic = some_traffic(config) if live else None
    stages = list(config.stages)[: 2 if "example" in config.source else 1]
    return [stage_view(config, stage, traffic) for stage in stages]


def pictured(name: str, *, live: bool = False) -> Drawn:
    return _pictured(name, live)


@cache
def _pictured(name: str, live: bool) -> Drawn:  # noqa: FBT001 - by place, so that there is one key
    return drawn(*views(CONFIGS[name](), live=live))


def overlapping(of: Any, others: Any) -> Any:
    """For each place whether it and each of the others have points in common."""
    low = np.maximum(of[:, None, :2], others[None, :, :2])
    high = np.minimum(of[:, None, 2:], others[None, :, 2:])
    return (high - low > 0.01).all(axis=2)


def places_of(view: StageGridView) -> list[tuple[int, ...]]:
    bands = (len(view.rows.bands), len(view.columns.bands))
    return [(*panel.layer, *at) for panel in view.panels for at in np.ndindex(*bands)]


# --- the layout ------------------------------------------------------------------------------------


@GRIDS
def test_no_text_is_cut_off_or_in_the_way_of_another(name: str, *, live: bool) -> None:
    of = pictured(name, live=live)
    page = of.figure.get_tightbbox().extents * 72
    assert (of.text_places[:, :2] >= page[:2] - 0.01).all()
    assert (of.text_places[:, 2:] <= page[2:] + 0.01).all()
    found = np.argwhere(np.triu(overlapping(of.text_places, of.text_places), 1))
    assert [(of.said[one], of.said[other]) for one, other in found] == []


@GRIDS
def test_what_is_written_in_a_cell_fits_into_it(name: str, *, live: bool) -> None:
    of = pictured(name, live=live)
    assert not np.triu(overlapping(of.patch_places, of.patch_places), 1).any()
    for text, patch in np.argwhere(overlapping(of.text_places, of.patch_places)):
        place = of.patch_places[patch]
        assert (of.text_places[text, :2] >= place[:2]).all(), of.said[text]
        assert (of.text_places[text, 2:] <= place[2:]).all(), of.said[text]


@GRIDS
def test_each_cell_has_the_colour_and_the_words_of_its_pool_and_its_traffic(
    name: str, *, live: bool
) -> None:
    of = pictured(name, live=live)
    patches = iter(zip(of.patches, of.patch_places, strict=True))
    shown = views(CONFIGS[name](), live=live)
    for pool in (pool.number for view in shown for pool in view.pools):
        patch, place = next(patches)
        assert look(patch) == shade(pool)[::2]
        assert [(text.get_text(), text.get_color()) for text in of.inside(place)] == [
            (str(pool), shade(pool).ink)
        ]
    for view in shown:
        for index in places_of(view):
            patch, place = next(patches)
            order, texts = view.order(index), of.inside(place)
            assert look(patch) == shade(order[0])[::2]
            assert {text.get_color() for text in texts} == {shade(order[0]).ink}
            said = "".join(text.get_text() for text in texts)
            names = "> ".join(view.cell_name(pool) for pool in order)
            assert said.startswith((names, ">".join(map(str, order))))
            if live:
                figures = [f"{'! ' * each.is_bad}{each.text}" for each in view.figures(index)]
                end = "".join([view.share(index), *figures])
                assert said.replace(" of traffic", "").endswith(end)
    assert next(patches, None) is None


def look(patch: Any) -> tuple[str, bool]:
    return import_module("matplotlib.colors").to_hex(patch.get_facecolor()), bool(patch.get_hatch())


def test_cells_that_miss_targets_are_framed() -> None:
    """Around what they say, and no others."""
    of = pictured("many cells", live=True)
    frames = extents(
        of.figure.findobj(
            lambda artist: (
                isinstance(artist, import_module("matplotlib.patches").Rectangle)
                and artist.get_linewidth() == 2.2
            )
        )
    )
    marked = {id(text) for text in of.texts if text.get_text().startswith("! ")}
    held = [{id(text) for text in of.inside(frame)} & marked for frame in frames]
    assert all(held)
    assert set().union(*held) == marked
    # Some for one reason, some for both.
    assert len(frames) < len(marked)
    assert 0 < len(frames) < len(of.patches)
    held = [of.inside(place) for place in of.patch_places if overlapping(place[None], frames).any()]
    assert len(held) == len(frames)


# --- what it says ----------------------------------------------------------------------------------


def test_axes_have_their_units_and_each_edge_at_its_place() -> None:
    of = pictured("example-disagg")
    titles = [(axes.get_ylabel(), axes.get_xlabel()) for axes in of.figure.axes]
    assert titles == [
        ("ISL (tokens)", "TTFT target (ms)"),
        ("context length (tokens)", "ITL target (ms)"),
    ]
    for axes, rows, columns in zip(
        of.figure.axes,
        (["0", "4,096", "8,192", "12,288", "16,384"], ["0", "16,384", "32,768"]),
        (["100", "500", "900", "1,300", "1,700"], ["5", "15", "25", "35", "45"]),
        strict=True,
    ):
        for axis, edges in ((axes.yaxis, rows), (axes.xaxis, columns)):
            ticks = {tick.get_loc(): tick.label1.get_text() for tick in axis.get_major_ticks()}
            assert ticks == dict(enumerate(edges))
    assert of.said.count("default") == 2


def test_bands_of_uneven_edges_are_said_to_be_drawn_alike() -> None:
    shown = pictured("uneven").said
    assert "ISL (tokens, bands not to scale)" in shown
    assert "TTFT target (ms, bands not to scale)" in shown
    assert {"512", "131,072", "200", "5,000"} <= set(shown)


def test_a_single_band_is_to_scale_whatever_its_edges() -> None:
    config = prefill_config(["p"], [[0]], isl_edges=[0, 4096], ttft_edges_ms=[10.5, 1028806.584362])
    shown = drawn(*views(config)).said
    assert not any("not to scale" in text for text in shown)
    assert {"10.5", "1,028,807"} <= set(shown)


def test_three_axes_are_a_panel_for_each_band_of_the_first() -> None:
    of = pictured("three axes")
    titles = [axes.get_title(loc="left") for axes in of.figure.axes]
    assert titles == ["ISL (tokens) 0 to 2,000", "ISL (tokens) 2,000 to 4,000"]
    one, other = (axes.get_position() for axes in of.figure.axes)
    assert (one.y0, one.size.tolist()) == (other.y0, other.size.tolist())
    # Requests without a target have a row and a column of their own in each panel.
    assert of.said.count("default") == 4


def test_panels_that_do_not_fit_beside_each_other_are_below() -> None:
    file = agg_file()
    file["agg_pool_selection_strategy"] |= {
        "isl_resolution": 3,
        "ttft_resolution": 1,
        "itl_resolution": 8,
        "agg_pool_mapping": [[[0] * 8]] * 3,
    }
    of = drawn(*views(parse_config(file, source="agg.json")))
    tops = [axes.get_position().y1 for axes in of.figure.axes]
    lefts = [axes.get_position().x0 for axes in of.figure.axes]
    assert tops[0] == tops[1] > tops[2]
    assert lefts[0] == lefts[2] < lefts[1]


def test_the_default_column_follows_the_objective_of_all_requests() -> None:
    for ms, column in ((None, 2), (100.0, 0), (250.0, 1)):
        objectives = {} if ms is None else {"*": {"ttft_ms": ms}}
        view = stage_view(spilling(objectives=objectives), "prefill")
        [mark] = [text for text in drawn(view).texts if text.get_text() == "default"]
        assert mark.xy == (column + 0.5, 0)
        says = (
            "2,500 ms, the middle of the range"
            if ms is None
            else f'{ms:g} ms, as objective "*" says'
        )
        assert any(says in note for note in view.notes)


def test_the_legend_has_every_pool_with_its_figures() -> None:
    of = pictured("example-disagg")
    lines: dict[float, list[str]] = {}
    for at in of.text_places[:, 0].argsort():
        text = of.texts[at]
        lines.setdefault(text.get_position()[1], []).append(text.get_text())
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


def test_notes_are_all_there_and_overrides_in_order() -> None:
    [notes] = [text for text in pictured("uneven").said if "Priority overrides" in text]
    assert [line.lstrip() for line in notes.splitlines()] == [
        note.lstrip() for note in stage_view(spilling(), "prefill").notes
    ]
    at = notes.splitlines().index("Priority overrides, the first that fits counts:")
    assert [line.lstrip() for line in notes.splitlines()[at + 1 : at + 3]] == [
        "priority 90 to 100: pool 0, fast",
        "priority -3 to 0.5: pool 2, bulk",
    ]


def test_names_that_leave_no_room_make_way_for_numbers_and_the_legend_has_them() -> None:
    shown = pictured("many cells").said
    assert shown.count("prefill-tp1-a") == 1
    assert shown.count("11") > 5 * 16 // 12 - 1


def test_names_that_a_font_lacks_are_numbers_in_cells_and_escapes_below() -> None:
    config = prefill_config(["数据池", "mid", "😀"], [[[0, 1], 1, [1, 2]]])
    shown = drawn(with_escapes(stage_view(config, "prefill"), "数据池😀")).said
    assert [shown.count(text) for text in ("mid", "> mid", "> 2")] == [3, 1, 1]
    assert {r"\u6570\u636e\u6c60", r"\U0001f600"} <= set(shown)
    assert not any(char in text for text in shown for char in "数据池😀")


def test_names_that_a_font_lacks_have_room_for_another_font() -> None:
    """In SVG files, where they are text: as wide as high."""
    name = "数" * 20
    of = drawn(stage_view(prefill_config([name, "b"], [[0, 1]]), "prefill"))
    assert of.patch_places[2][2] - of.patch_places[2][0] >= 20 * 9
    left = {text.get_text(): place[0] for text, place in zip(of.texts, of.text_places, strict=True)}
    assert left["tp"] - left["pool"] >= 20 * 9


def test_a_grid_that_no_screen_shows_is_refused() -> None:
    with pytest.raises(UsageError, match="prefill: a picture has at most 128 bands an axis"):
        picture(views(prefill_config(["p"], [[0]] * 129)))


# --- files -----------------------------------------------------------------------------------------


def written(of: list[StageGridView], folder: Path, kind: str) -> bytes:
    path = folder / f"picture.{kind}"
    write_picture(of, path, kind=kind)
    return path.read_bytes()


def odd_names() -> FleetConfig:
    return prefill_config(["$x^2$", "<&>'\"", "数据池"], [[0, 1, 2]])


@pytest.mark.parametrize("name", ["uneven", "odd names"])
def test_an_svg_has_all_of_the_picture_as_text(tmp_path: Path, name: str) -> None:
    of = views((CONFIGS | {"odd names": odd_names})[name](), live=True)
    data = written(of, tmp_path, "svg")
    texts = ElementTree.fromstring(data).iter(f"{SVG}text")
    wanted = [line for text in drawn(*of).said for line in text.split("\n")]
    assert sorted("".join(text.itertext()) for text in texts) == sorted(wanted)


def test_a_png_is_as_large_as_the_picture(tmp_path: Path) -> None:
    data = written(views(spilling()), tmp_path, "png")
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    size = [int.from_bytes(data[at : at + 4], "big") for at in (16, 20)]
    # A quarter of an inch around it, at 150 dots an inch.
    drawn_in = pictured("uneven").figure.get_tightbbox().padded(0.25).size
    assert size == pytest.approx(drawn_in * 150, abs=1)


def test_the_glyphs_that_a_font_lacks_are_known() -> None:
    assert missing_glyphs(views(odd_names())) == "据数池"
    assert missing_glyphs(views(prefill_config(["é-ж-Ω", "…→"], [[0, 1]]))) == ""
    # One is missing where letters are bold, the other where they are not.
    either = "\U0001d5a0\U0001d5d4"
    assert missing_glyphs(views(prefill_config([either], [[0]]))) == either


@pytest.mark.parametrize("kind", ["svg", "png"])
def test_what_a_user_has_set_for_matplotlib_changes_nothing_and_stays(
    tmp_path: Path, kind: str
) -> None:
    """Nor does the hour: the same grid gives the same bytes."""
    matplotlib = import_module("matplotlib")
    of = views(twelve_pools(1, 9), live=True)
    plain = written(of, tmp_path, kind)
    assert b"atplotlib v" not in plain
    assert b"dc:date" not in plain
    theirs = {"savefig.bbox": "tight", "lines.solid_capstyle": "butt", "text.parse_math": True}
    with matplotlib.rc_context(theirs):
        before = dict(matplotlib.rcParams)
        assert written(of, tmp_path, kind) == plain
        assert dict(matplotlib.rcParams) == before


def test_the_picture_of_the_documentation_is_fresh(tmp_path: Path) -> None:
    committed = (REPOSITORY / "docs" / "example-disagg.svg").read_bytes()
    assert written(views(example("example-disagg")), tmp_path, "svg") == committed, (
        "slagate grid show configs/grids/example-disagg.json --svg docs/example-disagg.svg"
    )


def test_without_matplotlib_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match=r"pip install 'slagate\[plots\]'"):
        written(views(spilling()), tmp_path, "svg")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"gone.picture\.png: cannot be written: No such file"):
        written(views(spilling()), tmp_path / "gone", "png")
