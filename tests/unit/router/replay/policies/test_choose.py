"""What a peer's policy sees of the gateway's pools, and what becomes of its picks."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import pytest

from slagate.pools.fleet.pool import PoolSnapshot
from slagate.pools.grid.grid import Stage
from slagate.pools.inflight.row_view import State
from slagate.router.replay.policies.choose import LINK_BYTES_PER_S, PeerChoice
from slagate.router.replay.policies.view import REFUSED, Pick, Picks, StageView
from slagate.router.request.errors import Overloaded
from slagate.router.request.sla import Sla
from slagate.router.scheduling.policy import Decision
from support.builders import ask, one_cell, pool_view, profiled, rng, view


@dataclass(frozen=True)
class Noted:
    """Answers as it is told to, and keeps what it saw."""

    answer: Mapping[Stage, Pick] | str
    over_all_pools: ClassVar[bool] = True
    seen: dict[Stage, StageView] = field(default_factory=dict)

    def pick(self, views: Mapping[Stage, StageView], draw: float) -> Picks | str:
        self.seen.update(views)
        return self.answer


@dataclass(frozen=True)
class NotedOfGrid(Noted):
    over_all_pools: ClassVar[bool] = False


ASK = ask(isl_tokens=1000, sla=Sla(ttft_ms=500, itl_ms=30))
GRIDS = {stage: one_cell(stage, f"{stage.value}-fast", f"{stage.value}-cheap") for stage in Stage}


def pools(stage: Stage) -> dict[str, PoolSnapshot]:
    """A fast one with one worker and a cheap one with two."""
    at = stage.value[0]
    fast = view(f"{at}0:1", inflight=1, max_inflight=1, capacity_tokens=8000, last_chosen=3)
    busy = view(
        f"{at}1:1",
        inflight=2,
        queued_tokens=700,
        queued_s=0.2,
        context_tokens=4000,
        capacity_tokens=4500,
        device_tokens=256,
        host_tokens=128,
        last_chosen=5,
    )
    down = view(f"{at}2:1", state=State.NOT_READY, capacity_tokens=4000)
    return {
        f"{stage.value}-fast": pool_view(f"{stage.value}-fast", [fast], n_leases=3),
        f"{stage.value}-cheap": pool_view(
            f"{stage.value}-cheap", [busy, down], speed=profiled(), n_leases=7
        ),
    }


def decide(policy: Noted, *stages: Stage) -> Decision:
    grids = {stage: GRIDS[stage] for stage in stages}
    found = {name: each for stage in stages for name, each in pools(stage).items()}
    return PeerChoice(policy, now_s=lambda: 12.5)(ASK, grids, found, rng=rng())


def test_a_prefill_stage_as_a_policy_sees_it() -> None:
    policy = Noted({Stage.PREFILL: Pick(1)})
    decide(policy, Stage.PREFILL)
    seen = policy.seen[Stage.PREFILL]
    speed = profiled().frozen
    assert (seen.now_s, seen.isl_tokens, seen.ttft_s, seen.itl_s) == (12.5, 1000, 0.5, 0.030)
    assert seen.names == ("p0:1", "p1:1", "p2:1")
    assert seen.is_open.tolist() == [False, True, False]
    assert seen.is_full.tolist() == [True, False, False]
    assert seen.inflight.tolist() == [1, 2, 0]
    assert seen.queued_tokens.tolist() == [0, 700, 0]
    assert (seen.cached_tokens.tolist(), seen.device_tokens.tolist()) == ([0, 384, 0], [0, 256, 0])
    assert seen.uncached_tokens.tolist() == [1000, 616, 1000]
    assert seen.since_lease.tolist() == [0, 2, 7]
    own_s = speed.work_s(616, 384) + speed.host_s(128)
    assert seen.prefill_s[1] == pytest.approx(0.2 + own_s)
    assert seen.prompt_tokens_per_s[1] == pytest.approx(1000 / speed.prefill_s(1000, 0))
    assert seen.first_token_s.tolist() == seen.prefill_s.tolist()
    assert (seen.transfer_s.tolist(), seen.step_s(100.0).tolist()) == ([0.0] * 3, [0.0] * 3)


def test_a_decode_stage_as_a_policy_sees_it() -> None:
    policy = Noted({Stage.DECODE: Pick(None)})
    decide(policy, Stage.DECODE)
    seen = policy.seen[Stage.DECODE]
    speed = profiled().frozen
    assert speed.profile is not None
    # The KV cache of the second has no room for 1000 tokens more; the third is down, not full.
    assert seen.is_open.tolist() == [False, False, False]
    assert seen.is_full.tolist() == [True, True, False]
    assert seen.kv_share.tolist() == pytest.approx([0, 8 / 9, 0])
    assert seen.step_s(0.0)[1] == pytest.approx(speed.itl_s(3, 5000 / 3))
    assert seen.step_s(50.0)[1] == pytest.approx(speed.itl_s(3, 5000 / 3 + 50))
    transfer_s = 1000 * speed.profile.kv_bytes_per_token / LINK_BYTES_PER_S
    assert seen.transfer_s.tolist() == pytest.approx([0, transfer_s, transfer_s])
    assert seen.first_token_s[1] == pytest.approx(transfer_s + seen.step_s(0.0)[1])
    assert (seen.prefill_s.tolist(), seen.prompt_tokens_per_s.tolist()) == ([0.0] * 3, [0.0] * 3)


def test_an_aggregated_stage_has_both_and_no_transfer() -> None:
    policy = Noted({Stage.AGG: Pick(1)})
    decide(policy, Stage.AGG)
    seen = policy.seen[Stage.AGG]
    assert seen.prefill_s[1] > 0.2
    assert seen.step_s(0.0)[1] > 0
    assert seen.transfer_s.tolist() == [0.0] * 3
    assert seen.first_token_s.tolist() == seen.prefill_s.tolist()


def test_a_policy_within_the_grid_sees_its_pool_alone() -> None:
    policy = NotedOfGrid({Stage.PREFILL: Pick(0)})
    (choice,) = decide(policy, Stage.PREFILL).stages
    assert policy.seen[Stage.PREFILL].names == ("p1:1", "p2:1")
    assert (choice.pool, choice.pool_order, choice.worker) == (
        "prefill-cheap",
        ("prefill-cheap",),
        "p1:1",
    )


def test_a_pick_is_a_row_of_its_pool_with_the_ttft_that_the_policy_predicts() -> None:
    answer = {Stage.PREFILL: Pick(1, 0.75), Stage.DECODE: Pick(0)}
    decision = decide(Noted(answer), Stage.PREFILL, Stage.DECODE)
    prefill, decode = decision.stages
    assert (prefill.pool, prefill.row, prefill.worker) == ("prefill-cheap", 0, "p1:1")
    assert prefill.winner is not None
    assert prefill.winner.predicted_ttft_s == 0.75
    assert (decode.pool, decode.row, decode.worker) == ("decode-fast", 0, "d0:1")
    assert decode.winner is not None
    assert decode.winner.predicted_ttft_s is None


def test_no_pick_is_a_wait_for_all_pools_it_might_go_to() -> None:
    (choice,) = decide(Noted({Stage.PREFILL: Pick(None)}), Stage.PREFILL).stages
    assert (choice.row, choice.pool_order) == (None, ("prefill-fast", "prefill-cheap"))
    assert choice.reasons == {"at its limit", "not_ready"}


def test_a_refusal_is_the_gateways_for_load() -> None:
    with pytest.raises(Overloaded, match="no worker is predicted to meet the targets"):
        decide(Noted(REFUSED), Stage.PREFILL)
