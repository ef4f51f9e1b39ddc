"""What workers are expected to have cached because it was just sent there.

A claim says: this row has (or will have) this prompt, until then. A row's depth is that of its deepest
claim. Kept apart from the index of events, which is exact: a claim is a guess with an end.
"""

import heapq
import math
from collections import OrderedDict

import msgspec

from slagate.pools.prefix.match import Match
from slagate.pools.prefix.trie import Root, Run, RunTrie

_STEP_S = 1 / 16
"""Claims end together, so finding the next ones takes no search."""

MAX_BYTES = 128 << 20
"""Of all claims together, as `n_bytes_estimate` has it: 32 million tokens that differ."""

_CLAIM_BYTES = 350
_PART_BYTES = 80
_RUN_BYTES = 900
"""Without its tokens."""

_MAX_HOPS = 512
_MAX_RUN_BLOCKS = 1024
_BOTH = 0b11  # the lanes of a row: what was sent there is expected on the device


class Prediction(msgspec.Struct, gc=False, eq=False):
    """A prompt at a row. No work for the garbage collector, as the runs, which know nothing of claims."""

    row: int
    parts: tuple[tuple[Run, int], ...]  # runs from the root on, with the leading blocks of each
    n_blocks: int  # that count; 0 once ended
    step: int = 0  # when it ends, in steps


class _RowPredictions:
    """The claims of one row, the oldest first."""

    def __init__(self) -> None:
        self.claims: OrderedDict[Prediction, None] = OrderedDict()
        self.leads: dict[Run, dict[int, int]] = {}  # run -> leading blocks -> claims that say so
        self.n_blocks = 0  # distinct ones
        self.max_blocks: int | None = None


class Predictions:
    """Claims on rows, at most `max_claims` and about `max_bytes`: the oldest go first.

    One thread's, as the index.
    """

    def __init__(
        self, block_tokens: int, *, max_claims: int = 65_536, max_bytes: int = MAX_BYTES
    ) -> None:
        self._trie = RunTrie(block_tokens, max_hops=_MAX_HOPS, max_run_blocks=_MAX_RUN_BLOCKS)
        self._max_claims = max_claims
        self._max_bytes = max_bytes
        self._n_parts = 0  # of all claims
        self._claims: OrderedDict[Prediction, None] = OrderedDict()
        self._rows: dict[int, _RowPredictions] = {}
        self._n_rows = 0
        self._steps: dict[int, dict[Prediction, None]] = {}  # step -> claims that end then
        self._step_heap: list[int] = []

    def __len__(self) -> int:
        return len(self._claims)

    @property
    def n_runs(self) -> int:
        """Runs of blocks."""
        return self._trie.n_runs

    @property
    def n_bytes_estimate(self) -> int:
        """Memory, roughly: tokens of distinct blocks, runs, and the claims on them."""
        return (
            self._trie.n_blocks * self._trie.block_bytes
            + self._trie.n_runs * _RUN_BYTES
            + self._n_parts * _PART_BYTES
            + len(self._claims) * _CLAIM_BYTES
        )

    def claim(self, row: int, tokens: bytes, root: Root, *, expires_s: float) -> Prediction:
        """Expect the full blocks of a prompt at a row. O(runs of the prompt).

        Beyond the hop cap the rest of a prompt is left out.
        """
        parts: tuple[tuple[Run, int], ...] = ()
        n_blocks = 0
        if len(tokens) >= self._trie.block_bytes:
            segments = self._trie.grow(self._trie.root(root), 0, tokens, max_segments=_MAX_HOPS)
            # Each run is there once.
            parts = tuple([(run, at + n) for run, at, n in segments])
            for _, _, n in segments:
                n_blocks += n
        claim = Prediction(row, parts, n_blocks)
        claims = self._rows.get(row)
        if claims is None:
            claims = self._rows[row] = _RowPredictions()
        if row >= self._n_rows:
            self._n_rows = row + 1
        lanes, of_runs = _BOTH << 2 * row, claims.leads
        for run, lead in parts:
            leads = of_runs.get(run)
            if leads is None:
                of_runs[run] = {lead: 1}
                before = 0
            else:
                before = max(leads)
                leads[lead] = leads.get(lead, 0) + 1
            if lead > before:
                run.move(lanes, before, lead)
                claims.n_blocks += lead - before
        claims.claims[claim] = self._claims[claim] = None
        self._n_parts += len(parts)
        self._schedule(claim, expires_s)
        while self._claims and (
            len(self._claims) > self._max_claims or self.n_bytes_estimate > self._max_bytes
        ):
            self.end(next(iter(self._claims)))
        if claims.max_blocks is not None and claims.n_blocks > claims.max_blocks:
            self._bound(claims)
        return claim

    def renew(self, claim: Prediction, *, expires_s: float) -> None:
        """Let a claim end at another time. No-op for one that has ended."""
        if claim in self._claims:
            del self._steps[claim.step][claim]
            self._schedule(claim, expires_s)

    def end(self, claim: Prediction) -> None:
        """Expect it no more. Idempotent."""
        if claim not in self._claims:
            return
        del self._claims[claim]
        del self._steps[claim.step][claim]
        row = self._rows[claim.row]
        del row.claims[claim]
        parts, claim.parts, claim.n_blocks = claim.parts, (), 0
        self._n_parts -= len(parts)
        lanes, of_runs = _BOTH << 2 * claim.row, row.leads
        for run, lead in reversed(parts):
            leads = of_runs[run]
            n_left = leads[lead] - 1
            if n_left:
                leads[lead] = n_left
                continue
            del leads[lead]
            if leads:
                now = max(leads)
            else:
                del of_runs[run]
                now = 0
            if lead > now:
                run.move(lanes, lead, now)
                row.n_blocks -= lead - now
                self._trie.trim(run)
        if not row.claims and row.max_blocks is None:
            del self._rows[claim.row]

    def forget(self, row: int) -> None:
        """End all claims on a row: its worker has restarted or left. O(its claims)."""
        while row in self._rows and self._rows[row].claims:
            self.end(next(iter(self._rows[row].claims)))

    def limit(self, row: int, n_blocks: int | None) -> None:
        """Bound what a row is expected to have; beyond, its oldest claims go. None: no bound."""
        claims = self._rows.setdefault(row, _RowPredictions())
        claims.max_blocks = n_blocks
        self._bound(claims)
        if n_blocks is None and not claims.claims:
            del self._rows[row]

    def match(self, tokens: bytes, root: Root, *, now_s: float) -> Match:
        """How much of a prompt each row is expected to have; a holder's bit is the row.

        Ends some of the claims whose time has come: those beyond the bound of `expire` count still.
        """
        if self._step_heap and self._step_heap[0] * _STEP_S <= now_s:
            self.expire(now_s)
        lanes = (1 << 2 * self._n_rows) - 1
        return self._trie.match(tokens, root, lanes=lanes, n_holders=self._n_rows)

    def expire(self, now_s: float, n: int = 64) -> bool:
        """End up to `n` claims whose time has come. True when there may be more."""
        while self._step_heap and self._step_heap[0] * _STEP_S <= now_s:
            due = self._steps[self._step_heap[0]]
            while due:
                if n <= 0:
                    return True
                self.end(next(reversed(due)))
                n -= 1
            del self._steps[heapq.heappop(self._step_heap)]
        return False

    def _schedule(self, claim: Prediction, expires_s: float) -> None:
        claim.step = math.ceil(expires_s / _STEP_S)
        due = self._steps.get(claim.step)
        if due is None:
            due = self._steps[claim.step] = {}
            heapq.heappush(self._step_heap, claim.step)
        due[claim] = None

    def _bound(self, claims: _RowPredictions) -> None:
        while claims.max_blocks is not None and claims.n_blocks > claims.max_blocks:
            self.end(next(iter(claims.claims)))
