"""What workers are expected to have cached because it was just sent there.

A prediction says that a row has, or will have, a prompt, and until when. A row's depth is that of its
deepest prediction. The index of events is exact and kept apart: a prediction is a guess that expires.
"""

import heapq
import math
from collections import OrderedDict

import msgspec

from slagate.pools.prefix.match import Match
from slagate.pools.prefix.trie import Root, Run, RunTrie

_STEP_S = 1 / 16
"""Predictions expire in steps of this length, so that finding the next ones takes no search."""

MAX_BYTES = 128 << 20
"""Limit of all predictions together, as `n_bytes_estimate` counts: 32 million distinct tokens."""

_PREDICTION_BYTES = 350
_PART_BYTES = 80
_RUN_BYTES = 900
"""Without its tokens."""

_MAX_HOPS = 512
_MAX_RUN_BLOCKS = 1024
_BOTH = 0b11  # the lanes of a row: what was sent there is expected on the device


class Prediction(msgspec.Struct, gc=False, eq=False):
    """A prompt that a row should have. Runs do not refer to it, so no cycle goes through it."""

    row: int
    # Runs from the root on, with the leading blocks of each.
    parts: tuple[tuple[Run, int], ...]
    n_blocks: int  # predicted; 0 once it has ended
    step: int = 0  # when it expires


class _RowPredictions:
    """The predictions of one row, the oldest first."""

    def __init__(self) -> None:
        self.predictions: OrderedDict[Prediction, None] = OrderedDict()
        # Run -> leading blocks -> how many predictions say so.
        self.leads: dict[Run, dict[int, int]] = {}
        self.n_blocks = 0  # distinct ones
        self.max_blocks: int | None = None


class Predictions:
    """Predictions for rows with one block size, within limits: the oldest go. For one thread."""

    def __init__(
        self, block_tokens: int, *, max_predictions: int = 65_536, max_bytes: int = MAX_BYTES
    ) -> None:
        self.trie = RunTrie(block_tokens, max_hops=_MAX_HOPS, max_run_blocks=_MAX_RUN_BLOCKS)
        self._max_predictions = max_predictions
        self._max_bytes = max_bytes
        self._n_parts = 0  # of all predictions
        self._predictions: OrderedDict[Prediction, None] = OrderedDict()
        self._rows: dict[int, _RowPredictions] = {}
        self._n_rows = 0
        self._steps: dict[int, dict[Prediction, None]] = {}  # by when they expire
        self._step_heap: list[int] = []

    def __len__(self) -> int:
        return len(self._predictions)

    @property
    def n_bytes_estimate(self) -> int:
        """Bytes of memory, roughly: tokens of distinct blocks, runs, and the predictions on them."""
        return (
            self.trie.n_blocks * self.trie.block_bytes
            + self.trie.n_runs * _RUN_BYTES
            + self._n_parts * _PART_BYTES
            + len(self._predictions) * _PREDICTION_BYTES
        )

    def predict(self, row: int, tokens: bytes, root: Root, *, expires_s: float) -> Prediction:
        """Predict the full blocks of a prompt at a row, up to the hop cap. O(runs of the prompt)."""
        parts: tuple[tuple[Run, int], ...] = ()
        n_blocks = 0
        if len(tokens) >= self.trie.block_bytes:
            segments = self.trie.grow(self.trie.root(root), 0, tokens, max_segments=_MAX_HOPS)
            # No run occurs twice.
            parts = tuple([(run, at + n) for run, at, n in segments])
            for _, _, n in segments:
                n_blocks += n
        prediction = Prediction(row, parts, n_blocks)
        of_row = self._rows.get(row)
        if of_row is None:
            of_row = self._rows[row] = _RowPredictions()
        if row >= self._n_rows:
            self._n_rows = row + 1
        lanes, of_runs = _BOTH << 2 * row, of_row.leads
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
                of_row.n_blocks += lead - before
        of_row.predictions[prediction] = self._predictions[prediction] = None
        self._n_parts += len(parts)
        self._schedule(prediction, expires_s)
        while self._predictions and (
            len(self._predictions) > self._max_predictions
            or self.n_bytes_estimate > self._max_bytes
        ):
            self.end_prediction(next(iter(self._predictions)))
        if of_row.max_blocks is not None and of_row.n_blocks > of_row.max_blocks:
            self._drop_over_limit(of_row)
        return prediction

    def renew(self, prediction: Prediction, *, expires_s: float) -> None:
        """Set when a prediction expires. No-op for one that has ended."""
        if prediction in self._predictions:
            del self._steps[prediction.step][prediction]
            self._schedule(prediction, expires_s)

    def end_prediction(self, prediction: Prediction) -> None:
        """Drop a prediction. Idempotent."""
        if prediction not in self._predictions:
            return
        del self._predictions[prediction]
        del self._steps[prediction.step][prediction]
        row = self._rows[prediction.row]
        del row.predictions[prediction]
        parts, prediction.parts, prediction.n_blocks = prediction.parts, (), 0
        self._n_parts -= len(parts)
        lanes, of_runs = _BOTH << 2 * prediction.row, row.leads
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
                self.trie.trim(run)
        if not row.predictions and row.max_blocks is None:
            del self._rows[prediction.row]

    def forget_row(self, row: int) -> None:
        """Drop all predictions for a row: its worker has restarted or left. O(these)."""
        while row in self._rows and self._rows[row].predictions:
            self.end_prediction(next(iter(self._rows[row].predictions)))

    def limit_row(self, row: int, n_blocks: int | None) -> None:
        """Limit the blocks predicted for a row, whose oldest predictions go first. None: no limit."""
        of_row = self._rows.setdefault(row, _RowPredictions())
        of_row.max_blocks = n_blocks
        self._drop_over_limit(of_row)
        if n_blocks is None and not of_row.predictions:
            del self._rows[row]

    def match(self, tokens: bytes, root: Root, *, now_s: float) -> Match:
        """How much of a prompt each row is expected to have; a holder's bit is the row.

        Some expired predictions are dropped first; those beyond the limit of `expire` still count.
        """
        if self._step_heap and self._step_heap[0] * _STEP_S <= now_s:
            self.expire(now_s)
        lanes = (1 << 2 * self._n_rows) - 1
        return self.trie.match(tokens, root, lanes=lanes, n_holders=self._n_rows)

    def expire(self, now_s: float, n: int = 64) -> bool:
        """Drop up to `n` expired predictions. True when there may be more."""
        while self._step_heap and self._step_heap[0] * _STEP_S <= now_s:
            due = self._steps[self._step_heap[0]]
            while due:
                if n <= 0:
                    return True
                self.end_prediction(next(reversed(due)))
                n -= 1
            del self._steps[heapq.heappop(self._step_heap)]
        return False

    def _schedule(self, prediction: Prediction, expires_s: float) -> None:
        prediction.step = math.ceil(expires_s / _STEP_S)
        due = self._steps.get(prediction.step)
        if due is None:
            due = self._steps[prediction.step] = {}
            heapq.heappush(self._step_heap, prediction.step)
        due[prediction] = None

    def _drop_over_limit(self, of_row: _RowPredictions) -> None:
        while of_row.max_blocks is not None and of_row.n_blocks > of_row.max_blocks:
            self.end_prediction(next(iter(of_row.predictions)))
