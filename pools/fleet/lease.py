"""A rank's capacity, held for one leg of a request."""

from collections.abc import Callable

from slagate.pools.fleet.member import Member
from slagate.pools.fleet.ranks import Work


class Lease:
    """A rank's capacity, held for one leg. Counted when taken, given back exactly once."""

    def __init__(self, member: Member, row: int, work: Work, *, rank: int | None = None) -> None:
        self.member = member
        self.row = row
        self.rank = rank  # to be asked for; None: the worker chooses
        self.work = work
        self.settle: Callable[..., None] = lambda **_: (
            None
        )  # told once whether the prompt was `processed`
        self._prefill_open = True
        self._open = True
        member.ranks.took(row, work)

    def prefill_done(self) -> None:
        """The prompt is processed: the worker's queue is shorter, the request goes on. Idempotent."""
        if self._end_prefill():
            # A prompt that was all cached leaves no event to wait for.
            self.member.n_served += self.work.prefill_tokens >= max(1, self.member.block_tokens)
            self.settle(processed=True)
            if self.member.limits.max_queued_tokens is not None:
                self.member.on_change()

    def release(self) -> None:
        """Give everything back. Idempotent."""
        if not self._open:
            return
        self._open = False
        given_up = self._end_prefill()
        self.member.ranks.gave_back(self.row, self.work)
        # The books are right from here on, whatever the others do with it.
        if given_up:
            self.settle(processed=False)
        self.member.gave_back()

    def _end_prefill(self) -> bool:
        was_open, self._prefill_open = self._prefill_open, False
        if was_open:
            self.member.ranks.prefilled(self.row, self.work)
        return was_open
