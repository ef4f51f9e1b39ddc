"""`slagate bench` against real clusters: table, files, status, and what an interruption leaves."""

import csv
import io
import re
import signal
import subprocess
from pathlib import Path

import pytest

from support.gateway.processes import SLAGATE, Cluster, eventually, run_cli, run_here
from support.limits import HANG_S
from support.seeds import is_long_run


def rows_of(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(path.read_text())))


@pytest.mark.parametrize("either", ["agg", "disagg"] if is_long_run() else ["agg"], indirect=True)
def test_a_sweep_leaves_a_table_a_csv_file_and_a_picture(either: Cluster, tmp_path: Path) -> None:
    figures, picture = tmp_path / "bench.csv", tmp_path / "bench.png"
    done = run_cli(
        *("bench", "--insecure", "--target", either.gateway.address),
        *("--admin", either.gateway.admin_address, "--concurrency", "2,1,4"),
        *("--requests", "8", "--isl", "64", "--osl", "8", "--warmup", "2"),
        *("--ttft-ms", "60000", "--itl-ms", "60000"),
        *("--csv", str(figures), "--plot", str(picture)),
    )
    assert (done.returncode, done.stderr) == (
        0,
        f"slagate: Waiting for {either.gateway.address}\nslagate: Warming up\n"
        "slagate: 1 at once\nslagate: 2 at once\nslagate: 4 at once\n",
    )
    n_workers = sum(map(len, either.workers.values()))
    rows = rows_of(figures)
    assert [row["concurrency"] for row in rows] == ["1", "2", "4"]
    for row in rows:
        assert (row["requests"], row["answered"], row["errors"]) == ("8", "8", "")
        assert (row["output_tokens"], row["sla_met"]) == ("64", "1.0")
        assert (row["share"], row["shares"]) == ("worker", str(n_workers))
        for q in (50, 90, 99):
            assert 0 < float(row[f"ttft_p{q}_ms"]) <= float(row[f"e2e_p{q}_ms"])
        assert row["interrupted"] == "0"
    assert len(re.findall(r"^│ +[124] │.*100\.0%", done.stdout, re.MULTILINE)) == 3
    assert picture.read_bytes().startswith(b"\x89PNG")
    eventually(either.gateway.is_idle, "the gateway is idle")


def test_refusals_are_counted_by_status(agg: Cluster, tmp_path: Path) -> None:
    figures = tmp_path / "bench.csv"
    done = run_here(
        *("bench", "--insecure", "--target", agg.gateway.address, "--concurrency", "1"),
        *("--requests", "3", "--warmup", "0", "--isl", "200000", "--csv", str(figures)),
    )
    assert done.returncode == 1
    assert "3 of 3 failed, the first with INVALID_ARGUMENT: token_ids: " in done.stderr
    (row,) = rows_of(figures)
    assert (row["answered"], row["errors"], row["ttft_p50_ms"]) == ("0", "INVALID_ARGUMENT:3", "")


def test_an_interruption_leaves_what_was_measured(agg: Cluster, tmp_path: Path) -> None:
    figures = tmp_path / "bench.csv"
    command = ["bench", "--insecure", "--target", agg.gateway.address, "--concurrency", "2"]
    command += ["--seconds", "600", "--warmup", "0", "--isl", "64", "--osl", "2"]
    before = agg.gateway.outcomes("completed")
    running = subprocess.Popen(
        [*SLAGATE, *command, "--csv", str(figures)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with running:
        try:
            eventually(lambda: agg.gateway.outcomes("completed") > before + 10, "ten answers")
            running.send_signal(signal.SIGINT)
            stdout, _ = running.communicate(timeout=HANG_S)
        finally:
            running.kill()
    assert running.returncode == 130
    (row,) = rows_of(figures)
    assert row["interrupted"] == "1"
    assert int(row["answered"]) >= 8
    assert "* interrupted" in stdout
    eventually(agg.gateway.is_idle, "the gateway is idle")


def test_a_gateway_that_is_not_there_is_said_and_nothing_is_written(tmp_path: Path) -> None:
    figures = tmp_path / "bench.csv"
    figures.write_text("of an earlier run\n")
    done = run_here(
        *("bench", "--insecure", "--target", "127.0.0.1:1", "--wait", "0.2"),
        *("--csv", str(figures)),
    )
    assert done.returncode == 1
    assert "127.0.0.1:1: is not ready after 0.2 s: " in done.stderr
    assert not figures.exists()
