"""Makes the gateway's decisions of another router's picks."""

import asyncio
import random
from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from slagate.pools.fleet.pool import PoolSnapshot
from slagate.pools.grid.grid import Cell, Stage, StageGrid
from slagate.pools.inflight.rows import QUEUE_FULL, Flags, Floats, Ints
from slagate.proto import gateway_pb2 as gw
from slagate.router.replay.policies.view import PeerPolicy, Pick, StageView
from slagate.router.request.errors import Overloaded
from slagate.router.request.settings import Settings
from slagate.router.scheduling.policy import NO_CONFIG, Choose, Decision, StageChoice, choose
from slagate.router.scheduling.score import RoutingRequest, ScoredPool, score_pool

LINK_BYTES_PER_S = 50e9
"""What KV cache is taken to move at between workers: one 400 Gb/s NIC each."""


def _loop_s() -> float:
    return asyncio.get_running_loop().time()


class Router(NamedTuple):
    """How a gateway chooses: one of its own policies, or with `choose` another one."""

    policy: str = Settings.policy
    choose: Choose = choose


class PeerChoice:
    """A `choose` of the dispatcher that asks a peer's policy. Raises `Overloaded` where that refuses."""

    def __init__(self, policy: PeerPolicy, *, now_s: Callable[[], float] = _loop_s) -> None:
        self._policy = policy
        self._now_s = now_s

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
        ask = replace(ask, by_targets=False)  # the peer's policy says what they decide
        draw = rng.random()
        places = {stage: self._placed(stage, ask, grid, pools) for stage, grid in stages.items()}
        now_s = self._now_s()
        picks = self._policy.pick(
            {stage: _view(stage, ask, place.scored, now_s) for stage, place in places.items()}, draw
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
            "ttft_ms": 0 if "ttft_ms" in ask.sla.as_fast else ask.sla.ttft_ms,
            "itl_ms": 0 if "itl_ms" in ask.sla.as_fast else ask.sla.itl_ms,
        }
        cell, order, _ = grid.place(values, ask.sla.priority)
        names = grid.pool_names if self._policy.over_all_pools else order[:1]
        scored = tuple(score_pool(stage, ask, pools[name]) for name in names)
        return _Placed(grid, cell, scored)


class _Placed(NamedTuple):
    """Where the grid places a request in one stage, and the pools that the policy may choose from."""

    grid: StageGrid
    cell: Cell
    scored: tuple[ScoredPool, ...]


def _view(
    stage: Stage, ask: RoutingRequest, scored: tuple[ScoredPool, ...], now_s: float
) -> StageView:
    """The rows of these pools, one pool behind the other."""
    pools, sla = [each.pool for each in scored], ask.sla

    def ints(name: str) -> Ints:
        return np.concatenate([pool.rows.ints(name) for pool in pools])

    return StageView(
        stage=stage,
        now_s=now_s,
        isl_tokens=ask.isl_tokens,
        ttft_s=None if sla.ttft_ms is None else sla.ttft_ms / 1000,
        itl_s=None if sla.itl_ms is None else sla.itl_ms / 1000,
        names=tuple(
            address if rank is None else f"{address}/{rank}"
            for pool in pools
            for address, rank in pool.rows.names
        ),
        is_open=np.concatenate([each.is_open for each in scored]),
        is_full=np.concatenate([_is_full(each) for each in scored]),
        cached_tokens=np.concatenate([pool.cached.cached_tokens for pool in pools]),
        device_tokens=np.concatenate([pool.cached.device_tokens for pool in pools]),
        inflight=ints("inflight"),
        queued_tokens=ints("queued_tokens"),
        context_tokens=ints("context_tokens"),
        capacity_tokens=ints("capacity_tokens"),
        since_lease=np.concatenate([pool.n_leases - pool.rows.last_chosen for pool in pools]),
        prefill_s=np.concatenate([_prefill_s(each) for each in scored]),
        prompt_tokens_per_s=np.concatenate([_prompt_tokens_per_s(each) for each in scored]),
        transfer_s=np.concatenate([_transfer_s(each) for each in scored]),
        step_s=lambda more_tokens: np.concatenate([_step_s(each, more_tokens) for each in scored]),
    )


def _is_full(scored: ScoredPool) -> Flags:
    rows = scored.pool.rows
    full: Flags = rows.ints("worker_inflight") >= rows.ints("max_inflight")
    if scored.stage is Stage.DECODE:
        needed = rows.ints("context_tokens") + scored.ask.isl_tokens
        full |= (needed > rows.ints("capacity_tokens")) & (rows.ints("inflight") > 0)
    else:
        full |= rows.unavailable & QUEUE_FULL != 0
    return full


def _prefill_s(scored: ScoredPool) -> Floats:
    return np.zeros(len(scored.pool.rows)) if scored.ttft_s is None else scored.ttft_s


def _prompt_tokens_per_s(scored: ScoredPool) -> Floats:
    isl_tokens, rate = scored.ask.isl_tokens, 0.0
    if scored.stage is not Stage.DECODE:
        rate = isl_tokens / scored.pool.estimator.prefill_s(isl_tokens, 0)
    return np.full(len(scored.pool.rows), rate)


def _transfer_s(scored: ScoredPool) -> Floats:
    profile, seconds = scored.pool.estimator.profile, 0.0
    if scored.stage is Stage.DECODE and profile is not None:
        seconds = scored.ask.isl_tokens * profile.kv_bytes_per_token / LINK_BYTES_PER_S
    return np.full(len(scored.pool.rows), seconds)


def _step_s(scored: ScoredPool, more_tokens: float) -> Floats:
    if scored.stage is Stage.PREFILL:
        return np.zeros(len(scored.pool.rows))
    rows = scored.pool.rows
    mean_tokens = rows.mean_tokens(scored.ask.isl_tokens) + more_tokens
    return scored.pool.estimator.itl_of_batches(rows.batch, mean_tokens)


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
            each = msgspec.structs.replace(each, ttft_s=np.full(len(each.pool.rows), pick.ttft_s))
        scored = (each,)
    order = tuple(each.pool.name for each in scored)
    return StageChoice(
        stage=stage,
        pool_stage=stage,
        ask=ask,
        grid=place.grid,
        cell=place.cell,
        pool_order=order,
        pool=order[0],
        scored=scored,
        won=scored[-1],
        row=row,
        starved=False,
        draw=draw,
        config=config,
    )
