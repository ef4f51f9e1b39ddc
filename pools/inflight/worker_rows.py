"""The rows of one worker in its pool's table, one for each rank that can be asked for."""

from typing import NamedTuple

from slagate.pools.inflight.engine_queue import Held, Work
from slagate.pools.inflight.pair_key import PairKey
from slagate.pools.inflight.row_view import State
from slagate.pools.inflight.table import UNLIMITED, LoadTable


class Limits(NamedTuple):
    """The most that a worker gets at once, as the fleet file says; None: it does not say."""

    max_inflight: int | None = None  # requests, over all ranks
    max_queued_tokens: int | None = None  # prompt tokens not prefilled yet, of each row


class WorkerRows:
    """The rows of one worker. If it restarts with fewer ranks, the rows beyond them take no new work."""

    def __init__(self, address: str, table: LoadTable) -> None:
        self._address = address
        self.table = table
        self.rows = [table.add_row(address, None)]
        self.n_used = 1  # rows that take work: the first ones
        self.inflight = 0  # leases of this process, over all rows

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that this process has leased and that are not prefilled yet."""
        return sum(self.table.get("queued_tokens", row) for row in self.rows)

    @property
    def queued_s(self) -> float:
        """`queued_tokens` as predicted prefill seconds."""
        return sum(self.table.get_s("queued_s", row) for row in self.rows)

    @property
    def context_tokens(self) -> int:
        """Tokens whose KV the requests of this process read at each decode step."""
        return sum(self.table.get("context_tokens", row) for row in self.rows)

    @property
    def gateway_load(self) -> tuple[int, int]:
        """(leases, prompt tokens not prefilled yet), over all processes of the gateway."""
        inflight, queued_tokens = self.table.elsewhere(self.rows)
        return self.inflight + inflight, self.queued_tokens + queued_tokens

    def set_up(
        self,
        n_rows: int,
        *,
        limits: Limits,
        capacity_tokens: int,
        step_tokens: int,
        models: frozenset[str],
        pair: PairKey,
        takes_whole: bool,
    ) -> None:
        """Have `n_rows` rows in use, each with these limits, KV capacity, models and pair.

        There is a row for each rank that can be asked for, else 1. `limits` are the fleet file's,
        but where that has no `max_inflight`, it may be the number of requests that the engine
        runs at once. `capacity_tokens` is the size of one row's KV cache, `step_tokens` the most that
        its engine computes in one step (0: not known), `pair` what the worker
        says of its handoffs, `takes_whole` whether it says that it takes requests without one.
        """
        while len(self.rows) < n_rows:
            self.rows.append(self.table.add_row(self._address, len(self.rows)))
        self.table.set_rank(self.rows[0], 0 if n_rows > 1 else None)
        self.n_used = n_rows
        for row in self.rows:
            self.table.set(
                row,
                max_inflight=_or_unlimited(limits.max_inflight),
                max_queued_tokens=_or_unlimited(limits.max_queued_tokens),
                capacity_tokens=capacity_tokens,
                takes_whole=int(takes_whole),
            )
            self.table.set_pair(row, pair)
            self.table.set_step_tokens(row, step_tokens)
        self.set_models(models)
        self.table.set_worker_inflight(self.rows, self.inflight)

    def free_rows(self) -> None:
        """Free the rows: the worker has left, and nothing is leased on it."""
        for row in self.rows:
            self.table.free_row(row)
        self.rows = []
        self.n_used = 0

    def set_state(self, state: State, *, suspect: bool) -> None:
        """Set the state of the rows; those not in use are `NOT_READY`."""
        for at, row in enumerate(self.rows):
            # A worker that came back with fewer ranks than it had.
            of_row = state if at < self.n_used else State.NOT_READY
            self.table.set_state(row, of_row, suspect=suspect)

    def set_models(self, models: frozenset[str]) -> None:
        """Set the names of the models that the worker serves."""
        for row in self.rows:
            self.table.set_models(row, models)

    def set_foreign_load(self, load: tuple[int, float] | None) -> None:
        """Set the worker's foreign load: requests, and predicted prefill seconds; None: not known.

        It is spread evenly over the ranks: by the next probe a report on each rank is out of date.
        """
        rows = self.rows[: self.n_used]
        for at, row in enumerate(rows):
            share = None
            if load is not None:
                share = (load[0] + len(rows) - 1 - at) // len(rows), load[1] / len(rows)
            self.table.set_foreign_load(row, share)

    def add_lease(self, row: int, work: Work, *, number: int) -> Held:
        """Count a lease that was taken on a row, the pool's lease of that number."""
        self.inflight += 1
        held = self.table.add_lease(row, work, number=number)
        self.table.set_worker_inflight(self.rows, self.inflight)
        return held

    def end_lease(self, row: int, held: Held) -> None:
        """Count a lease that has ended."""
        self.inflight -= 1
        self.table.end_lease(row, held)
        self.table.set_worker_inflight(self.rows, self.inflight)


def _or_unlimited(limit: int | None) -> int:
    return UNLIMITED if limit is None else limit
