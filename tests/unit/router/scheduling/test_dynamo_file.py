"""A file of Dynamo's global router under load: its pools, overrides and retries, and nobody is refused."""

import random
from typing import Any

import pytest

from slagate.pools.fleet.fleet import Fleet, prepare
from slagate.pools.fleet.pool import Lease
from slagate.pools.fleet_file.load import parse_config
from slagate.pools.fleet_file.models import AdmissionMode
from slagate.pools.inflight.engine_queue import Work
from slagate.router.request.sla import Sla
from slagate.router.scheduling.dispatcher import Dispatcher
from support.builders import MODEL, PROFILE, ask, model_info, rng, take_now

LISTS = {
    "prefill_pools": "prefill_pool_dynamo_namespaces",
    "decode_pools": "decode_pool_dynamo_namespaces",
    "agg_pools": "agg_pool_dynamo_namespaces",
}
RULE = {"min_priority": 5, "max_priority": 9, "target_pool": 0}


def dynamo_file(mode: str, *, retry: bool) -> dict[str, Any]:
    """Three pools a stage and nothing that Dynamo does not have, but where the workers are."""
    content: dict[str, Any] = {"mode": mode, "enable_priority_retry": retry, "pools": {}}
    low_high = {"isl_min": 0, "isl_max": 8000, "isl_resolution": 3}
    ttft = {"ttft_min_ms": 0, "ttft_max_ms": 900, "ttft_resolution": 3}
    itl = {"itl_min_ms": 0, "itl_max_ms": 45, "itl_resolution": 3}
    size = {f"context_length_{key[4:]}": value for key, value in low_high.items()}
    mapping: list[Any] = [[0, 1, 2], [0, 0, 1], [2, 1, 0]]
    of_stage = {
        "prefill": low_high | ttft,
        "decode": size | itl,
        "agg": low_high | ttft | itl,
    }
    for stage in ("prefill", "decode") if mode == "disagg" else ("agg",):
        names = [f"{stage}-{speed}" for speed in ("fast", "mid", "slow")]
        content |= {
            f"num_{stage}_pools": 3,
            f"{stage}_pool_dynamo_namespaces": names,
            f"{stage}_pool_priorities": [0, 1, 2],
            f"{stage}_pool_selection_strategy": {
                **of_stage[stage],
                f"{stage}_pool_mapping": [mapping] * 3 if stage == "agg" else mapping,
                "priority_overrides": [RULE],
            },
        }
        for name in names:
            content["pools"][name] = {"workers": [f"{name}:1"], "profile": PROFILE, "tp": 1}
    return content


def dispatcher(mode: str, *, retry: bool = False) -> Dispatcher:
    content = dynamo_file(mode, retry=retry)
    made = Fleet(prepare(parse_config(content, source="f", serving=True)))
    for each in made.members():
        each.set_models({MODEL: model_info()})
        each.probe_ok()
    return Dispatcher(made, rng=rng())


def request(draws: random.Random) -> tuple[int, Sla]:
    sla = Sla(
        ttft_ms=draws.choice([None, 0.0, 1.0, 350.0, 800.0]),
        itl_ms=draws.choice([None, 0.0, 1.0, 20.0, 40.0]),
        priority=draws.choice([None, None, 4, 7]),
    )
    return draws.choice([100, 3000, 7000]), sla


@pytest.mark.parametrize("mode", ["disagg", "agg"])
@pytest.mark.parametrize("retry", [False, True])
def test_whatever_the_load_a_request_goes_where_dynamo_sends_it(mode: str, *, retry: bool) -> None:
    d = dispatcher(mode, retry=retry)
    draws, n_missed = random.Random(1), 0
    held: list[Lease] = []
    for _ in range(300):
        pool = draws.choice(list(d.fleet.pools.values()))
        held.append(pool.lease(0, Work(1000, draws.choice([0.0, 0.1, 2.0]), 1000), None))
        if len(held) > 4:
            held.pop(draws.randrange(len(held))).release()
        isl_tokens, sla = request(draws)
        taken = take_now(d, ask(isl_tokens=isl_tokens, sla=sla))
        for lease in taken.leases.values():
            lease.release()
        decision = taken.decision
        for choice in decision.stages:
            values = {
                "isl": isl_tokens,
                "context_length": isl_tokens,
                "ttft_ms": sla.ttft_ms,
                "itl_ms": sla.itl_ms,
            }
            cell = choice.grid.select(values, sla.priority)
            assert choice.pool == choice.grid.pool_names[cell.pool]
            assert choice.overridden == (sla.priority == 7 and cell.base_pool != 0)
            retries = choice.grid.retry_order(cell.pool)
            assert choice.pool_order == tuple(choice.grid.pool_names[at] for at in retries)
            assert len(retries) == (cell.pool + 1 if retry else 1)
        assert decision.admission == ("served" if decision.is_met is False else "")
        n_missed += decision.is_met is False
    assert 30 <= n_missed <= 270


@pytest.mark.parametrize("mode", ["disagg", "agg"])
@pytest.mark.parametrize("admission", ["off", "shadow"])
def test_nobody_is_refused_for_a_prediction_unless_an_operator_says_so(
    mode: str, admission: AdmissionMode
) -> None:
    d = dispatcher(mode)
    assert d.admission == "off"
    d.set_admission(admission)
    for pool in d.fleet.pools.values():
        pool.lease(0, Work(1000, 60.0, 1000), None)
    taken = take_now(d, ask(sla=Sla(ttft_ms=300.0, itl_ms=20.0)))
    assert taken.decision.admission == ("served" if admission == "off" else "shadow")


@pytest.mark.parametrize("mode", ["disagg", "agg"])
def test_a_pool_that_has_nobody_is_left_for_faster_ones_only_with_priority_retry(mode: str) -> None:
    first = "prefill" if mode == "disagg" else "agg"
    asked = ask(isl_tokens=100, sla=Sla(ttft_ms=800.0, itl_ms=1.0))
    for retry in (False, True):
        d = dispatcher(mode, retry=retry)
        (slow,) = d.fleet.pools[f"{first}-slow"].members.values()
        failed = ask(isl_tokens=100, sla=asked.sla, excluded=frozenset({slow.address}))
        choice = d.explain(asked).stages[0]
        assert choice.pool == f"{first}-slow"
        again = d.explain(failed).stages[0]
        assert (again.pool, again.worker) == (
            (f"{first}-mid", f"{first}-mid:1") if retry else (f"{first}-slow", None)
        )


@pytest.mark.parametrize("mode", ["disagg", "agg"])
def test_a_list_in_a_cell_is_what_load_decides_among_and_the_other_cells_are_alone(
    mode: str,
) -> None:
    """`listed` is the default, so it need not be said."""
    content = dynamo_file(mode, retry=True)
    stage = "prefill" if mode == "disagg" else "agg"
    mapping: Any = [[[2, 0], 1, 2], [0, 0, 1], [2, 1, 0]]
    strategy = content[f"{stage}_pool_selection_strategy"]
    strategy[f"{stage}_pool_mapping"] = [mapping] * 3 if stage == "agg" else mapping
    for scheduling in ({}, {"spill": "listed"}, {"spill": "none"}):
        config = parse_config({**content, "scheduling": scheduling}, source="f")
        grid = config.stages[stage]
        values = {"isl": 100, "ttft_ms": 0.0, "itl_ms": 0.0}
        place = grid.place(values)
        names = [f"{stage}-slow", f"{stage}-fast"]
        assert list(place.spill) == (names if scheduling.get("spill") != "none" else names[:1])
        assert place.order == (*names, f"{stage}-mid")
        assert grid.place(values, 7).spill == (f"{stage}-fast",)
        other = grid.place({**values, "ttft_ms": 400.0, "itl_ms": 20.0})
        assert len(other.spill) == 1
