"""`profile build` with the real AIConfigurator, which is too large to be installed for every run."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from slagate.router.cli.tools.profile import profile as profile_cli
from slagate.workers.profiles.profile import load_profile

QWEN = Path(__file__).resolve().parents[2] / "configs/profiles/qwen3-32b-fp8-h200.json"
command = typer.Typer()
command.add_typer(profile_cli, name="profile")


def arguments(out: Path, system: str = "h200_sxm", tp: str = "1") -> list[str]:
    given = ["--model", "Qwen/Qwen3-32B-FP8", "--system", system, "--tp", tp, "--out", str(out)]
    return ["profile", "build", *given]


def test_aiconfigurators_database_gives_the_packaged_profile(tmp_path: Path) -> None:
    """Its own estimate of the KV cache is not the one in the file."""
    out = tmp_path / "o.json"
    result = CliRunner().invoke(
        command, [*arguments(out, tp="1,8"), "--engine-version", "1.3.0rc20"]
    )
    assert result.exit_code == 0, result.output
    built, packaged = load_profile(out), json.loads(QWEN.read_text())
    assert (built.model, built.engine) == (packaged["model"], packaged["engine"])
    for tp in (1, 8):
        mine = json.loads(out.read_text())["tp"][str(tp)]
        theirs = packaged["tp"][str(tp)]
        assert (mine["prefill"], mine["decode"]) == (theirs["prefill"], theirs["decode"])
        assert mine["kv_capacity_tokens"] == pytest.approx(theirs["kv_capacity_tokens"], rel=0.1)
    refused = CliRunner().invoke(command, arguments(out, system="nope"))
    assert (refused.exit_code, "no TensorRT-LLM database" in refused.stderr) == (2, True)
