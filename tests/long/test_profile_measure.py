"""`slagate profile measure` against worker processes: real gRPC, and real time: not for a busy machine."""

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from slagate.router.cli.tools.profile import profile as profile_cli
from slagate.workers.profiles.profile import load_profile
from support.engine.workers import MODEL, PROFILE
from support.gateway.processes import running, worker_arguments

ROWS = ["--prompts", "2048,8192", "--cached", "0,2048", "--batches", "1,8", "--contexts", "2048"]
ROWS += ["--repeats", "1", "--steps", "32"]
command = typer.Typer()
command.add_typer(profile_cli, name="profile")


def check(path: Path) -> None:
    """Times are those of a busy machine, so they only have to be near.

    That of a prompt is never too short; steps are, when the first of them is seen late.
    """
    measured, real = load_profile(path).tp(1), load_profile(PROFILE).tp(1)
    assert measured.model == MODEL
    assert measured.kv_capacity_tokens == pytest.approx(real.kv_capacity_tokens, rel=0.001)
    for new, cached in ((2048, 0), (8192, 0), (2048, 2048), (8192, 2048)):
        expected_s = real.prefill_s(new, cached)
        assert 0.95 * expected_s < measured.prefill_s(new, cached) < 1.5 * expected_s + 0.1
    for batch in (1, 8):
        expected_s = real.itl_s(batch, 2048)
        assert 0.75 * expected_s < measured.itl_s(batch, 2048) < 2 * expected_s


def test_an_agg_worker_is_measured(tmp_path: Path) -> None:
    out = tmp_path / "measured.json"
    with running("worker", worker_arguments("agg"), tmp_path) as worker:
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
    assert "decode 8 x 2048: " in result.stderr
    assert "without --kv-bytes, 131072 bytes a token is a guess" in result.stderr
    check(out)


def test_a_prefill_and_a_decode_worker_are_measured_together(tmp_path: Path) -> None:
    out = tmp_path / "measured.json"
    with (
        running("prefill", worker_arguments("prefill"), tmp_path) as prefill,
        running("decode", worker_arguments("decode"), tmp_path) as decode,
    ):
        arguments = [
            "profile",
            "measure",
            "--insecure",
            "--target",
            prefill.address,
            "--out",
            str(out),
        ]
        alone = CliRunner().invoke(command, [*arguments, *ROWS])
        assert (alone.exit_code, "--decode" in alone.stderr) == (2, True)
        together = [*arguments, "--decode", decode.address, "--kv-bytes", "1000", *ROWS]
        result = CliRunner().invoke(command, together)
    assert result.exit_code == 0, result.output
    assert "--kv-bytes" not in result.stderr
    assert load_profile(out).kv_bytes_per_token == 1000
    check(out)
