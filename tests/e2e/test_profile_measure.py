"""`slagate profile measure` against worker processes: real gRPC.

That what it finds is right is tested in virtual time in tests/unit, and in real time in tests/long.
"""

import json
import signal
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from slagate.router.cli.tools.profile import profile as profile_cli
from slagate.workers.profiles.profile import load_profile
from support.engine.workers import MODEL, PROFILE
from support.gateway.processes import eventually, running, starting, worker_arguments
from support.limits import HANG_S

ROWS = ["--prompts", "512", "--cached", "0", "--batches", "1,8", "--contexts", "512"]
ROWS += ["--repeats", "1", "--steps", "16"]
command = typer.Typer()
command.add_typer(profile_cli, name="profile")


def test_an_agg_worker_is_measured(tmp_path: Path) -> None:
    out = tmp_path / "measured.json"
    with running("worker", worker_arguments("agg", "--time-scale", "10"), tmp_path) as worker:
        arguments = [
            "profile",
            "measure",
            "--insecure",
            "--target",
            worker.address,
            "--out",
            str(out),
            *ROWS,
        ]
        result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 0, result.output
    assert "decode 8 x 512: " in result.stderr
    assert "without --kv-bytes, 131072 bytes a token is a guess" in result.stderr
    measured, real = load_profile(out).tp(1), load_profile(PROFILE).tp(1)
    assert measured.model == MODEL
    assert measured.kv_capacity_tokens == pytest.approx(real.kv_capacity_tokens, rel=0.001)
    assert measured.prefill_s(512, 0) > 0
    assert measured.itl_s(8, 512) > 0


def test_a_worker_that_is_not_there_is_named(tmp_path: Path) -> None:
    arguments = [
        "profile",
        "measure",
        "--insecure",
        "--target",
        "127.0.0.1:9",
        "--out",
        str(tmp_path / "o.json"),
    ]
    result = CliRunner().invoke(command, arguments)
    assert (result.exit_code, "cannot connect to 127.0.0.1:9: " in result.stderr) == (1, True)


@pytest.mark.parametrize(
    ("seen", "name"), [("decode 2 x 512: ", "out.json"), ("prefill 128 + ", "out.json.partial")]
)
def test_ctrl_c_keeps_the_rows_measured_so_far(tmp_path: Path, seen: str, name: str) -> None:
    out = tmp_path / "out.json"
    many = ",".join(map(str, range(1, 200)))
    rows = ["--prompts", f"64,128,{many}", "--cached", "0", "--batches", many, "--contexts", "512"]
    if name == "out.json":
        rows[1] = "64,128"
    with running("worker", worker_arguments("agg", "--time-scale", "2"), tmp_path) as worker:
        arguments = ["profile", "measure", "--insecure", "--target", worker.address]
        arguments += ["--out", str(out), *rows, "--repeats", "1", "--steps", "16"]
        with starting("measure", arguments, tmp_path) as measure:
            eventually(lambda: seen in measure.stderr(), "a row is measured")
            measure.popen.send_signal(signal.SIGINT)
            assert measure.popen.wait(HANG_S) == 130
            told = measure.stderr()
    assert f"interrupted; the rows measured so far are in {tmp_path / name}" in told
    assert "Traceback" not in told
    found = json.loads((tmp_path / name).read_text())["tp"]["1"]
    assert len(found["prefill"]) == told.count("prefill ")
    assert len(found["decode"]) == told.count("decode ")
    assert not (set(tmp_path.glob("out.json*")) - {tmp_path / name})


def test_an_output_that_cannot_be_written_is_told_before_anything_is_measured(
    tmp_path: Path,
) -> None:
    out = tmp_path / "gone" / "out.json"
    arguments = ["profile", "measure", "--insecure", "--target", "127.0.0.1:9", "--out", str(out)]
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 2
    assert f"--out {out}: cannot be written: No such file or directory" in result.stderr
