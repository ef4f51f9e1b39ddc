"""How many random histories the property tests run: few in `make check`, many in `make test-long`."""

import os
from collections.abc import Callable


def each_seed(n_seeds: int, history: Callable[[int], None]) -> None:
    """Run a history for so many seeds, or SLAGATE_SEEDS; a failure names its seed."""
    for seed in range(int(os.environ.get("SLAGATE_SEEDS", n_seeds))):
        try:
            history(seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error
