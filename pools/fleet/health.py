"""A worker's health: its states, and how probes change them.

    state        probe ok                      probe failed                    wrong kind of worker
    joining      -> ready                      -> connecting                   -> refused
    connecting   -> ready                      (stays)                         -> refused
    ready        (stays)                       3rd in a row -> not_ready       -> refused
    not_ready    2nd in a row -> ready         (stays)                         -> refused
    refused      -> not_ready                  (stays)                         (stays)

Three failures and two successes, because one slow answer of a busy worker is no reason to lose it.
"""

from slagate.pools.inflight.row_view import State

FAILURES_TO_LEAVE = 3
SUCCESSES_TO_RETURN = 2


class Health:
    """The health of one worker. `ok`, `failed` and `refuse` return whether the state changed."""

    def __init__(self) -> None:
        self.state = State.JOINING
        self.reason = "not looked at yet"
        self._in_a_row = 0  # good probes, or negative: bad ones

    @property
    def is_suspect(self) -> bool:
        """Whether the worker is still ready, but its last probe failed."""
        return self._in_a_row < 0

    def ok(self) -> bool:
        """Count a good probe."""
        if self.state is State.READY:
            self._in_a_row = 0
            return False
        self._in_a_row = max(self._in_a_row, 0) + 1
        if self.state is State.NOT_READY and self._in_a_row < SUCCESSES_TO_RETURN:
            return False
        if self.state is State.REFUSED:
            return self._become(State.NOT_READY, "was refused, now fits", in_a_row=1)
        return self._become(State.READY, "")

    def failed(self, reason: str) -> bool:
        """Count a bad or missing probe."""
        if self.state is State.JOINING:
            return self._become(State.CONNECTING, reason)
        if self.state is not State.READY:
            self._in_a_row = 0
            self.reason = reason
            return False
        self._in_a_row = min(self._in_a_row, 0) - 1
        if self._in_a_row > -FAILURES_TO_LEAVE:
            return False
        return self._become(State.NOT_READY, reason)

    def refuse(self, reason: str) -> bool:
        """Take the worker out: it is not what the configuration says it is."""
        if self.state is State.REFUSED:
            self.reason = reason
            return False
        return self._become(State.REFUSED, reason)

    def _become(self, state: State, reason: str, *, in_a_row: int = 0) -> bool:
        self.state, self.reason, self._in_a_row = state, reason, in_a_row
        return True
