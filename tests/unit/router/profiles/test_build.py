"""Profiles from a database: the rows that are asked for, and what happens where there is no number."""

import json
import math
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from slagate.router.cli.tools import profile as profile_cli_module
from slagate.router.cli.tools.profile import profile as profile_cli
from slagate.router.profiles.build import KvCache, profile_content
from slagate.workers.runtime.usage import UsageError

QWEN = Path(__file__).resolve().parents[4] / "configs/profiles/qwen3-32b-fp8-h200.json"
command = typer.Typer()
command.add_typer(profile_cli, name="profile")


class Table:
    """A source that knows what a profile file says."""

    engine = "tensorrt-llm 1.3.0rc20"
    source = "AIConfigurator 0.12.0, silicon database, static context and generation modes"

    def __init__(self, path: Path) -> None:
        self._sizes = json.loads(path.read_text())["tp"]

    def prefill_ms(self, tp: int, new_tokens: int, cached_tokens: int) -> float:
        return self._ms(tp, "prefill", new_tokens, cached_tokens)

    def itl_ms(self, tp: int, batch_size: int, context_tokens: int) -> float:
        return self._ms(tp, "decode", batch_size, context_tokens)

    def kv_cache(self, tp: int) -> KvCache:
        return KvCache(self._sizes[str(tp)]["kv_capacity_tokens"], 131_072 // tp)

    def _ms(self, tp: int, table: str, x: int, y: int) -> float:
        (found,) = (ms for a, b, ms in self._sizes[str(tp)][table] if (a, b) == (x, y))
        return float(found) + 1e-9  # of more digits than the file has


def test_the_rows_are_those_of_the_packaged_profiles() -> None:
    sizes: list[int] = []
    content = profile_content(
        "Qwen/Qwen3-32B-FP8", "h200_sxm", [8, 1, 2, 4, 1], Table(QWEN), on_size=sizes.append
    )
    assert content == json.loads(QWEN.read_text())
    assert sizes == [1, 2, 4, 8]


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_a_row_without_a_time_is_an_error_that_names_it(value: float) -> None:
    """Taken as it is, a missing time of 0 would make the fastest pool of all."""

    class Hole(Table):
        def itl_ms(self, tp: int, batch_size: int, context_tokens: int) -> float:
            known = super().itl_ms(tp, batch_size, context_tokens)
            return value if (batch_size, context_tokens) == (8, 2048) else known

    with pytest.raises(UsageError, match="no time for tp 2 at 8 x 2048 tokens"):
        profile_content("m", "s", [2], Hole(QWEN), on_size=lambda _: None)


def arguments(out: Path, system: str = "h200_sxm", tp: str = "1") -> list[str]:
    given = ["--model", "Qwen/Qwen3-32B-FP8", "--system", system, "--tp", tp, "--out", str(out)]
    return ["profile", "build", *given]


def test_without_aiconfigurator_the_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "aiconfigurator", None)
    result = CliRunner().invoke(command, arguments(tmp_path / "o.json"))
    assert result.exit_code == 2
    assert "pip install 'slagate[aiconfigurator]', which needs Python 3.11 to 3.13" in result.stderr
    assert not (tmp_path / "o.json").exists()


def test_a_profile_that_could_not_be_read_back_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Times that rise without end: no row of them is wrong, and the file before stays as it was."""

    class Steep(Table):
        def __init__(self, *_: object) -> None:
            super().__init__(QWEN)

        def itl_ms(self, tp: int, batch_size: int, context_tokens: int) -> float:
            return math.pow(10.0, min(300, 40 * math.log2(batch_size) + 1))

    monkeypatch.setattr(profile_cli_module, "AiConfigurator", Steep)
    out = tmp_path / "o.json"
    out.write_text("before")
    result = CliRunner().invoke(command, arguments(out))
    assert result.exit_code == 2, result.output
    assert f"{out} was not written: profile " in result.stderr
    assert "tp.1.decode: rows too steep" in result.stderr
    assert out.read_text() == "before"


def test_the_kv_cache_of_a_token_is_that_of_the_smallest_size() -> None:
    """Larger sizes have more GPUs than KV heads: each head is there twice, and is no more of a cache."""

    class Doubled(Table):
        def kv_cache(self, tp: int) -> KvCache:
            return KvCache(100_000, 131_072 // min(tp, 4))

    content = profile_content("m", "s", [8, 2], Doubled(QWEN), on_size=lambda _: None)
    assert content["kv_bytes_per_token"] == 131_072
