"""Fleets of two kinds of workers that cannot hand over to each other: no request gets a pair of both."""

from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

from slagate.pools.inflight.pair_key import PairFit, fit
from slagate.proto import gateway_pb2 as gw
from slagate.router.replay.invariants import check_idle
from slagate.workers.runtime.virtual_loop import run
from slagate.workers.trtllm.worker import TrtllmWorker
from support.engine.workers import engine_worker
from support.gateway.simulation import REFUSALS, Fleet, Plan, Seen, check_tokens, running, simulate

Args = Mapping[str, Mapping[str, Any]]

PLAIN: Args = {
    "kv_cache_config": {"dtype": "bfloat16", "use_kv_cache_manager_v2": False},
    "cache_transceiver_config": {"transceiver_runtime": "CPP"},
}
KINDS: Mapping[str, Args] = {
    "KV type": {"kv_cache_config": {"dtype": "fp8"}},
    "back-end": {"cache_transceiver_config": {"backend": "UCX"}},
    "KV manager": {
        "kv_cache_config": {"use_kv_cache_manager_v2": True},
        "cache_transceiver_config": {"transceiver_runtime": "PYTHON"},
    },
}
PLANS = [Plan(0.02 * i, list(range(7 * i, 7 * i + 90 + i)), 10) for i in range(60)]


def half_of(kind: Args) -> Any:
    """Makes workers of which those with an even number are of this kind, the others plain."""

    @asynccontextmanager
    async def make(stage: str, address: str) -> AsyncIterator[TrtllmWorker]:
        args = PLAIN
        if int(address.rpartition(":")[2]) % 2 == 0:
            args = {section: {**PLAIN[section], **kind.get(section, {})} for section in PLAIN}
        async with engine_worker(stage, **args) as made:
            yield made.inner

    return make


def played(kind: Args, *, refusals: float) -> tuple[list[Seen], Counter[bool]]:
    """What clients saw, and how often a prefill worker's handoff went to one of its kind, or not."""
    same: Counter[bool] = Counter()

    async def main() -> list[Seen]:
        stages = {"prefill": 4, "decode": 4}
        make = half_of(kind)
        async with running(stages, seed=4, refusals=refusals, make=make) as fleet:
            seen = await simulate(fleet, PLANS)
            check_tokens(seen)
            await check_idle(fleet.app, fleet.workers, n_requests=len(PLANS))
            for one in seen:
                same.update(kinds_agree(fleet, one))
            return seen

    return run(main), same


def kinds_agree(fleet: Fleet, seen: Seen) -> list[bool]:
    """For each decode leg whether its worker fits the one that had prefilled."""
    pairs = {member.address: member.pair for member in fleet.app.fleet.members()}
    found, giver = [], None
    for attempt in seen.receipt.attempts:
        if attempt.stage == gw.STAGE_PREFILL:
            giver = pairs[attempt.worker]
        else:
            assert giver is not None
            found.append(fit(giver, pairs[attempt.worker]) is PairFit.YES)
    return found


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_all_requests_complete_where_half_of_the_pairs_would_fail(kind: Args) -> None:
    seen, same = played(kind, refusals=0.0)
    assert {one.code for one in seen} == {"OK"}
    assert same == {True: len(PLANS)}
    assert {len(one.receipt.attempts) for one in seen} == {2}
    # Both kinds had work.
    used = Counter(int(a.worker.rpartition(":")[2]) % 2 for s in seen for a in s.receipt.attempts)
    assert min(used[0], used[1]) > len(PLANS) / 4


def test_retries_stay_within_their_kind() -> None:
    seen, same = played(KINDS["KV type"], refusals=0.2)
    assert sum(len(one.receipt.attempts) > 2 for one in seen) > len(PLANS) / 10
    assert same.keys() == {True}
    # Whatever fails was refused by a worker for another reason than its partner.
    said = {a.message.rpartition(": ")[2] for s in seen for a in s.receipt.attempts if a.message}
    assert said <= {refusal.message for refusal in REFUSALS}
