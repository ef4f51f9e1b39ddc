"""A thousand handoffs between two worker processes that are killed, frozen and restarted meanwhile."""

import random
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from support.kv.chaos import (
    LEG_LIMIT_S,
    LONG_FREEZE_S,
    MARGIN_S,
    SHORT_FREEZE_S,
    Tally,
    comes_to_rest,
    freeze,
    sides,
    transfers,
)

N_TRANSFERS = 1000
N_STRIKES = 12


@pytest.mark.parametrize("transport", ["nixl", "shm"])
def test_transfers_survive_death_frost_and_restart_of_either_side(
    tmp_path: Path, transport: str
) -> None:
    seed = random.SystemRandom().getrandbits(32)
    rng = random.Random(seed)
    with sides(tmp_path, transport) as pair:
        blows = {number: rng.choice(["kill", "short", "long"]) for number in _moments(rng)}

        def strike(number: int) -> Callable[[], None] | None:
            blow, side = blows.get(number), rng.choice(pair)
            if blow == "kill":
                return side.replace
            if blow is not None:
                return freeze(side, SHORT_FREEZE_S if blow == "short" else LONG_FREEZE_S)
            return None

        async def run() -> Tally:
            return await transfers(pair, N_TRANSFERS, seed=seed, strike=strike)

        tally = anyio.run(run)
        said = f"seed {seed}, strikes {blows}, ends {tally.ends}"
        assert not tally.wrong, f"{said}: {tally.wrong[:5]}"
        # A transfer is two legs.
        assert tally.longest_s < 2 * LEG_LIMIT_S + MARGIN_S, said
        assert tally.ends["ok"] > N_TRANSFERS // 2, said
        for side in pair:
            comes_to_rest(side)

        async def calm() -> Tally:
            return await transfers(pair, 50, seed=seed + 1)

        after = anyio.run(calm)
        assert after.ends == {"ok": 50}, f"{said}: afterwards {after.ends} {after.wrong[:5]}"
        for side in pair:
            comes_to_rest(side)


def _moments(rng: random.Random) -> list[int]:
    """When to strike: spread over the run, so that transfers run in between."""
    step = N_TRANSFERS // N_STRIKES
    return [number * step + rng.randrange(step) for number in range(N_STRIKES)]
