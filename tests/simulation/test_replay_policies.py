"""Every policy of a replay in a short run over both modes: all invariants hold, and nobody is forgotten."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from slagate.router.replay.classes import RequestClass, drawn
from slagate.router.replay.client import Ask
from slagate.router.replay.fleet import REAL, load_fleet
from slagate.router.replay.policies.registry import NAMES, make
from slagate.router.replay.run import play
from slagate.router.replay.trace import TraceRow
from slagate.workers.sim.args import VOCAB_SIZE

SEED = 3
CLASSES = (
    RequestClass("tight", 0.5, ttft_ms=250, itl_ms=15, max_tokens=40),
    RequestClass("loose", 0.5, ttft_ms=10_000, itl_ms=100, max_tokens=40),
)
REFUSING = {"mooncake", "polyserve"}


def pool(tp: int, replicas: int) -> dict[str, Any]:
    """So few requests at once that some have to wait."""
    return {"profile": "qwen3-32b-fp8-h200", "tp": tp, "replicas": replicas, "max_inflight": 3}


def strategy(stage: str) -> dict[str, Any]:
    axes: dict[str, Any] = {"itl_edges_ms": [0, 50, 200]}
    if stage != "agg":
        axes[f"{'isl' if stage == 'prefill' else 'context_length'}_edges"] = [0, 131_072]
    if stage != "decode":
        axes["ttft_edges_ms"] = [0, 1000, 20_000]
    if stage == "prefill":
        del axes["itl_edges_ms"]
    mapping = [[0, 1], [0, 1]] if stage == "agg" else [[0, 1]]
    return {f"{stage}_pool_selection_strategy": {**axes, f"{stage}_pool_mapping": mapping}}


def fleet_file(*stages: str) -> dict[str, Any]:
    file: dict[str, Any] = {"mode": "agg" if stages == ("agg",) else "disagg", "pools": {}}
    for stage in stages:
        names = [f"{stage}-fast", f"{stage}-cheap"]
        file |= {f"num_{stage}_pools": 2, f"{stage}_pools": names, **strategy(stage)}
        file["pools"] |= {names[0]: pool(4, 1), names[1]: pool(1, 2)}
    return file


def asks(n: int = 40) -> list[Ask]:
    """Bursts of prompts of which some go on from others."""
    rng = random.Random(SEED)
    found = []
    for number in range(n):
        n_blocks = rng.randint(1, 8)
        conversation = rng.randrange(12)
        row = TraceRow(
            number,
            time_s=0.0,
            isl_tokens=512 * n_blocks - rng.randrange(100),
            osl_tokens=rng.randint(1, 60),
            hash_ids=tuple(1000 * conversation + at for at in range(n_blocks)),
        )
        sla = drawn(CLASSES, SEED, row.conversation)
        prompt = row.prompt(VOCAB_SIZE)
        arrival_s = 0.5 * (number // 10) + 0.005 * number
        found.append(
            Ask(row, sla, arrival_s, prompt, row.osl_tokens, sla.max_tokens, ignore_eos=False)
        )
    return found


@pytest.mark.parametrize("stages", [("prefill", "decode"), ("agg",)], ids=["disagg", "agg"])
@pytest.mark.parametrize("policy", NAMES)
def test_a_run_with_a_policy(policy: str, stages: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "fleet.json"
    path.write_text(json.dumps(fleet_file(*stages)))
    played = play(load_fleet(path), asks(), make(policy, {}), REAL, SEED)
    assert len(played.answers) == 40
    refused = sum(answer.is_refused for answer in played.answers)
    assert sum(answer.is_answered for answer in played.answers) == 40 - refused
    assert (refused > 0) == (policy in REFUSING)
    # All were at their limits at some time, and the policy was asked again.
    assert any(answer.receipt.actual.waited_ms > 0 for answer in played.answers)
