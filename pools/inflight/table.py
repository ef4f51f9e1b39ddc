"""A pool's live figures: one row for each worker and attention-DP rank, one array for each figure.

A decision reads every row of a pool. With hundreds of workers an object for each would cost more than all
the rest of the decision; a snapshot is two copies of small arrays.
"""

import math
from collections.abc import Callable, Iterable, Mapping, MutableSequence
from typing import cast

import numpy as np

from slagate.pools.inflight.engine_queue import JOIN_S, EngineQueue, Held, Work
from slagate.pools.inflight.pair_key import ANY_PAIR, PairKey, RowPairs, row_pairs
from slagate.pools.inflight.row_view import (
    FIGURE_INDEX,
    FLOAT_FIELDS,
    INT_FIELDS,
    LEFT,
    READY,
    STATES,
    RowView,
    State,
)
from slagate.pools.inflight.rows import (
    BATCH,
    DOWN,
    FOREIGN_UNKNOWN,
    N_INTS,
    QUEUE_FULL,
    STATE,
    SUSPECT,
    UNAVAILABLE,
    WIDTH,
    Counts,
    Flags,
    Floats,
    Ints,
    Rows,
)
from slagate.pools.inflight.shared_counts import PoolCell

UNLIMITED = 1 << 62

PACE_STEP = 0.05
"""The steps in which a worker's pace is told, since workers that are alike have to look alike."""

KEEP, LEAST_DOUBT_S = 0.95, 0.1
"""How much of what is known of a worker's rate is left at the next observation; beside it the rate of its
pool counts like one of them, and at least like so many seconds of work."""

MAX_PACE = 4.0
"""A worker is at most so many times as slow or fast as its pool."""

UNSEEN_S = 30.0
"""A worker that ended nothing for so long becomes as fast as its pool, bit by bit with each load report."""

STALL_S = 5.0
"""Seconds that a step may take beside a prompt's own work; an engine that takes longer stands still."""


(
    INFLIGHT,  # the first `N_COUNTS` in the order of `RankCell`
    WORKER_INFLIGHT,
    QUEUED_TOKENS,
    CONTEXT_TOKENS,
    MAX_INFLIGHT,
    MAX_QUEUED_TOKENS,
    CAPACITY_TOKENS,
    FOREIGN_REQUESTS,
    LAST_CHOSEN,
    JOIN_TOKENS,
    TAKES_WHOLE,
) = range(len(INT_FIELDS))
_FLOATS = range(len(FLOAT_FIELDS))
QUEUED_S, FOREIGN_S, PACE, ITL_LIMIT_S, STALL_ROOM_S, JOIN_SLACK_S, JOIN_QUIET_S = _FLOATS
# These are internal, and no snapshot has them. `HEAD_S` of the queue may have been done since `SINCE_S`.
HEAD_S, SINCE_S, JOIN_UNTIL_S = range(len(FLOAT_FIELDS), len(FLOAT_FIELDS) + 3)
N_FLOATS = len(FLOAT_FIELDS) + 3


class LoadTable:
    """The rows of one pool, and what the pool has counted. Members write to their own rows.

    A row keeps its number: leases and caches go by it. A row that was freed stays in the table, as one that
    has left, until a new one takes its place.
    """

    _ints: Ints  # i64[N_INTS, n_rows and room for more]
    _floats: Floats  # f64[N_FLOATS, as many]
    is_shared = False  # with other processes of the gateway

    def __init__(self) -> None:
        # The clock of the queues; by this one nothing of them is ever done.
        self.now_s: Callable[[], float] = float
        self.scale = 1.0  # seconds of the clock for one of prefill work, as the pool has learnt
        self.knows_work = True  # whether it is known what is cached of prompts
        self.offset_s = JOIN_S  # that a prompt takes beside its work, on an idle worker
        # As `scale` for decode steps, of a pool whose paces are learnt from those; 0: from prompts.
        self.step_scale = 0.0
        self._queues: list[EngineQueue] = []  # of each row
        self._n_prompts = 0  # in all of them; without any nothing of them changes with time
        # Of each row: seconds of the clock that it took for work, the seconds of that work, and the time of
        # the last observation.
        self._rates: list[tuple[float, float, float]] = []
        self.names: tuple[tuple[str, int | None], ...] = ()  # address and rank of each row
        self._row_models: list[frozenset[str]] = []
        self._row_pairs: list[PairKey] = []
        self._resize(4)
        self._free: list[int] = []
        self._models: Mapping[frozenset[str], Flags] | None = None
        self._pairs: RowPairs | None = None
        self._counts: Counts | None = None  # None: a counted figure has changed
        self.n_model_changes = 0  # times that a worker said what it serves, the same included
        self.totals = {PoolCell.REQUESTS: 0, PoolCell.RETRIES: 0, PoolCell.SPILLS: 0}

    def _resize(self, n_rows: int) -> None:
        ints = np.zeros((N_INTS, n_rows), dtype=np.int64)
        floats = np.zeros((N_FLOATS, n_rows), dtype=np.float64)
        if n_old := len(self.names):
            ints[:, :n_old], floats[:, :n_old] = self._ints, self._floats
        self._ints, self._floats = ints, floats
        # The same memory: this way single figures are read and written three times as fast.
        self._int = [cast("MutableSequence[int]", each.data) for each in ints]
        self._float = [cast("MutableSequence[float]", each.data) for each in floats]
        self.unavailable = self._int[UNAVAILABLE]  # by row, as `Rows.unavailable`

    def __len__(self) -> int:
        return len(self.names)

    def free_pool(self) -> None:
        """Free what the table holds for the pool itself, which is gone; free its rows before."""

    def count(self, total: PoolCell) -> None:
        """Add 1 to one of `totals`."""
        self.totals[total] += 1

    def add_row(self, address: str, rank: int | None) -> int:
        """Add a row with all figures 0, and return its number."""
        row = self._free.pop() if self._free else self._appended()
        self._ints[:, row] = 0
        self._floats[:, row] = 0.0
        self._floats[PACE, row] = 1.0
        self._floats[ITL_LIMIT_S : JOIN_QUIET_S + 1, row] = math.inf
        self._queues[row] = EngineQueue()
        self._rates[row] = 0.0, 0.0, 0.0
        self._set_name(row, address, rank)
        self._derive(row)
        return row

    def free_row(self, row: int) -> None:
        """Free a row: its worker has left."""
        self._set_name(row, "", None)
        self.set_models(row, frozenset())
        self.set_pair(row, ANY_PAIR)
        self.set_state(row, State.LEFT, suspect=False)
        self.set_foreign_load(row, None)
        self._free.append(row)

    def _appended(self) -> int:
        row = len(self.names)
        if row == self._ints.shape[1]:
            self._resize(2 * row)
        self.names = (*self.names, ("", None))
        self._row_models.append(frozenset())
        self._row_pairs.append(ANY_PAIR)
        self._queues.append(EngineQueue())
        self._rates.append((0.0, 0.0, 0.0))
        self._models = self._pairs = None
        return row

    def _set_name(self, row: int, address: str, rank: int | None) -> None:
        self.names = (*self.names[:row], (address, rank), *self.names[row + 1 :])

    def set_rank(self, row: int, rank: int | None) -> None:
        """Set the rank of a row, which is known once the worker was reached."""
        self._set_name(row, self.names[row][0], rank)

    def set_state(self, row: int, state: State, *, suspect: bool) -> None:
        """Set the state of the row's worker: only one that is `READY` takes work."""
        self._int[STATE][row] = STATES.index(state)
        self._int[SUSPECT][row] = suspect
        self._derive(row)

    def set_models(self, row: int, models: frozenset[str]) -> None:
        """Set the names of the models that the row's worker serves."""
        self.n_model_changes += 1
        if self._row_models[row] != models:
            self._row_models[row] = models
            self._models = None

    def set_pair(self, row: int, pair: PairKey) -> None:
        """Set what the row's worker says of its handoffs."""
        if self._row_pairs[row] != pair:
            self._row_pairs[row] = pair
            self._pairs = None

    def get(self, name: str, row: int) -> int:
        """One figure of a row; `name` is an int field of `RowView`."""
        return self._int[FIGURE_INDEX[name]][row]

    def set(self, row: int, **figures: int) -> None:
        """Set figures of a row, by int field of `RowView`."""
        for name, value in figures.items():
            self._int[FIGURE_INDEX[name]][row] = value
        self._derive(row)

    def get_s(self, name: str, row: int) -> float:
        """One figure of a row that is seconds; `name` is a float field of `RowView`."""
        return self._float[FIGURE_INDEX[name]][row]

    def set_s(self, row: int, **seconds: float) -> None:
        """Set figures of a row that are seconds, by float field of `RowView`."""
        for name, value in seconds.items():
            self._float[FIGURE_INDEX[name]][row] = value
        self._derive(row)

    def observe_steps(self, row: int, name: tuple[str, int | None], factor: float) -> None:
        """Learn that the decode steps of a request took `factor` times as long as their profile says.

        It is of a row of this `name`, which may be another worker's by now.
        """
        if self.names[row] == name and factor > 0.0 and self.step_scale > 0.0:
            self._learn_rate(row, factor, 1.0, self.step_scale)

    def decoding(self, row: int, more_tokens: int) -> tuple[int, float]:
        """The batch of a row, and its mean context in tokens, if a request of `more_tokens` joins."""
        ints = self._int
        return ints[BATCH][row], (ints[CONTEXT_TOKENS][row] + more_tokens) / ints[WIDTH][row]

    def _learn_rate(self, row: int, seconds: float, work_s: float, scale: float) -> None:
        """Learn that a row took `seconds` for work that takes `scale` x `work_s` in its pool.

        Prompts that end in one step share its time, so sums are compared: single ones say little.
        """
        most_s = scale * (STALL_S + MAX_PACE * work_s)
        seconds = 0.0 if seconds < 0.0 else most_s if seconds > most_s else seconds
        took_s, done_s, _ = self._rates[row]
        took_s, done_s = KEEP * took_s + seconds, KEEP * done_s + work_s
        self._rates[row] = took_s, done_s, self.now_s()
        doubt_s = work_s if work_s > LEAST_DOUBT_S else LEAST_DOUBT_S
        pace = (took_s / scale + doubt_s) / (done_s + doubt_s)
        pace = MAX_PACE if pace > MAX_PACE else 1 / MAX_PACE if pace < 1 / MAX_PACE else pace
        self._float[PACE][row] = int(pace / PACE_STEP + 0.5) * PACE_STEP

    def forget_pace(self, row: int) -> None:
        """Take a row to be as fast as its pool: its worker has restarted."""
        self._rates[row] = 0.0, 0.0, 0.0
        self._float[PACE][row] = 1.0

    def forget_paces(self) -> None:
        """Take all rows to be as fast as the pool, which has another profile now."""
        for row, queue in enumerate(self._queues):
            self.forget_pace(row)
            queue.forget_times()

    def set_foreign_load(self, row: int, load: tuple[int, float] | None) -> None:
        """Set a row's foreign load: requests, and predicted prefill seconds; None: not known."""
        took_s, done_s, learnt_s = self._rates[row]
        scale = self.step_scale or self.scale
        if done_s and self.now_s() - learnt_s > UNSEEN_S and scale > 0.0:
            # Who is slow gets no requests by which it could be seen that it no longer is.
            took_s = KEEP * took_s + (1 - KEEP) * scale * done_s
            self._rates[row] = took_s, done_s, learnt_s
            self._learn_rate(row, 0.0, 0.0, scale)
            self._rates[row] = took_s, done_s, learnt_s
        self._int[FOREIGN_UNKNOWN][row] = load is None
        requests, seconds = (0, 0.0) if load is None else load
        self._int[FOREIGN_REQUESTS][row] = requests
        self._float[FOREIGN_S][row] = seconds
        self._derive(row)

    def set_step_tokens(self, row: int, tokens: int) -> None:
        """Set how many prompt tokens the row's engine computes in one step; 0: not known."""
        self._queues[row].step_tokens = tokens

    def add_lease(self, row: int, work: Work, *, number: int) -> Held:
        """Add a lease, the pool's lease of that number, to a row."""
        ints = self._int
        self.totals[PoolCell.REQUESTS] += 1
        ints[LAST_CHOSEN][row] = number
        inflight = ints[INFLIGHT][row] = ints[INFLIGHT][row] + 1
        ints[CONTEXT_TOKENS][row] += work.context_tokens
        queued = ints[QUEUED_TOKENS][row] = ints[QUEUED_TOKENS][row] + work.prefill_tokens
        ints[WIDTH][row] = inflight + 1
        ints[BATCH][row] = min(inflight + 1 + ints[FOREIGN_REQUESTS][row], UNLIMITED)
        if queued >= ints[MAX_QUEUED_TOKENS][row]:
            self._derive_unavailable(row)
        held = Held(work)
        promises = work.itl_limit_s < math.inf or work.stall_s < math.inf
        if work.prefill_tokens or promises:
            queue = self._queues[row]
            if work.prefill_tokens:
                self._n_prompts += 1
                rate = self.scale * self._float[PACE][row]
                queue.add_prompt(held, self.now_s(), rate, self.offset_s)
                self._show_prompts(row, queue)
            if promises:
                queue.promise(held)
            self._float[ITL_LIMIT_S][row] = queue.itl_limit_s
            self._float[STALL_ROOM_S][row] = queue.stall_room_s
        return held

    def end_prefill(self, row: int, held: Held, *, is_computed: bool = False) -> None:
        """Take a lease's prompt out of the queue of a row: it is computed, or never will be."""
        work = held.work
        if not work.prefill_tokens:
            return
        self._n_prompts -= 1
        queued = self._int[QUEUED_TOKENS]
        left_tokens = queued[row] = queued[row] - work.prefill_tokens
        queue, now_s, scale = self._queues[row], self.now_s(), self.scale
        if is_computed:
            by_prompts = self.knows_work and not self.step_scale and held.teaches
            if by_prompts and scale > 0.0 and not self._int[FOREIGN_REQUESTS][row]:
                self._learn_rate(row, now_s - queue.last_end_s, work.work_s, scale)
            queue.last_end_s = now_s
        queue.end_prompt(held, now_s, scale * self._float[PACE][row], left_tokens)
        self._show_prompts(row, queue)
        if self._int[UNAVAILABLE][row]:
            self._derive_unavailable(row)

    def begin_answer(self, row: int, held: Held) -> None:
        """Note that the answer of a lease without a prompt begins: prompts stall it from now on."""
        self._queues[row].begin_answer(held, self.now_s(), self.scale * self._float[PACE][row])

    def end_lease(self, row: int, held: Held) -> None:
        """Take a lease off a row; its prefill has ended before."""
        ints, work = self._int, held.work
        inflight = ints[INFLIGHT][row] = ints[INFLIGHT][row] - 1
        ints[CONTEXT_TOKENS][row] -= work.context_tokens
        ints[WIDTH][row] = inflight + 1
        ints[BATCH][row] = min(inflight + 1 + ints[FOREIGN_REQUESTS][row], UNLIMITED)
        has_begun = work.prefill_tokens or held.began_s < math.inf
        if work.itl_limit_s < math.inf or (has_begun and work.context_tokens):
            queue, rate = self._queues[row], self.scale * self._float[PACE][row]
            queue.forget(held, self.now_s(), rate)
            self._float[ITL_LIMIT_S][row] = queue.itl_limit_s
            self._float[STALL_ROOM_S][row] = queue.stall_room_s

    def _show_prompts(self, row: int, queue: EngineQueue) -> None:
        """Bring the figures of a row in line with the prompts in its queue."""
        floats = self._float
        floats[QUEUED_S][row] = queue.queued_s
        floats[HEAD_S][row] = queue.head_s
        floats[SINCE_S][row] = queue.since_s
        # Below 0 nothing may join either, and what would not does no harm.
        floats[JOIN_SLACK_S][row] = max(0.0, queue.join_slack_s)
        floats[JOIN_QUIET_S][row] = max(0.0, queue.join_quiet_s)
        floats[JOIN_UNTIL_S][row] = queue.join_until_s
        self._int[JOIN_TOKENS][row] = queue.join_tokens

    def set_worker_inflight(self, rows: list[int], n_leases: int) -> None:
        """Set in each of a worker's `rows` how many leases it has on all of them."""
        ints = self._int
        for row in rows:
            ints[WORKER_INFLIGHT][row] = n_leases
            if n_leases >= ints[MAX_INFLIGHT][row] or ints[UNAVAILABLE][row]:
                self._derive_unavailable(row)

    def _derive(self, row: int) -> None:
        """Bring all derived figures of a row in line with the others."""
        ints = self._int
        width = ints[WIDTH][row] = ints[INFLIGHT][row] + 1
        # What others sent is theirs to say, and a receipt to decide again from may be made up.
        ints[BATCH][row] = min(width + ints[FOREIGN_REQUESTS][row], UNLIMITED)
        self._derive_unavailable(row)
        self._counts = None

    def _derive_unavailable(self, row: int) -> None:
        ints = self._int
        is_down = ints[WORKER_INFLIGHT][row] >= ints[MAX_INFLIGHT][row] or ints[STATE][row] != READY
        bits = DOWN if is_down else 0
        if ints[QUEUED_TOKENS][row] >= ints[MAX_QUEUED_TOKENS][row]:
            bits |= QUEUE_FULL
        if ints[UNAVAILABLE][row] != bits:
            ints[UNAVAILABLE][row] = bits
            self._counts = None

    def _counted(self) -> Counts:
        n = len(self.names)
        ints = self._ints[:, :n]
        return Counts(
            int(np.count_nonzero(ints[UNAVAILABLE])),
            int(np.count_nonzero(ints[SUSPECT])),
            int(np.count_nonzero(ints[STATE] == LEFT)),
            int(np.count_nonzero(ints[FOREIGN_UNKNOWN])),
            int(ints[CAPACITY_TOKENS].min()) if n else UNLIMITED,
        )

    def elsewhere(self, rows: list[int]) -> tuple[int, int]:
        """Leases, and queued prompt tokens, that other processes of the gateway have on `rows`."""
        return 0, 0

    def newest_lease(self) -> int:
        """The number of the newest lease, of whichever process of the gateway."""
        return int(self._ints[LAST_CHOSEN, : len(self.names)].max(initial=0))

    def rows(self) -> Rows:
        """All rows as they stand. A foreign load that is not known counts as the mean of the known ones."""
        n = len(self.names)
        ints, floats = self._ints[:, :n].copy(), self._floats[: len(FLOAT_FIELDS), :n].copy()
        if self._counts is None:
            self._counts = self._counted()
        if self._models is None:
            self._models = _flags(self._row_models)
        if self._pairs is None:
            self._pairs = row_pairs(self._row_pairs)
        if 0 < self._counts.n_foreign_unknown < n:
            unknown = ints[FOREIGN_UNKNOWN] != 0
            # An old report that says "idle" would draw all requests to a worker that reports no more.
            for figures in (ints[FOREIGN_REQUESTS], floats[FOREIGN_S]):
                if figures.any():
                    figures[unknown] = figures[~unknown].mean()
            np.add(ints[WIDTH], ints[FOREIGN_REQUESTS], out=ints[BATCH])
        self._bring_up_to_date(ints, floats)
        return Rows(
            self.names,
            self._counts,
            self._pairs,
            self._models,
            ints,
            floats,
            ints[LAST_CHOSEN],
            ints[BATCH],
            floats[PACE],
        )

    def _bring_up_to_date(self, ints: Ints, floats: Floats) -> None:
        """Take what was done of the queues since they changed off these figures of all rows."""
        if not self._n_prompts:
            return
        live, n, now_s = self._floats, len(self.names), self.now_s()
        np.putmask(ints[JOIN_TOKENS], live[JOIN_UNTIL_S, :n] < now_s, 0)
        if self.scale > 0.0:
            done_s: Floats = now_s - live[SINCE_S, :n]
            done_s /= self.scale * floats[PACE]
            np.minimum(done_s, live[HEAD_S, :n], out=done_s)
            queued_s = floats[QUEUED_S]
            queued_s -= done_s


def rows_of(views: Iterable[RowView]) -> Rows:
    """Rows with these views, the inverse of `Rows.view`: to make recorded decisions again."""
    table = LoadTable()
    for view in views:
        row = table.add_row(view.address, view.rank)
        table.set(row, **{name: getattr(view, name) for name in INT_FIELDS})
        table.set_s(row, **{name: getattr(view, name) for name in FLOAT_FIELDS})
        table.set_state(row, view.state, suspect=view.suspect)
        table.set_models(row, view.models)
        table.set_pair(row, view.pair)
        table._floats[JOIN_UNTIL_S, row] = math.inf
    return table.rows()


def _flags(row_models: list[frozenset[str]]) -> Mapping[frozenset[str], Flags]:
    return {
        models: np.array([each == models for each in row_models], dtype=np.bool_)
        for models in set(row_models)
    }
