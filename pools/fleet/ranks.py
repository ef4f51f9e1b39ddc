"""A worker's rows of its pool's table: one for each attention-DP rank that can be asked for, else one."""

from typing import NamedTuple

from slagate.pools.inflight.rows import UNLIMITED, State
from slagate.pools.inflight.table import LoadTable


class Work(NamedTuple):
    """What one lease puts on a rank of a worker."""

    prefill_tokens: int = 0  # prompt tokens to prefill, until `Lease.prefill_done`
    work_s: float = 0.0  # the same as seconds of work, see `FrozenEstimator.work_s`
    context_tokens: int = 0  # tokens whose KV the request reads at each decode step


class Limits(NamedTuple):
    """The most that a worker gets at once, as the fleet file says; None: it does not say."""

    max_inflight: int | None = None
    max_queued_tokens: int | None = None


class Ranks:
    """The rows of one worker. A rank that is gone only takes no work, until all are given up."""

    def __init__(self, address: str, table: LoadTable) -> None:
        self._address = address
        self._table = table
        self.rows = [table.add(address, None)]
        self.n_used = 1
        self.inflight = 0  # leases, over all of them

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens leased and not prefilled yet."""
        return sum(self._table.get("queued_tokens", row) for row in self.rows)

    @property
    def queued_s(self) -> float:
        """The same as seconds of work."""
        return sum(self._table.get_s("queued_s", row) for row in self.rows)

    @property
    def context_tokens(self) -> int:
        """Tokens whose KV the requests read at each decode step."""
        return sum(self._table.get("context_tokens", row) for row in self.rows)

    @property
    def elsewhere(self) -> tuple[int, int]:
        """Leases, and prompt tokens that wait, that other processes of the gateway have there."""
        return self._table.elsewhere(self.rows)

    def set_up(
        self, n_ranks: int, *, limits: Limits, capacity_tokens: int, models: frozenset[str]
    ) -> None:
        """Bring the rows in line with what the worker says of itself.

        `capacity_tokens` is what the KV cache of one rank holds.
        """
        while len(self.rows) < n_ranks:
            self.rows.append(self._table.add(self._address, len(self.rows)))
        self._table.rename(self.rows[0], 0 if n_ranks > 1 else None)
        self.n_used = n_ranks
        for row in self.rows:
            self._table.set(
                row,
                max_inflight=_or_unlimited(limits.max_inflight),
                max_queued_tokens=_or_unlimited(limits.max_queued_tokens),
                capacity_tokens=capacity_tokens,
            )
        self.set_models(models)
        self._show_inflight()

    def give_up(self) -> None:
        """The worker has left, with nothing leased on it."""
        for row in self.rows:
            self._table.give_up(row)
        self.rows = []
        self.n_used = 0

    def set_state(self, state: State, *, suspect: bool) -> None:
        """Whether they may take work."""
        for at, row in enumerate(self.rows):
            # A worker that came back with fewer ranks than it had.
            of_row = state if at < self.n_used else State.NOT_READY
            self._table.set_state(row, of_row, suspect=suspect)

    def set_models(self, models: frozenset[str]) -> None:
        """What the worker serves."""
        for row in self.rows:
            self._table.set_models(row, models)

    def set_foreign(self, load: tuple[int, float] | None) -> None:
        """Requests that others sent, and seconds of work of their prompts; None: nobody can tell.

        Spread over the ranks: which of them has what is known one look too late to matter.
        """
        rows = self.rows[: self.n_used]
        for at, row in enumerate(rows):
            share = None
            if load is not None:
                share = (load[0] + len(rows) - 1 - at) // len(rows), load[1] / len(rows)
            self._table.set_foreign(row, share)

    def took(self, row: int, work: Work) -> None:
        """Count a lease that was taken on a row."""
        self.inflight += 1
        tokens, work_s, context_tokens = work
        self._table.add_lease(
            row, queued_tokens=tokens, queued_s=work_s, context_tokens=context_tokens
        )
        self._show_inflight()

    def prefilled(self, row: int, work: Work) -> None:
        """The prompt of a lease is processed, or given up."""
        self._table.end_prefill(row, queued_tokens=work.prefill_tokens, queued_s=work.work_s)

    def gave_back(self, row: int, work: Work) -> None:
        """Count a lease that has ended."""
        self.inflight -= 1
        self._table.end_lease(row, context_tokens=work.context_tokens)
        self._show_inflight()

    def _show_inflight(self) -> None:
        for row in self.rows:
            self._table.set_worker_inflight(row, self.inflight)


def _or_unlimited(limit: int | None) -> int:
    return UNLIMITED if limit is None else limit
