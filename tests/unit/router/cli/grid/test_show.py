"""`slagate grid show`, the command: what it reads, writes and refuses."""

import json
import os
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from slagate.pools.fleet_file.load import parse_config
from slagate.proto import gateway_pb2 as gw
from slagate.router.cli.grid.show import cell_traffic, show, with_cells
from slagate.router.receipts.attainment import CellTraffic
from slagate.workers.runtime.usage import UsageError
from support.fleet.files import agg_file, disagg_file
from support.fleet.views import REPOSITORY
from support.limits import HANG_S

EXAMPLE = REPOSITORY / "configs" / "grids" / "example-disagg.json"
LINT = REPOSITORY / "tests" / "golden" / "lint"


def run(*arguments: str | Path) -> Result:
    cli = typer.Typer()
    cli.command()(show)
    return CliRunner().invoke(cli, [str(each) for each in arguments])


def test_a_file_is_shown_stage_by_stage() -> None:
    done = run(EXAMPLE)
    assert done.exit_code == 0
    titles = [line for line in done.stdout.splitlines() if line.startswith(str(EXAMPLE)[:9])]
    assert [title.rsplit(" ", 1)[1] for title in titles] == ["prefill", "decode"]


def test_one_stage_can_be_asked_for() -> None:
    done = run(EXAMPLE, "--stage", "decode", "--width", "90")
    assert "decode-tp4" in done.stdout
    assert "prefill-tp4" not in done.stdout
    refused = run(EXAMPLE, "--stage", "agg")
    assert refused.exit_code == 2
    assert "--stage must be one of prefill, decode in this file (got 'agg')" in refused.stderr


def test_pictures_are_written_instead_of_the_table(tmp_path: Path) -> None:
    svg, png = tmp_path / "grid.svg", tmp_path / "grid.png"
    done = run(EXAMPLE, "--svg", svg, "--png", png)
    assert (done.exit_code, done.stdout) == (0, f"{svg}: written\n{png}: written\n")
    assert svg.read_bytes().startswith(b"<?xml")
    assert png.read_bytes().startswith(b"\x89PNG")


def test_a_picture_that_cannot_be_written_is_a_usage_error(tmp_path: Path) -> None:
    done = run(EXAMPLE, "--svg", tmp_path / "gone" / "grid.svg")
    assert done.exit_code == 2
    assert "grid.svg: cannot be written: No such file or directory" in done.stderr


def test_a_png_says_what_its_font_lacks_and_an_svg_keeps_it(tmp_path: Path) -> None:
    svg, png, path = tmp_path / "grid.svg", tmp_path / "grid.png", tmp_path / "fleet.json"
    text = EXAMPLE.read_text(encoding="utf-8").replace("prefill-tp4", "数据")
    path.write_text(text, encoding="utf-8")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        done = run(path, "--svg", svg, "--png", png)
    assert (done.exit_code, done.stdout) == (0, f"{svg}: written\n{png}: written\n")
    assert done.stderr == (
        "slagate: the font has no glyphs for 据数; PNG has numbers and escapes, SVG keeps the text\n"
    )
    assert "数据" in svg.read_text(encoding="utf-8")
    assert run(EXAMPLE, "--png", png).stderr == ""


@pytest.mark.parametrize(
    ("command", "status"),
    [(["show", EXAMPLE], 0), (["lint", LINT / "clean.json"], 0), (["lint", LINT / "G204.json"], 1)],
    ids=["show", "lint", "lint with findings"],
)
def test_a_closed_pipe_is_no_error(command: list[str | Path], status: int) -> None:
    """It ends as it would have, without a word."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as closed:
        done = subprocess.run(
            [sys.executable, "-m", "slagate.router", "grid", *command],
            stdout=closed,
            stderr=subprocess.PIPE,
            timeout=HANG_S,
            check=False,
        )
    assert (done.returncode, done.stderr) == (status, b"")


def test_every_problem_of_a_bad_file_is_told(tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(disagg_file() | {"num_prefill_pools": 0, "num_decode_pools": "x"}))
    done = run(path)
    assert done.exit_code == 2
    assert "num_prefill_pools" in done.stderr
    assert "num_decode_pools" in done.stderr


def test_without_a_file_and_a_gateway_there_is_nothing_to_show() -> None:
    done = run()
    assert done.exit_code == 2
    assert "give a CONFIG, or --target for that of a running gateway" in done.stderr


def test_a_gateway_that_is_not_there_is_a_failure() -> None:
    done = run("--insecure", "--target", "127.0.0.1:1")
    assert done.exit_code == 1
    assert "UNAVAILABLE" in done.stderr


def cells_of(content: object) -> gw.ListCellsResponse:
    return gw.ListCellsResponse(
        cells=[
            gw.CellStatus(
                stage=gw.STAGE_AGG, cell=[1, 2, 0], requests=9, judged=5, met=4, failed=1
            ),
            gw.CellStatus(stage=gw.STAGE_DECODE, cell=[0, 1], requests=3),
        ],
        config_version="v7",
        fleet=json.dumps(content),
    )


def test_counts_go_to_their_cells() -> None:
    assert cell_traffic(cells_of(agg_file())) == {
        ("agg", (1, 2, 0)): CellTraffic(9, n_met=4, n_judged=5, n_failed=1),
        ("decode", (0, 1)): CellTraffic(3),
    }


def test_the_gateway_has_its_configuration_with_it() -> None:
    config = with_cells(None, cells_of(agg_file()), "host:1")
    assert (config.source, config.mode) == ("host:1 (version v7)", "agg")


def test_a_file_of_the_gateways_grids_may_be_given_too() -> None:
    mine = parse_config(agg_file(), source="mine.json")
    # Where workers are changes no cell.
    live = agg_file() | {"pools": {"a-fast": {"workers": ["h:1"]}}}
    assert with_cells(mine, cells_of(live), "host:1") == replace(
        mine, source="mine.json at host:1 (version v7)"
    )


def test_a_file_of_other_grids_than_the_gateways_is_refused() -> None:
    other = agg_file()
    other["agg_pool_selection_strategy"]["agg_pool_mapping"][0][0] = [1, 1]
    with pytest.raises(UsageError, match=r"mine.json: has other grids than host:1 \(version v7\)"):
        with_cells(parse_config(other, source="mine.json"), cells_of(agg_file()), "host:1")
