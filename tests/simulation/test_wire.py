"""The whole gateway with HTTP/2 on both sides, in virtual time: random clients, lines and workers."""

import random
from collections import Counter

import pytest

from slagate.workers.runtime import virtual_loop
from support.gateway.simulation import Plan, Seen, check_tokens
from support.gateway.wire_simulation import check_wire, play, wired
from support.seeds import n_seeds_of

DISAGG = {"prefill": 2, "decode": 2}
AGG = {"agg": 2}
either = pytest.mark.parametrize("stages", [DISAGG, AGG], ids=["disagg", "agg"])


def plans(rng: random.Random, count: int) -> list[Plan]:
    """Prompts and outputs of every size, and impatient clients."""
    made = []
    for _ in range(count):
        first = rng.randrange(50_000)
        n_prompt = rng.choice([1, 31, 32, 33, 200, 3000, 9000])
        does = rng.choice(["stays", "stays", "stays", "cancels", "has a deadline"])
        moment_s = rng.choice([0.0, 0.001, 0.005, rng.uniform(0, 0.02), rng.uniform(0, 1.5)])
        made.append(
            Plan(
                at_s=rng.uniform(0, 3),
                prompt=list(range(first, first + n_prompt)),
                n_tokens=rng.choice([1, 2, 3, 30, 120]),
                cancel_after_s=moment_s if does == "cancels" else None,
                timeout_s=moment_s if does == "has a deadline" else None,
            )
        )
    return made


@either
def test_random_clients_on_good_lines_leave_nothing_behind(stages: dict[str, int]) -> None:
    async def main(seed: int) -> list[Seen]:
        rng = random.Random(seed)
        todo = plans(rng, 40)
        async with wired(stages, seed=seed) as wire:
            seen = await play(wire, todo, rng=rng)
            check_tokens(seen)
            await check_wire(wire, seen)
            return seen

    for seed in range(n_seeds_of(1)):
        for one in virtual_loop.run(main, seed):
            plan = one.plan
            allowed = {
                "OK",
                *(["CANCELLED"] if plan.cancel_after_s is not None else []),
                *(["DEADLINE_EXCEEDED"] if plan.timeout_s is not None else []),
            }
            assert one.code in allowed, (seed, one.plan, one.code)


@either
def test_lines_and_workers_that_go_bad_leave_nothing_behind(stages: dict[str, int]) -> None:
    """One status for each, tokens as they are, nothing held; and the next requests are served."""

    async def main(seed: int) -> tuple[list[Seen], dict[str, int]]:
        rng = random.Random(seed)
        todo = plans(rng, 40)
        async with wired(stages, seed=seed) as wire:
            seen = await play(wire, todo, rng=rng, n_faults=8)
            check_tokens(seen)
            await check_wire(wire, seen)
            after = await play(
                wire, [Plan(0.0, list(range(i, i + 100)), 20) for i in range(20)], rng=rng
            )
            # Whoever stalls then is slow, not wrong.
            assert {one.code for one in after} == {"OK"}, seed
            return seen, wire.n_faults

    codes: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    for seed in range(n_seeds_of(3)):
        try:
            seen, n_faults = virtual_loop.run(main, seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error
        codes.update(one.code for one in seen)
        faults.update(n_faults)
    # That this is not about requests which all go well, or all fail.
    assert codes["OK"] > 0.3 * codes.total(), codes
    assert codes["UNAVAILABLE"], codes
    assert len(faults) == 5


def test_the_same_seed_gives_the_same_run() -> None:
    async def main() -> list[tuple[str, int]]:
        rng = random.Random(5)
        async with wired(DISAGG, seed=5) as wire:
            seen = await play(wire, plans(rng, 30), rng=rng, n_faults=5)
            return [(one.code, len(one.tokens)) for one in seen]

    assert virtual_loop.run(main) == virtual_loop.run(main)
