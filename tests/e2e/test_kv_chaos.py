"""Handoffs between two worker processes that are killed and started again meanwhile.

Freezes, which only time limits end, and many more transfers are in tests/long.
"""

from collections.abc import Callable
from pathlib import Path

import anyio

from support.kv.chaos import Tally, comes_to_rest, sides, transfers
from support.limits import HANG_S

N_TRANSFERS = 120
N_CLIENTS = 8


def test_transfers_survive_the_death_of_either_side(tmp_path: Path) -> None:
    with sides(tmp_path, "nixl", pull_limit_s=HANG_S, park_limit_s=HANG_S) as pair:
        deaths = {40: pair[0].replace, 80: pair[1].replace}

        async def run(
            n: int, seed: int, strike: Callable[[int], Callable[[], None] | None]
        ) -> Tally:
            return await transfers(
                pair,
                n,
                seed=seed,
                n_clients=N_CLIENTS,
                strike=strike,
                leg_limit_s=HANG_S,
                releases=True,
            )

        tally = anyio.run(run, N_TRANSFERS, 1, deaths.get)
        said = f"ends {tally.ends}"
        assert not tally.wrong, f"{said}: {tally.wrong[:5]}"
        # Each death can end one transfer of each client.
        assert tally.ends["ok"] >= N_TRANSFERS - len(deaths) * N_CLIENTS, said
        for side in pair:
            comes_to_rest(side)
        after = anyio.run(run, 30, 2, {}.get)
        assert after.ends == {"ok": 30}, f"{said}: afterwards {after.ends} {after.wrong[:5]}"
