"""Receipts: as the trailing metadata carries them, and of decisions over random fleets."""

import math
import random
from collections.abc import Mapping
from typing import Any, get_args

from msgspec.structs import replace

from slagate.pools.estimator.accuracy import BASES, Calibration
from slagate.pools.estimator.estimator import Coefficients
from slagate.pools.fleet.fleet import Fleet, prepare
from slagate.pools.fleet.pool import PoolSnapshot
from slagate.pools.fleet_file.load import parse_config
from slagate.pools.fleet_file.models import AdmissionMode
from slagate.pools.grid.grid import Stage
from slagate.pools.inflight.pair_key import ANY_PAIR, PairKey
from slagate.pools.inflight.row_view import RowView, State
from slagate.proto import gateway_pb2 as gw
from slagate.proto.rpc.status import OK
from slagate.router.receipts.config import config_message
from slagate.router.receipts.record import ReceiptNumber, Record
from slagate.router.request.errors import Outcome
from slagate.router.request.sla import Sla
from slagate.router.scheduling.bypass import try_bypass
from slagate.router.scheduling.policy import Decision, choose
from slagate.router.scheduling.score import RoutingRequest
from slagate.workers.runtime.cooperative import run_at_once
from support.builders import MODEL, PROFILE, pool_view, view
from support.fleet.files import agg_file, disagg_file
from support.gateway.foreign_client import Answer

KEYS = [
    ANY_PAIR,
    PairKey(transport="nixl", kv_dtype="fp8", block_tokens=32),
    PairKey(transport="nixl", kv_dtype="auto", block_tokens=32, handoff_key="none"),
    PairKey(transport="ucx", kv_dtype="fp8", block_tokens=64, handoff_key="0123456789abcdef"),
]
"""What workers say of their handoffs: some fit each other, some may, some do not."""

CLASSES = {"kept": {"policy": "protect"}, "behind": {"policy": "relegate"}}

ASK = [("slagate-receipt", "1")]
"""Request metadata that asks for one."""


def receipt_of(answer: Answer) -> gw.Receipt:
    """The receipt of an answer; fails when it has none."""
    trailer = answer.trailers["slagate-receipt-bin"]
    assert isinstance(trailer, bytes)
    return gw.Receipt.FromString(trailer)


class RandomFleet:
    """A fleet of several pools a stage, with and without profiles, that is in another state each time.

    With `falls_back` predictions of some pools are off; with `bypasses` decode workers may serve alone.
    """

    def __init__(
        self,
        mode: str = "disagg",
        *,
        spill: str = "listed",
        falls_back: bool = False,
        bypasses: bool = False,
    ) -> None:
        self._falls_back = falls_back
        self._bypasses = bypasses
        content: dict[str, Any] = disagg_file() if mode == "disagg" else agg_file()
        content["enable_priority_retry"] = True
        content["objectives"] = CLASSES
        content["scheduling"] = {"spill": spill, "bypass": "auto" if bypasses else "off"}
        stages = ("prefill", "decode") if mode == "disagg" else ("agg",)
        names = [name for stage in stages for name in content[f"{stage}_pools"]]
        content["pools"] = {
            name: {"workers": [f"{name}:1"]}
            | ({"profile": PROFILE, "tp": 1} if at % 2 or spill != "listed" else {})
            for at, name in enumerate(names)
        }
        overrides = {"min_priority": 5, "max_priority": 9, "target_pool": 1}
        for stage in stages:
            content[f"{stage}_pool_selection_strategy"]["priority_overrides"] = [overrides]
        prepared = prepare(parse_config(content, source="fleet.json", serving=True))
        self.config = config_message(prepared, policy="slagate")
        self._fleet = Fleet(prepared)

    def receipt(self, rng: random.Random, number: int = 1) -> gw.Receipt:
        """The full receipt of one request, some with workers that failed; `number` decides its class."""
        record = Record(0.0)
        record.request_id = f"r-{number}"
        self._keys = rng.choice([[ANY_PAIR], KEYS])
        pools = {name: self._pool(name, rng) for name in self._fleet.pools}
        luck = random.Random(number)
        mode, objective = luck.choice(get_args(AdmissionMode)), luck.choice(["", "", *CLASSES])
        sla = replace(_sla(rng), objective=objective).with_edges(self._fleet.grids.values())
        ask = RoutingRequest(
            MODEL,
            rng.choice([200, 1000, 5000]),
            sla,
            yields=objective == "behind" and mode == "on",
            admission_mode=mode,
        )
        record.decision = self._decide(ask, pools, rng)
        if record.decision.is_bypass and rng.random() < 0.4:
            record.attempt(Stage.AGG, OK)
            excluded = frozenset({record.decision.stages[0].worker or ""})
            other_way = self._decide(replace(ask, excluded=excluded), pools, rng)
            record.decision = record.decision.replaced_by(other_way)
        for choice in () if record.decision.is_bypass else record.decision.stages:
            other = [each for each in record.decision.stages if each.stage is not choice.stage]
            partner = other[0].pair_keys[0] if other and other[0].worker else None
            while choice.winner is not None and rng.random() < 0.4:
                record.attempt(choice.stage, OK)
                excluded = ask.excluded | {choice.winner.view.address}
                ask = replace(ask, excluded=excluded, partner=partner)
                pools = {name: self._pool(name, rng) for name in pools}
                stages = {choice.stage: self._fleet.grids[choice.stage]}
                (choice,) = choose(ask, stages, pools, rng=rng, config=self.config).stages
                record.decision = record.decision.replace(choice)
        stamp = ReceiptNumber(number, 1.5, self.config.version)
        return run_at_once(record.full(Outcome.COMPLETED, 1.0, stamp))

    def _decide(
        self, ask: RoutingRequest, pools: Mapping[str, PoolSnapshot], rng: random.Random
    ) -> Decision:
        grids, config = self._fleet.grids, self.config
        decision = choose(ask, grids, pools, rng=rng, config=config)
        if self._bypasses:
            decision = try_bypass(decision, grids, pools, draw=rng.random(), config=config)
        return decision.with_admission(self._fleet.objectives)

    def _pool(self, name: str, rng: random.Random) -> PoolSnapshot:
        decodes = self._fleet.pools[name].stage is Stage.DECODE
        views: list[RowView] = []
        for worker in range(rng.randint(1, 3)):
            n_ranks, pair = rng.choice([1, 1, 2]), rng.choice(self._keys)
            for rank in range(n_ranks):
                views.append(
                    _row(
                        rng,
                        f"{name}-{worker}:1",
                        rank if n_ranks > 1 else None,
                        cached=not decodes,
                        computes=not decodes or self._bypasses,
                        pair=pair,
                    )
                )
        rng.shuffle(views)
        of = pool_view(name, views, n_leases=rng.choice([3, 200]))
        estimator = self._fleet.pools[name].estimator.frozen
        if rng.random() < 0.7:
            learnt = Coefficients(rng.uniform(0.5, 2), rng.uniform(0, 0.1), rng.uniform(0.5, 2))
            estimator = replace(estimator, coefficients=learnt)
        if self._falls_back:
            ttft, itl = rng.choice(BASES), rng.choice(BASES)
            lines = [
                *[None] * 6,
                Calibration(-1.5, 0.6, 0.5, -3.0, 1.0),
                Calibration(0.2, 1.0, 0.1, -9.0, 9.0),
            ]
            estimator = replace(
                estimator,
                ttft_basis=ttft,
                itl_basis=itl,
                ttft_calibration=rng.choice(lines),
                itl_calibration=rng.choice(lines),
            )
        whole = None
        if self._bypasses and decodes:
            learnt = Coefficients(rng.uniform(0.5, 2), rng.uniform(0, 0.1), 1.0)
            bases = {"ttft_basis": rng.choice(["learnt", *BASES])} if self._falls_back else {}
            whole = replace(estimator, coefficients=learnt, **bases).with_itl_of(estimator)
        return replace(of, estimator=estimator, whole=whole)


def _row(
    rng: random.Random,
    address: str,
    rank: int | None,
    *,
    cached: bool,
    computes: bool,
    pair: PairKey,
) -> RowView:
    """Values from small sets, so that equals are frequent."""
    inflight = rng.choice([0, 0, 0, 1, 4])
    figures: dict[str, Any] = {
        "rank": rank,
        "pair": pair,
        "suspect": rng.random() < 0.15,
        "worker_inflight": inflight + rng.choice([0, 0, 2]),
        "queued_tokens": inflight * 100,
        "queued_s": inflight * rng.choice([0.003, rng.random()]),
        "context_tokens": inflight * 1000,
        "last_chosen": rng.choice([0, 0, 1, 7, 100]),
    }
    if rng.random() < 0.2:
        figures |= {"max_inflight": rng.choice([0, 4]), "max_queued_tokens": rng.choice([100, 500])}
    if rng.random() < 0.2:
        figures["capacity_tokens"] = rng.choice([800, 5000])
    if rng.random() < 0.2:
        figures |= {"foreign_requests": rng.randint(1, 3), "foreign_s": rng.random() / 10}
    if rng.random() < 0.3:
        figures["pace"] = rng.choice([0.5, 2.0, rng.uniform(0.25, 4.0)])
    if not cached and computes:
        figures["takes_whole"] = rng.choice([0, 1, 1])
    if computes and inflight and rng.random() < 0.5:
        figures |= {
            "join_tokens": rng.choice([0, 50, 4000]),
            "join_slack_s": rng.choice([-0.1, 0.01, math.inf]),
            "join_quiet_s": rng.choice([-0.1, 0.01, math.inf]),
            "stall_room_s": rng.choice([0.0, 0.01, 1.0, math.inf]),
        }
    if inflight and rng.random() < 0.5:
        figures["itl_limit_s"] = rng.choice([0.003, 0.02, 0.05])
    if cached and rng.random() < 0.4:
        figures |= {
            "device_tokens": rng.choice([0, 64, 96]),
            "host_tokens": rng.choice([0, 0, 32]),
        }
    return view(
        address,
        state=rng.choice([State.READY] * 8 + [State.NOT_READY, State.REFUSED]),
        inflight=inflight,
        models=rng.choice([(MODEL,)] * 5 + [("other", MODEL), ("other",)]),
        **figures,
    )


def _sla(rng: random.Random) -> Sla:
    targets: Mapping[str, Any] = {
        "ttft_ms": rng.choice([None, 0.0, 50.0, 123.4, 700.0]),
        "itl_ms": rng.choice([None, 0.0, 3.0, 20.1, 40.0]),
        "priority": rng.choice([None, None, 6, -3]),
    }
    return Sla(**targets)
