"""How much the tests of many cases try: little in `make check`, much in `make test-long`."""

import os
import sys
from collections.abc import Callable


def is_long_run() -> bool:
    """Whether this is `make test-long`."""
    return os.environ.get("SLAGATE_LONG") == "1"


def n_in(*, gate: int, long: int) -> int:
    """How many of something that is no seed: so many in `make check`, so many in `make test-long`."""
    return long if is_long_run() else gate


def n_seeds_of(n_seeds: int) -> int:
    """Of SLAGATE_SEEDS, else so many."""
    return int(os.environ.get("SLAGATE_SEEDS", n_seeds))


def each_seed(n_seeds: int, history: Callable[[int], None], *, most: int | None = None) -> None:
    """Run a history for so many seeds, or SLAGATE_SEEDS, but `most`; a failure names its seed."""
    for seed in range(min(n_seeds_of(n_seeds), most or sys.maxsize)):
        try:
            history(seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error


def each_batch(
    n_seeds: int, n_batch: int, history: Callable[[range, Callable[[int], None]], None]
) -> None:
    """As `each_seed`, some at a time: the history says at which it is."""
    n_all = n_seeds_of(n_seeds)
    for first in range(0, n_all, n_batch):
        at = [first]

        def begin(seed: int, at: list[int] = at) -> None:
            at[0] = seed

        try:
            history(range(first, min(first + n_batch, n_all)), begin)
        except Exception as error:
            raise AssertionError(f"seed {at[0]} (batch from {first}): {error!r}") from error
