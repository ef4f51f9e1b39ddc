"""Picture files: their format, their text, the same bytes each time, and the word without matplotlib."""

import sys
import xml.etree.ElementTree as ElementTree
from importlib import import_module
from pathlib import Path

import pytest

from slagate.pools.fleet_file.load import FleetConfig
from slagate.router.grid_view.layout import scene
from slagate.router.grid_view.picture import DPI, missing_glyphs, write_picture
from slagate.router.grid_view.scene import Label, Scene
from slagate.router.grid_view.view import stage_view
from slagate.workers.runtime.errors import UsageError
from support.fleet.views import (
    REPOSITORY,
    example,
    layers,
    prefill_config,
    some_traffic,
    spilling,
    twelve_pools,
)

SVG = "{http://www.w3.org/2000/svg}"


def pictured(config: FleetConfig, *, live: bool = False) -> Scene:
    traffic = some_traffic(config) if live else None
    return scene([stage_view(config, stage, traffic) for stage in config.stages])


def written(of: Scene, folder: Path, kind: str) -> bytes:
    path = folder / f"picture.{kind}"
    write_picture(of, path, kind=kind)
    return path.read_bytes()


def svg_texts(data: bytes) -> list[str]:
    root = ElementTree.fromstring(data)
    return ["".join(element.itertext()).strip() for element in root.iter(f"{SVG}text")]


CONFIGS = {
    "example": lambda: example("example-disagg"),
    "three axes": layers,
    "uneven": spilling,
    "twelve pools": lambda: twelve_pools(4, 5),
    "odd names": lambda: prefill_config(["$x^2$", "<&>'\"", "数据池"], [[0, 1, 2]]),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_an_svg_has_all_of_the_scene_as_text(tmp_path: Path, name: str) -> None:
    of = pictured(CONFIGS[name](), live=True)
    wanted = [shape.text for shape in of.shapes if isinstance(shape, Label)]
    assert sorted(svg_texts(written(of, tmp_path, "svg"))) == sorted(wanted)


def test_a_png_is_as_large_as_the_scene(tmp_path: Path) -> None:
    of = pictured(spilling())
    data = written(of, tmp_path, "png")
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
    assert abs(width - of.width / 72 * DPI) <= 1
    assert abs(height - of.height / 72 * DPI) <= 1


def test_the_glyphs_that_a_font_lacks_are_known() -> None:
    assert missing_glyphs(pictured(CONFIGS["odd names"]())) == "据数池"
    assert missing_glyphs(pictured(prefill_config(["é-ж-Ω", "…→"], [[0, 1]]))) == ""
    # One is missing where letters are bold, the other where they are not.
    either = "\U0001d5a0\U0001d5d4"
    assert missing_glyphs(pictured(prefill_config([either], [[0]]))) == either


@pytest.mark.parametrize("kind", ["svg", "png"])
def test_the_same_scene_gives_the_same_bytes(tmp_path: Path, kind: str) -> None:
    of = pictured(twelve_pools(2, 12), live=True)
    first = written(of, tmp_path, kind)
    assert written(of, tmp_path, kind) == first
    # No date, and no version of what drew it.
    assert b"atplotlib v" not in first
    assert b"dc:date" not in first


def test_the_picture_of_the_documentation_is_fresh(tmp_path: Path) -> None:
    of = pictured(example("example-disagg"))
    committed = (REPOSITORY / "docs" / "example-disagg.svg").read_bytes()
    assert written(of, tmp_path, "svg") == committed, (
        "slagate grid show configs/grids/example-disagg.json --svg docs/example-disagg.svg"
    )


@pytest.mark.parametrize("kind", ["svg", "png"])
def test_what_a_user_has_set_for_matplotlib_changes_nothing_and_stays(
    tmp_path: Path, kind: str
) -> None:
    matplotlib = import_module("matplotlib")
    of = pictured(spilling())
    plain = written(of, tmp_path, kind)
    theirs = {"savefig.bbox": "tight", "lines.solid_capstyle": "butt", "text.parse_math": True}
    with matplotlib.rc_context(theirs):
        before = dict(matplotlib.rcParams)
        assert written(of, tmp_path, kind) == plain
        assert dict(matplotlib.rcParams) == before


def test_without_matplotlib_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match=r"pip install 'slagate\[plots\]'"):
        written(pictured(spilling()), tmp_path, "svg")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"gone.picture\.png: cannot be written: No such file"):
        written(pictured(spilling()), tmp_path / "gone", "png")
