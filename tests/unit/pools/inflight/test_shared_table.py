"""Decisions over shared counts: as if one process had all the leases."""

import math
import random
from pathlib import Path
from tempfile import mkdtemp

from msgspec.structs import astuple

from slagate.pools.fleet.pool import PoolSnapshot
from slagate.pools.grid.grid import Stage
from slagate.pools.inflight.engine_queue import Held, Work
from slagate.pools.inflight.row_view import State
from slagate.pools.inflight.rows import DOWN, QUEUE_FULL, UNAVAILABLE, Rows
from slagate.pools.inflight.shared_table import SharedTable
from slagate.pools.inflight.table import LoadTable
from slagate.pools.prefix.match import nothing_cached
from slagate.router.scheduling.policy import StageChoice, choose_stage
from support.builders import MODEL, ask, one_cell, profiled, work_of
from support.gateway.shared import Opened
from support.seeds import each_seed

ESTIMATOR = profiled().frozen
N_ROWS = 6
SUMMED = ("inflight", "worker_inflight", "queued_tokens", "context_tokens")
LIMITS = ("max_inflight", "max_queued_tokens", "capacity_tokens")


def decided(stage: Stage, rows: Rows) -> StageChoice:
    n_leases = int(rows.last_chosen.max())
    only = PoolSnapshot("only", ESTIMATOR, rows, nothing_cached(len(rows)), n_leases)
    grid = one_cell(stage, "only")
    return choose_stage(
        stage, ask(isl_tokens=700), grid, {"only": only}, draw=random.Random(1).random()
    )


def test_a_decision_is_as_in_a_table_of_one_process_that_has_the_sums(tmp_path: Path) -> None:
    shut: set[int] = set()

    def history(seed: int) -> None:
        opened = Opened(Path(mkdtemp(dir=tmp_path)), 3)
        shut.update(compare(random.Random(seed), opened))
        opened.close()

    each_seed(4, history)
    assert shut == {DOWN, QUEUE_FULL, DOWN | QUEUE_FULL}, "some rows are shut by the sums alone"


def compare(rng: random.Random, opened: Opened) -> set[int]:
    """Compare at every step of a history; the bits of rows that only the sums shut."""
    tables = [SharedTable("agg p", opened(number)) for number in range(3)]
    plain, here = LoadTable(), tables[0]
    shut: set[int] = set()
    held: list[tuple[SharedTable, int, Held]] = []
    for of in (*tables, plain):
        of.now_s = lambda: 0.0
    for row in range(N_ROWS):
        limits = {"max_inflight": 4, "max_queued_tokens": 700, "capacity_tokens": 9000 + row}
        for of in (*tables, plain):
            of.add_row(f"w{row}:1", None)
            of.set_models(row, frozenset({MODEL} if row else {"other"}))
        for table in tables:
            table.set(row, **limits)
    for turn in range(1, 151):
        of, row = rng.choice(tables), rng.randrange(N_ROWS)
        does = rng.choice(["lease", "lease", "prefilled", "ended", "state", "foreign"])
        inflight = of.get("inflight", row)
        mine = [each for table, at, each in held if (table, at) == (of, row)]
        done = [each for each in mine if each.is_computed]
        queued = [each for each in mine if not each.is_computed]
        if does == "lease" and inflight < 3:
            one = of.add_lease(row, Work(200, 0.125, 1000), number=turn)
            held.append((of, row, one))
            of.set_worker_inflight([row], inflight + 1)
        elif does == "prefilled" and queued:
            of.end_prefill(row, rng.choice(queued))
        elif does == "ended" and done:
            one = rng.choice(done)
            held.remove((of, row, one))
            of.end_lease(row, one)
            of.set_worker_inflight([row], inflight - 1)
        elif does == "state":
            state = rng.choice([State.READY, State.READY, *State])
            suspect = rng.random() < 0.2
            for each in (here, plain):
                each.set_state(row, state, suspect=suspect)
        elif does == "foreign":
            load = rng.choice([None, (rng.randrange(4), rng.random())])
            for each in (here, plain):
                each.set_foreign_load(row, load)
        for row in range(N_ROWS):
            plain.set(row, **{name: sum(t.get(name, row) for t in tables) for name in SUMMED})
            plain.set(row, **{name: here.get(name, row) for name in LIMITS})
            plain.set_s(row, queued_s=sum(t.get_s("queued_s", row) for t in tables))
            plain.set(row, last_chosen=max(t.get("last_chosen", row) for t in tables))
        found, wanted = here.rows(), plain.rows()
        assert found._ints.tolist() == wanted._ints.tolist()
        assert found._floats.tolist() == wanted._floats.tolist()
        assert astuple(found.counts) == astuple(wanted.counts)
        assert here.newest_lease() == plain.newest_lease()
        for stage in Stage:
            one, two = decided(stage, found), decided(stage, wanted)
            assert (one.row, one.starved) == (two.row, two.starved)
            assert one.row is None or work_of(one) == work_of(two)
            assert one.top() == two.top()
        shut.update((found.unavailable & ~here._ints[UNAVAILABLE, :N_ROWS]).tolist())
    return shut - {0}


def test_of_the_queue_of_another_process_the_work_is_seen_once_and_no_promise(
    tmp_path: Path,
) -> None:
    opened = Opened(tmp_path, 2)
    here, there = (SharedTable("agg p", opened(number)) for number in range(2))
    now_s = 0.0
    for table in (here, there):
        table.now_s = lambda: now_s
        table.add_row("w:1", None)
        table.set_step_tokens(0, 8192)
    promised = Work(200, 0.5, 1000, due_s=9.0, itl_limit_s=0.02, stall_s=0.1)
    mine = here.add_lease(0, promised, number=1)
    now_s = 0.2
    seen_here, seen_there = here.rows().view(0), there.rows().view(0)
    assert (seen_here.queued_s, seen_there.queued_s) == (0.3, 0.5)
    assert (seen_here.queued_tokens, seen_there.queued_tokens) == (200, 200)
    assert (seen_here.inflight, seen_there.inflight) == (1, 1)
    assert (seen_here.itl_limit_s, seen_there.itl_limit_s) == (0.02, math.inf)
    assert seen_here.stall_room_s < seen_there.stall_room_s == math.inf
    assert seen_here.join_slack_s < math.inf
    assert (seen_there.join_slack_s, seen_there.join_tokens) == (math.inf, 0)
    theirs = there.add_lease(0, Work(100, 0.25, 0), number=2)
    for table in (here, there):
        view = table.rows().view(0)
        assert (view.queued_tokens, view.inflight, view.last_chosen) == (300, 2, 2)
        assert 0.5 <= view.queued_s <= 0.75
    here.step_scale = 1.0
    here.observe_steps(0, ("w:1", None), 2.0)
    assert there.rows().view(0).pace == 1.0
    for table, held in ((here, mine), (there, theirs)):
        table.end_prefill(0, held)
        table.end_lease(0, held)
    for table in (here, there):
        view = table.rows().view(0)
        assert (view.queued_s, view.queued_tokens, view.inflight) == (0.0, 0, 0)
        assert (view.itl_limit_s, view.stall_room_s, view.join_tokens) == (math.inf, math.inf, 0)
        assert table.rows().load_s.tolist() == [0.0]
    opened.close()


def test_with_leases_of_many_processes_no_more_is_queued_than_was_given(tmp_path: Path) -> None:
    def history(seed: int) -> None:
        rng = random.Random(seed)
        opened = Opened(Path(mkdtemp(dir=tmp_path)), 3)
        tables = [SharedTable("agg p", opened(number)) for number in range(3)]
        now_s = 0.0
        for table in tables:
            table.now_s = lambda: now_s
            table.add_row("w:1", None)
            table.set_step_tokens(0, 500)
        held: list[tuple[SharedTable, Held]] = []
        for turn in range(1, 101):
            now_s += rng.random() / 10
            if rng.random() < 0.5:
                table = rng.choice(tables)
                held.append((table, table.add_lease(0, Work(200, 0.1, 50), number=turn)))
            elif held:
                table, one = held.pop(rng.randrange(len(held)))
                table.end_prefill(0, one)
                table.end_lease(0, one)
            for table in tables:
                view = table.rows().view(0)
                own = [one for of, one in held if of is table]
                least_s = 0.1 * (len(held) - len(own))
                assert least_s - 1e-9 <= view.queued_s <= 0.1 * len(held) + 1e-9
                assert (view.inflight, view.queued_tokens) == (len(held), 200 * len(held))
        opened.close()

    each_seed(5, history)
