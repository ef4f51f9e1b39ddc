"""Grids in the terminal: what is printed at which width, with and without colours."""

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from slagate.pools.fleet_file.load import FleetConfig
from slagate.pools.fleet_file.models import Scheduling
from slagate.router.grid_view.terminal import print_stage
from slagate.router.grid_view.view import Traffic, shade, stage_view
from slagate.router.receipts.attainment import CellTraffic
from support.fleet.views import example, layers, long_names, prefill_config, spilling, twelve_pools

GOLDEN = Path(__file__).parents[3] / "golden"
ANSI = re.compile(r"\x1b\[[0-9;]*m")


def printed(
    config: FleetConfig,
    *,
    width: int = 120,
    traffic: Traffic | None = None,
    colour: bool = False,
) -> str:
    out = io.StringIO()
    console = Console(
        file=out,
        width=width,
        highlight=False,
        force_terminal=colour,
        color_system="truecolor" if colour else None,
    )
    for stage in config.stages:
        print_stage(console, stage_view(config, stage, traffic))
    return out.getvalue()


def table_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line[:1] in "│┃┏┡└├"]


def test_the_example_is_printed_as_ever() -> None:
    text = printed(example("example-disagg"))
    assert text == (GOLDEN / "grid_show.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("width", [60, 80, 120, 300])
def test_no_table_is_wider_than_the_terminal(width: int) -> None:
    for config in (twelve_pools(32, 32), long_names(), layers(), spilling()):
        text = printed(config, width=width)
        assert max(map(len, table_lines(text))) <= width


def test_columns_that_do_not_fit_go_into_further_tables() -> None:
    text = printed(twelve_pools(3, 32), width=80)
    spans = re.findall(r"columns (\d+) to (\d+) of 32", text)
    assert len(spans) > 1
    assert [int(first) for first, _ in spans] == [1, *(int(last) + 1 for _, last in spans[:-1])]
    assert spans[-1][1] == "32"
    assert "…" not in text, "something was cut off"


def test_names_give_way_to_numbers_where_they_do_not_fit() -> None:
    config = twelve_pools(2, 12)
    wide, narrow = (printed(config, width=width).split("pools\n")[0] for width in (300, 100))
    assert "prefill-tp1-a" in wide
    assert "prefill-tp1-a" not in narrow
    assert re.search(r"│ 0 +│ 1 +│ 2 +│ 3 ", narrow)


def test_cells_show_where_they_spill_to() -> None:
    wide = printed(spilling())
    assert "> mid" in wide
    assert "1>0>2" in printed(spilling(), width=50)


def test_scheduling_is_told_where_the_file_has_other_than_the_defaults() -> None:
    config = example("example-disagg")
    assert "Scheduling: spill any, admission on, bypass off." in printed(config)
    assert "Scheduling" not in printed(replace(config, scheduling=Scheduling()))
    changed = replace(config, scheduling=Scheduling(spill="any", admission="shadow"))
    assert "Scheduling: spill any, admission shadow, bypass off." in printed(changed)


def test_live_figures_are_in_the_cells() -> None:
    traffic = {
        ("prefill", (0, 0)): CellTraffic(30, n_met=9499, n_judged=10_000),
        ("prefill", (0, 1)): CellTraffic(10, n_met=95, n_judged=100),
        ("prefill", (2, 2)): CellTraffic(10),
        ("decode", (0, 0)): CellTraffic(7, n_met=0, n_judged=0),
    }
    text = printed(spilling(), traffic=traffic)
    assert "60%, ! 94.9% met" in text
    assert "20%, 95% met" in text
    assert re.search(r"│ 20% +│", text)
    footer = (
        "Traffic: 50 requests have ended, 10,100 are judged by a target, 94.9% of those met it."
    )
    assert footer in text
    assert "Traffic: 7 requests have ended, 0 are judged by a target." in text


def test_an_outage_is_in_every_cell_that_it_hit_and_in_the_footer() -> None:
    outage = {
        ("prefill", (0, 0)): CellTraffic(7, n_met=0, n_judged=7, n_failed=7),
        ("prefill", (0, 1)): CellTraffic(6, n_failed=6),
        ("prefill", (2, 2)): CellTraffic(7, n_met=6, n_judged=7),
    }
    names, numbers = (printed(spilling(), width=width, traffic=outage) for width in (120, 70))
    assert "35%, ! 100% failed, ! 0% met" in names
    assert "30%, ! 100% failed " in names
    assert "35%, ! 85.7% met" in names
    for mark in ("! 100% failed", "! 0% met", "! 85.7% met"):
        assert re.search(rf"│ {mark} +│", numbers)
    for text in (names, numbers):
        assert (
            "Traffic: 20 requests have ended, 13 of them failed here, 14 are judged by a target,"
            " 42.8% of those met it."
        ) in text


def test_a_few_failures_are_shown_without_a_mark() -> None:
    for n_failed, shown in ((1, "0.1% failed"), (49, "4.9% failed"), (50, "! 5% failed")):
        traffic = {("prefill", (0, 0)): CellTraffic(1000, n_failed=n_failed)}
        assert f"│ 100%, {shown} " in re.sub(
            r"│ > [a-z]+ +", "", printed(spilling(), traffic=traffic)
        ).replace("\n", " ")
    for n_requests in range(20, 4000, 20):
        traffic = {("prefill", (0, 0)): CellTraffic(n_requests, n_failed=n_requests // 20)}
        assert stage_view(spilling(), "prefill", traffic).is_bad((0, 0)), n_requests


def test_colours_add_nothing_to_the_text() -> None:
    for config in (spilling(), twelve_pools(3, 4)):
        coloured = printed(config, colour=True)
        assert coloured != printed(config)
        assert ANSI.sub("", coloured) == printed(config)


def test_each_pool_has_its_colour_in_its_cells_and_in_the_table_of_pools() -> None:
    config = twelve_pools(1, 12)
    text = printed(config, width=300, colour=True).split("context length")[0]
    parts = re.findall(r"\x1b\[([0-9;]*)m([^\x1b\n]+)", text)
    for pool, name in enumerate(config.stages["prefill"].pool_names):
        found = [codes.split(";") for codes, part in parts if part.strip() == name]
        assert len(found) == 2, name
        fill, _, hatched = shade(pool)
        rgb = [str(int(fill[at : at + 2], 16)) for at in (1, 3, 5)]
        for codes in found:
            assert codes[-5:] == ["48", "2", *rgb], name
            assert ("4" in codes[:-8]) == hatched, name


def test_no_color_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    """NO_COLOR (https://no-color.org) leaves bold and underline, and no colour."""
    monkeypatch.setenv("NO_COLOR", "1")
    codes = set(re.findall(r"\x1b\[([0-9;]*)m", printed(spilling(), colour=True)))
    assert not any(re.search(r"(^|;)[34]\d(;|$)", code) for code in codes), codes


def test_cfg_names_cannot_steer_the_terminal() -> None:
    config = prefill_config(["[red]x[/red]", "$a$"], [[0, 1]])
    text = printed(config)
    # In a cell and in the table of pools.
    assert text.count("[red]x[/red]") == text.count("$a$") == 2
