"""Receipts decide again to the same winner, from their JSON alone, and say so when they were changed."""

import json
import random
from collections import Counter

import pytest

from slagate.proto import gateway_pb2 as gw
from slagate.router.cli.receipts import Recomputer, json_line, parse_line
from slagate.router.scheduling.pairs import CANNOT_TAKE_OVER, NO_TAKER, TAKERS_AT_LIMIT
from support.gateway.receipts import RandomFleet
from support.seeds import n_in

N_RECEIPTS = n_in(gate=200, long=500)
OF_PAIRS = {"pair", "pair that may fit", NO_TAKER, TAKERS_AT_LIMIT, CANNOT_TAKE_OVER}
N_CHANGES = n_in(gate=24, long=60)


def as_lines(config: gw.GatewayConfig, *receipts: gw.Receipt) -> list[bytes]:
    """What `slagate receipts` prints of them."""
    responses = [gw.WatchReceiptsResponse(config=config)]
    responses += [gw.WatchReceiptsResponse(receipt=receipt) for receipt in receipts]
    return [json_line(response).encode() + b"\n" for response in responses]


def every_choice(receipt: gw.Receipt) -> list[gw.StageChoice]:
    return [*receipt.replaced, *receipt.decision.stages]


def kinds(choice: gw.StageChoice) -> set[str]:
    """What was special about a choice."""
    open_ = [c for c in choice.candidates if not c.excluded]
    winner = choice.candidates[0]
    best = [c for c in open_ if (c.score_s, c.suspect) == (winner.score_s, winner.suspect)]
    found = {
        "nobody": not choice.worker,
        "tie by draw": sum(c.last_chosen == winner.last_chosen for c in best) > 1,
        "tie by turn": len({c.last_chosen for c in best}) > 1,
        "starved": choice.starved,
        "suspect won": winner.suspect and choice.worker != "",
        "retry": bool(choice.excluded_workers),
        "spill": choice.pool != choice.pool_order[0],
        "override": choice.overridden,
        "rank": choice.HasField("rank"),
        "device": any(c.device_tokens for c in open_),
        "host": any(c.host_tokens for c in open_),
        "foreign": any(c.foreign_requests for c in open_),
        "pair": choice.HasField("pairing") and choice.worker != "",
        "pair that may fit": choice.HasField("pairing") and not choice.pairing.strict,
    }
    return {name for name, is_so in found.items() if is_so} | {
        c.excluded for c in choice.candidates
    }


@pytest.mark.parametrize("mode", ["disagg", "agg"])
@pytest.mark.parametrize("spill", ["any", "none"])
def test_what_was_decided_by_targets_comes_out_the_same(mode: str, spill: str) -> None:
    fleet = RandomFleet(mode, spill=spill)
    receipts = [fleet.receipt(random.Random(seed), seed) for seed in range(N_RECEIPTS)]
    recheck = Recomputer()
    assert list(recheck.read(as_lines(fleet.config, *receipts))) == []
    choices = [choice for receipt in receipts for choice in every_choice(receipt)]
    met = Counter(choice.is_met if choice.HasField("is_met") else None for choice in choices)
    assert min(met[verdict] for verdict in (True, False, None)) >= N_RECEIPTS / 10, met
    if spill == "any":
        assert sum(choice.pool != choice.pool_order[0] for choice in choices) >= N_RECEIPTS / 10
    else:
        assert sum(len(choice.would_meet) > 0 for choice in choices) >= N_RECEIPTS / 10
    assert sum(len(receipt.decision.sla.as_fast) > 0 for receipt in receipts) >= N_RECEIPTS / 10


@pytest.mark.parametrize("falls_back", [False, True], ids=["learnt", "falls back"])
def test_a_bypass_comes_out_the_same_taken_or_not(*, falls_back: bool) -> None:
    fleet = RandomFleet(spill="any", falls_back=falls_back, bypasses=True)
    receipts = [fleet.receipt(random.Random(seed), seed) for seed in range(2 * N_RECEIPTS)]
    recheck = Recomputer()
    assert list(recheck.read(as_lines(fleet.config, *receipts))) == []
    n_choices = sum(len(every_choice(each)) + len(each.decision.untaken) for each in receipts)
    assert (recheck.n_receipts, recheck.n_choices) == (len(receipts), n_choices)
    taken = [each for each in receipts if each.decision.stages[0].stage == gw.STAGE_AGG]
    tried = [each for each in receipts if each.decision.untaken]
    again = [each for each in taken if len(each.replaced) == 1]
    assert min(len(taken), len(tried) - len(taken)) >= len(receipts) / 40
    assert again
    assert any(each.replaced for each in tried if each not in taken)
    for number, receipt in enumerate(tried):
        changed = gw.Receipt.FromString(receipt.SerializeToString())
        for name, other in (("stages", "untaken"), ("untaken", "stages")):
            changed.decision.ClearField(name)  # type: ignore[arg-type]
            getattr(changed.decision, name).extend(getattr(receipt.decision, other))
        found = list(Recomputer().read(as_lines(fleet.config, changed)))
        assert len(found) == 1, number
        assert "a bypass of prefill workers" in str(found[0])


@pytest.mark.parametrize("mode", ["disagg", "agg"])
def test_what_was_decided_where_predictions_are_off_comes_out_the_same(mode: str) -> None:
    fleet = RandomFleet(mode, spill="any", falls_back=True)
    receipts = [fleet.receipt(random.Random(seed), seed) for seed in range(N_RECEIPTS)]
    recheck = Recomputer()
    assert list(recheck.read(as_lines(fleet.config, *receipts))) == []
    choices = [choice for receipt in receipts for choice in every_choice(receipt)]
    looks = [look for choice in choices for look in choice.pools]
    seen = Counter(basis for look in looks for basis in (look.ttft_basis, look.itl_basis))
    assert min(seen[basis] for basis in ("learnt", "profile", "grid")) >= N_RECEIPTS / 2
    met = Counter(choice.is_met if choice.HasField("is_met") else None for choice in choices)
    assert min(met[verdict] for verdict in (True, False, None)) >= N_RECEIPTS / 20, met


@pytest.mark.parametrize("mode", ["disagg", "agg"])
def test_every_choice_comes_out_the_same_from_its_json(mode: str) -> None:
    fleet = RandomFleet(mode)
    receipts = [fleet.receipt(random.Random(seed), seed) for seed in range(N_RECEIPTS)]
    recheck = Recomputer()
    assert list(recheck.read(as_lines(fleet.config, *receipts))) == []
    n_choices = sum(len(every_choice(receipt)) for receipt in receipts)
    assert recheck.ok
    assert (recheck.n_receipts, recheck.n_choices) == (N_RECEIPTS, n_choices)
    seen = Counter(kind for r in receipts for choice in every_choice(r) for kind in kinds(choice))
    wanted = {
        *("nobody", "tie by draw", "tie by turn", "starved", "suspect won", "retry", "spill"),
        *("override", "rank", "device", "host", "foreign"),
        *("not_ready", "refused", "failed this request", "does not serve the model"),
        *("at its limit", "at its limit of queued prompt tokens"),
        *(["at its limit of KV cache", *OF_PAIRS] if mode == "disagg" else []),
    }
    assert {kind for kind in wanted if seen[kind] < N_RECEIPTS / 100} == set(), seen


def test_json_keeps_every_figure_to_the_last_bit() -> None:
    fleet = RandomFleet()
    for seed in range(50):
        receipt = fleet.receipt(random.Random(seed), seed)
        _, line = as_lines(fleet.config, receipt)
        assert parse_line(line).receipt == receipt, seed
        assert json.loads(line)["receipt"]["number"] == seed


def another_winner(choice: gw.StageChoice, rng: random.Random) -> bool:
    others = [c for c in choice.candidates[1:] if not c.excluded]
    if not others:
        return False
    other = rng.choice(others)
    choice.worker, choice.pool = other.worker, other.pool
    choice.ClearField("rank")
    if other.HasField("rank"):
        choice.rank = other.rank
    return True


def another_queue(choice: gw.StageChoice, rng: random.Random) -> bool:
    if choice.stage == gw.STAGE_DECODE:
        return False
    rng.choice(choice.candidates).queued_s += 1e-6
    return True


def another_batch(choice: gw.StageChoice, rng: random.Random) -> bool:
    if choice.stage == gw.STAGE_PREFILL:
        return False
    rng.choice(choice.candidates).foreign_requests += 1
    return True


def more_cached(choice: gw.StageChoice, rng: random.Random) -> bool:
    if choice.stage == gw.STAGE_DECODE:
        return False
    candidate = rng.choice(choice.candidates)
    candidate.device_tokens += 32
    return True


def another_state(choice: gw.StageChoice, rng: random.Random) -> bool:
    open_ = [c for c in choice.candidates if not c.excluded]
    if open_:
        rng.choice(open_).state = "not_ready"
    return bool(open_)


def another_cell(choice: gw.StageChoice, _rng: random.Random) -> bool:
    choice.cell[0] += 1
    return True


def another_order(choice: gw.StageChoice, _rng: random.Random) -> bool:
    if len(choice.pool_order) < 2:
        return False
    names = list(choice.pool_order)
    del choice.pool_order[:]
    choice.pool_order.extend(reversed(names))
    return True


def another_target(choice: gw.StageChoice, rng: random.Random) -> bool:
    rng.choice(choice.targets).ms += 1.0
    return True


def given_target(choice: gw.StageChoice, rng: random.Random) -> bool:
    target = rng.choice(choice.targets)
    target.source = "objective" if target.source != "objective" else "grid"
    return True


def another_prediction(choice: gw.StageChoice, rng: random.Random) -> bool:
    candidate = rng.choice(choice.candidates)
    if not candidate.HasField("predicted_ttft_ms") and not candidate.HasField("predicted_itl_ms"):
        candidate.predicted_itl_ms = 0.0
    elif candidate.HasField("predicted_ttft_ms"):
        candidate.predicted_ttft_ms *= 1 + 1e-8
    else:
        candidate.ClearField("predicted_itl_ms")
    return True


def unlooked_pool(choice: gw.StageChoice, _rng: random.Random) -> bool:
    """A pool that the choice did not come to, with a worker of it."""
    others = [name for name in choice.pool_order if name not in {p.name for p in choice.pools}]
    if not others:
        return False
    look = choice.pools.add()
    look.CopyFrom(choice.pools[0])
    look.name = others[0]
    if choice.draw < 0.5:
        choice.candidates.add(worker="w:1", pool=others[0], state="ready", pace=1.0)
        choice.candidates_total += 1
    return True


def pool_twice(choice: gw.StageChoice, _rng: random.Random) -> bool:
    choice.pools.append(choice.pools[0])
    return True


def another_coefficient(choice: gw.StageChoice, _rng: random.Random) -> bool:
    for look in choice.pools:
        look.coefficients.prefill_scale *= 1.001
        look.coefficients.itl_scale *= 1.001
    return True


def no_predictions(choice: gw.StageChoice, _rng: random.Random) -> bool:
    """As if they had been off in all pools."""
    for look in choice.pools:
        look.ttft_basis = look.itl_basis = "grid"
    return choice.HasField("is_met")


def forgiven_worker(choice: gw.StageChoice, _rng: random.Random) -> bool:
    ready = [c for c in choice.candidates if c.excluded == "failed this request"]
    del choice.excluded_workers[:]
    return bool(ready)


def no_partners(choice: gw.StageChoice, _rng: random.Random) -> bool:
    """Nobody that the workers could hand over to, or take over from."""
    del choice.pairing.partners[:]
    return choice.HasField("pairing") and choice.worker != ""


CHANGES = [
    no_partners,
    another_winner,
    another_queue,
    another_batch,
    more_cached,
    another_state,
    another_cell,
    another_order,
    another_target,
    given_target,
    another_prediction,
    unlooked_pool,
    pool_twice,
    another_coefficient,
    no_predictions,
    forgiven_worker,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_receipt_that_was_changed_is_found(change: object) -> None:
    assert callable(change)
    n_changed = 0
    fleets = [RandomFleet("disagg"), RandomFleet("agg", spill="any")]
    for seed in range(N_CHANGES):
        rng = random.Random(seed)
        fleet = fleets[seed % 2]
        receipt = fleet.receipt(rng, seed)
        if not change(rng.choice(every_choice(receipt)), rng):
            continue
        n_changed += 1
        recheck = Recomputer()
        (found,) = list(recheck.read(as_lines(fleet.config, receipt)))
        assert found.startswith(f"receipt {seed}, 'r-{seed}', "), seed
        assert not recheck.ok
    assert n_changed >= N_CHANGES / 12
