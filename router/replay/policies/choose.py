"""Makes the gateway's decisions of another router's picks."""

import random
from collections.abc import Mapping
from typing import NamedTuple

import msgspec
import numpy as np

from slagate.pools.fleet.pool import PoolSnapshot
from slagate.pools.grid.grid import Cell, Stage, StageGrid
from slagate.pools.inflight.table import Ints
from slagate.proto import gateway_pb2 as gw
from slagate.router.replay.policies.view import PeerPolicy, Pick, StageView
from slagate.router.request.errors import Overloaded
from slagate.router.scheduling.policy import NO_CONFIG, Decision, StageChoice
from slagate.router.scheduling.score import RoutingRequest, ScoredPool, score_pool


class PeerChoice:
    """A `choose` of the dispatcher that asks a peer's policy. Raises `Overloaded` where that refuses."""

    def __init__(self, policy: PeerPolicy) -> None:
        self._policy = policy

    def __call__(
        self,
        ask: RoutingRequest,
        stages: Mapping[Stage, StageGrid],
        pools: Mapping[str, PoolSnapshot],
        *,
        rng: random.Random,
        config: gw.GatewayConfig = NO_CONFIG,
    ) -> Decision:
        """A decision for these stages, from pool snapshots by name."""
        draw = rng.random()
        places = {stage: self._placed(stage, ask, grid, pools) for stage, grid in stages.items()}
        picks = self._policy.pick(
            {stage: _view(stage, ask, place.scored) for stage, place in places.items()}, draw
        )
        if isinstance(picks, str):
            raise Overloaded("no worker is predicted to meet the targets", retry_after_ms=1000)
        choices = [
            _choice(place, picks[stage], ask, stage=stage, draw=draw, config=config)
            for stage, place in places.items()
        ]
        return Decision(ask, tuple(choices))

    def _placed(
        self,
        stage: Stage,
        ask: RoutingRequest,
        grid: StageGrid,
        pools: Mapping[str, PoolSnapshot],
    ) -> "_Placed":
        values = {
            "isl": ask.isl_tokens,
            "context_length": ask.isl_tokens,
            "ttft_ms": ask.sla.ttft_ms,
            "itl_ms": ask.sla.itl_ms,
        }
        cell, order = grid.place(values, ask.sla.priority)
        names = grid.pool_names if self._policy.over_all_pools else order[:1]
        scored = tuple(score_pool(stage, ask, pools[name]) for name in names)
        return _Placed(grid, cell, scored)


class _Placed(NamedTuple):
    """Where the grid places a request in one stage, and the pools that the policy may choose from."""

    grid: StageGrid
    cell: Cell
    scored: tuple[ScoredPool, ...]


def _view(stage: Stage, ask: RoutingRequest, scored: tuple[ScoredPool, ...]) -> StageView:
    """The rows of these pools, one pool behind the other."""
    pools = [each.pool for each in scored]

    def ints(name: str) -> Ints:
        return np.concatenate([pool.rows.ints(name) for pool in pools])

    zeros = [np.zeros(len(pool.rows)) for pool in pools]
    return StageView(
        stage=stage,
        isl_tokens=ask.isl_tokens,
        ttft_s=None if ask.sla.ttft_ms is None else ask.sla.ttft_ms / 1000,
        itl_s=None if ask.sla.itl_ms is None else ask.sla.itl_ms / 1000,
        names=tuple(
            address if rank is None else f"{address}/{rank}"
            for pool in pools
            for address, rank in pool.rows.names
        ),
        is_open=np.concatenate([each.is_open for each in scored]),
        cached_tokens=np.concatenate([pool.cached.cached_tokens for pool in pools]),
        inflight=ints("inflight"),
        queued_tokens=ints("queued_tokens"),
        queued_s=np.concatenate([pool.rows.load_s for pool in pools]),
        context_tokens=ints("context_tokens"),
        capacity_tokens=ints("capacity_tokens"),
        max_inflight=ints("max_inflight"),
        prefill_s=np.concatenate(
            [
                none if each.work_s is None else each.work_s
                for each, none in zip(scored, zeros, strict=True)
            ]
        ),
        predicted_itl_s=np.concatenate(
            [
                none if each.itl_s is None else each.itl_s
                for each, none in zip(scored, zeros, strict=True)
            ]
        ),
        since_lease=np.concatenate([pool.n_leases - pool.rows.last_chosen for pool in pools]),
    )


def _choice(
    place: _Placed,
    pick: Pick,
    ask: RoutingRequest,
    *,
    stage: Stage,
    draw: float,
    config: gw.GatewayConfig,
) -> StageChoice:
    """The choice of the picked row; of none where none was picked."""
    scored, row = place.scored, pick.row
    if row is not None:
        for each in scored:
            if row < len(each.pool.rows):
                break
            row -= len(each.pool.rows)
        if pick.ttft_s is not None:
            each = msgspec.structs.replace(each, ttft_s=np.full(len(each.score_s), pick.ttft_s))
        scored = (each,)
    order = tuple(each.pool.name for each in scored)
    return StageChoice(
        stage=stage,
        ask=ask,
        grid=place.grid,
        cell=place.cell,
        pool_order=order,
        pool=order[0],
        scored=scored,
        row=row,
        starved=False,
        draw=draw,
        config=config,
    )
