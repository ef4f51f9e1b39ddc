"""Tables at any width: every word of every cell whole, and no line wider than the terminal."""

import io
import random

import pytest
from rich.console import Console
from rich.table import Table

from slagate.proto import gateway_pb2 as gw
from slagate.proto import openengine_pb2 as oe
from slagate.router.bench.report import LevelFigures, Targets, ThroughputUnit, figures
from slagate.router.bench.report import table as bench_table
from slagate.router.cli.client_tables import print_decision, print_pools
from slagate.router.demo.report import table as demo_table
from slagate.router.tables import print_table, stdout_console

WIDTHS = (60, 80, 120, 200)
WORKERS = ["[fd00:10:20::30]:50051", "worker-0.workers:50051", "10.20.30.40:7001"]


def printed(table: Table, width: int, *, n_keys: int = 1) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, markup=False, emoji=False, highlight=False)
    print_table(console, table, n_keys=n_keys)
    return out.getvalue()


def words(text: str) -> set[str]:
    return set(text.replace("│", " ").replace("┃", " ").split())


def check(text: str, width: int) -> None:
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("width", WIDTHS)
def test_every_word_is_shown_whole(width: int, seed: int) -> None:
    rng = random.Random(seed)

    def text() -> str:
        return " ".join(
            "".join(rng.choices("abc123,.[]:", k=rng.randint(1, 25)))
            for _ in range(rng.randint(1, 4))
        )

    table = Table()
    cells = [[text() for _ in range(rng.randint(2, 12))]]
    cells += [[text() for _ in cells[0]] for _ in range(rng.randint(1, 3))]
    for name in cells[0]:
        table.add_column(name)
    for row in cells[1:]:
        table.add_row(*row)
    shown = printed(table, width)
    check(shown, width)
    assert {word for row in cells for cell in row for word in cell.split()} <= words(shown)


def test_a_word_that_is_wider_than_the_terminal_is_folded() -> None:
    table = Table()
    table.add_column("name")
    table.add_column("figure")
    word = "".join(chr(ord("a") + n % 26) for n in range(150))
    table.add_row(word, "12,345")
    shown = printed(table, 60)
    check(shown, 60)
    assert word in "".join(line.split("│")[1].strip() for line in shown.splitlines() if "│" in line)
    assert "12,345" in words(shown)


@pytest.mark.parametrize("width", WIDTHS)
def test_pools_and_workers(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    pool = gw.PoolStatus(
        name="prefill-tp4", stage=gw.STAGE_PREFILL, pool_order=["prefill-tp4", "prefill-tp1"],
        estimator="profile llama-3.1-8b-h100, tp 4",
        ttft=gw.Predictions(basis="learnt", pairs=256, bias=0.031, median_error=0.126, coverage=0.95),
        workers=30, workers_ready=20, workers_draining=5, inflight=1234, queued_tokens=1_234_567,
        requests_total=12_345_678, retries_total=12_345,
    )  # fmt: skip
    workers = [
        gw.WorkerStatus(
            worker=worker, pool="prefill-tp4", state="not_ready", reason="UNAVAILABLE: no answer",
            engine="tensorrt_llm 1.3.0rc22", events_mode="live", inflight=12,
            load=oe.LoadInfo(running_requests=12, used_kv_blocks=12345, total_kv_blocks=20000),
            prefix=gw.PrefixTruth(predicted_tokens=1_000_000, engine_cached_tokens=1_200_000),
        )
        for worker in WORKERS
    ]  # fmt: skip
    print_pools(gw.ListPoolsResponse(pools=[pool]), gw.ListWorkersResponse(workers=workers))
    shown = capsys.readouterr().out
    check(shown, width)
    assert {*WORKERS, "12,345/20,000", "(1,000,000)", "1,200,000", "12,345,678"} <= words(shown)
    assert {"prefill-tp1", "1.3.0rc22", "13%", "+3%", "95%", "20/30"} <= words(shown)


@pytest.mark.parametrize("width", WIDTHS)
def test_candidates(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    candidates = [
        gw.Candidate(
            worker=worker, pool="prefill-tp4", rank=rank, inflight=2, foreign_requests=3,
            queued_tokens=120_000, device_tokens=51_200, host_tokens=6_400,
            predicted_ttft_ms=1300.04, score_s=0.13, excluded="at its limit",
        )
        for worker in WORKERS
        for rank in range(2)
    ]  # fmt: skip
    choice = gw.StageChoice(
        stage=gw.STAGE_PREFILL, cell=[0, 1], pool="prefill-tp4", candidates=candidates,
        pools=[gw.PoolLook(name="prefill-tp4"), gw.PoolLook(name="prefill-tp1")],
    )  # fmt: skip
    print_decision(gw.Decision(isl_tokens=100_000, stages=[choice], text=""))
    shown = capsys.readouterr().out
    check(shown, width)
    assert {*WORKERS, "57,600", "(6,400", "42,400", "120,000", "1300.0", "0.1300"} <= words(shown)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_figures_of_bench_and_demo(width: int) -> None:
    level = LevelFigures(32, (), 1.0, interrupted=True, client_busy_ratio=0.5)
    row = figures(level, targets=Targets(500.0), share=ThroughputUnit("worker", 3)) | {
        f"{name}_p{q}_ms": 123456.0 + q for name in ("ttft", "itl", "e2e") for q in (50, 90, 99)
    }
    row |= {"errors": "RESOURCE_EXHAUSTED:12345 UNAVAILABLE:3", "output_tokens_per_s": 123456.0}
    shown = printed(bench_table([row], "a title"), width)
    check(shown, width)
    assert {"32*", "123,456", "123,506", "123,546.0", "RESOURCE_EXHAUSTED:12345"} <= words(shown)
    assert shown.count("a title") == shown.count("interrupted") == 1
    for line in shown.splitlines():
        assert ("123,506" in line) == ("123,555" in line), "a row's percentiles are in one line"
    group = {
        "requests": 1000, "ttft_ms": {"p50": 1234.5, "p99": 12345.6}, "ttft_met": 0.987,
        "itl_ms": {"p50": 12.5, "p99": 123.5}, "itl_met": None,
    }  # fmt: skip
    shown = printed(demo_table("a title", {"prefill-tp4": group}), width)
    check(shown, width)
    assert {"prefill-tp4", "1000", "1234.5", "12345.6", "98.7%", "123.5"} <= words(shown)


def test_what_looks_like_markup_is_text(capsys: pytest.CaptureFixture[str]) -> None:
    """To rich "[fd00::1]" is a tag, and ":bug:" a picture."""
    stdout_console().print("[fd00::1]:7001 :bug:")
    assert capsys.readouterr().out == "[fd00::1]:7001 :bug:\n"
