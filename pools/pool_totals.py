"""What a pool has counted since the gateway started, and its line in what the processes share."""

from slagate.pools.shared_counts import PoolCell, SharedCounts


class PoolLine:
    """A pool's line: what this process writes there."""

    def __init__(self, name: str, shared: SharedCounts) -> None:
        self._shared = shared
        self._slot = shared.claim(f"pool {name}")
        self._oldest_s = 0.0

    def get(self, cell: PoolCell) -> int:
        """A count, with what a process before this one left."""
        return self._shared.get(self._slot, cell)

    def set(self, cell: PoolCell, count: int) -> None:
        """Show a count."""
        self._shared.set(self._slot, cell, count)

    def give_up(self) -> None:
        """The pool is gone."""
        self._shared.give_up(self._slot)

    def set_oldest_s(self, since_s: float) -> bool:
        """Since when the oldest request here waits for the pool; 0: none does. True when that is new."""
        is_new, self._oldest_s = since_s != self._oldest_s, since_s
        if is_new:
            self._shared.set_s(self._slot, PoolCell.OLDEST_S, since_s)
        return is_new

    def oldest_elsewhere(self) -> list[tuple[int, float]]:
        """The same of each other process, with its number."""
        return self._shared.each_other_s(self._slot, PoolCell.OLDEST_S)


class _Total:
    """A count that a crash does not take along where processes share it."""

    def __init__(self, cell: PoolCell) -> None:
        self._cell = cell

    def __get__(self, pool: "Totals", _: type) -> int:
        return pool.totals.get(self._cell, 0) if pool.line is None else pool.line.get(self._cell)

    def __set__(self, pool: "Totals", count: int) -> None:
        if pool.line is None:
            pool.totals[self._cell] = count
        else:
            pool.line.set(self._cell, count)


class Totals:
    """Legs given to a pool, tried again elsewhere, and here because a pool before it had nobody."""

    line: PoolLine | None
    requests_total = _Total(PoolCell.REQUESTS)
    retries_total = _Total(PoolCell.RETRIES)
    spills_total = _Total(PoolCell.SPILLS)

    def __init__(self) -> None:
        self.line = None
        self.totals: dict[PoolCell, int] = {}

    def give_up_line(self) -> None:
        """The pool is gone."""
        if self.line is not None:
            self.line.give_up()
