"""Rows: what is written is what a frozen copy shows, and nothing after it."""

import math
import random
from collections.abc import Callable

from msgspec.structs import astuple

from slagate.pools.inflight.engine_queue import Held, Work
from slagate.pools.inflight.row_view import RowView, State
from slagate.pools.inflight.rows import DOWN, QUEUE_FULL
from slagate.pools.inflight.table import UNLIMITED, LoadTable, rows_of
from support.builders import view


def random_view(rng: random.Random, at: int) -> RowView:
    return view(
        f"w{at // 2}:1",
        rank=rng.choice([None, at % 2]),
        state=rng.choice(list(State)),
        suspect=rng.random() < 0.3,
        inflight=rng.randrange(10),
        worker_inflight=rng.randrange(20),
        max_inflight=rng.choice([1, UNLIMITED]),
        queued_tokens=rng.randrange(10**6),
        max_queued_tokens=rng.choice([5, UNLIMITED]),
        queued_s=rng.random(),
        context_tokens=rng.randrange(10**7),
        capacity_tokens=rng.choice([100, UNLIMITED]),
        foreign_requests=rng.randrange(5),
        foreign_s=rng.random(),
        pace=rng.uniform(0.5, 2),
        itl_limit_s=rng.choice([0.01, math.inf]),
        stall_room_s=rng.choice([0.5, math.inf]),
        join_slack_s=rng.choice([-0.1, math.inf]),
        join_quiet_s=rng.choice([0.1, math.inf]),
        join_tokens=rng.choice([0, 4000]),
        last_chosen=rng.randrange(100),
        models=rng.choice([(), ("a",), ("a", "b")]),
    )


def test_rows_and_views_are_each_others_inverse() -> None:
    rng = random.Random(1)
    for _ in range(50):
        views = [random_view(rng, at) for at in range(rng.randrange(1, 12))]
        rows = rows_of(views)
        assert [rows.view(at) for at in range(len(rows))] == views
        assert rows.view(0, device_tokens=3, host_tokens=4).cached_tokens == 7
        for model in ("a", "b", "c"):
            serving = rows.serving(model)
            shown = [True] * len(rows) if serving is None else serving.tolist()
            assert shown == [model in each.models for each in views]


def test_a_copy_does_not_follow_the_table() -> None:
    table = LoadTable()
    for at in range(9):
        assert table.add_row(f"w{at}:1", None) == at
    before = table.rows()
    table.set(3, inflight=2)
    table.add_lease(3, Work(0, 0.0, 0), number=1)
    table.set_s(3, queued_s=1.5)
    table.set_state(3, State.READY, suspect=True)
    table.set_models(3, frozenset({"m"}))
    table.add_row("new:1", 0)
    table.set_rank(0, 7)
    blank = before.view(3)
    assert (blank.inflight, blank.queued_s, blank.suspect, len(before)) == (0, 0.0, False, 9)
    assert (before.view(0).rank, before.view(3).models) == (None, frozenset())
    after = table.rows()
    changed = after.view(3)
    assert (changed.inflight, changed.queued_s, changed.state) == (3, 1.5, State.READY)
    assert (changed.suspect, changed.models) == (True, frozenset({"m"}))
    assert (after.view(0).rank, after.view(9).address) == (7, "new:1")


def test_who_does_not_tell_has_the_mean_of_those_who_do() -> None:
    table = LoadTable()
    for at in range(4):
        table.add_row(f"w{at}:1", None)
    table.set_foreign_load(0, (4, 2.0))
    table.set_foreign_load(1, (8, 4.0))
    table.set_foreign_load(2, None)
    table.set_foreign_load(3, None)
    shown = [table.rows().view(at) for at in range(4)]
    assert [each.foreign_requests for each in shown] == [4, 8, 6, 6]
    assert [each.foreign_s for each in shown] == [2.0, 4.0, 3.0, 3.0]
    table.set_foreign_load(2, (1, 0.0))
    assert table.rows().view(2).foreign_requests == 1


def test_what_follows_from_the_figures_is_in_line_with_them_after_any_change() -> None:
    """As in a table that is written anew, figure by figure, from what is shown."""
    seed = random.randrange(10**6)
    rng = random.Random(seed)
    table = LoadTable()
    table.now_s = lambda: 0.0
    held: list[tuple[int, Held]] = []
    rows = [table.add_row(f"w{at}:1", None) for at in range(6)]
    for row in rows:
        table.set(row, max_inflight=3, max_queued_tokens=500, capacity_tokens=1000 + row)

    def end_one(row: int) -> None:
        mine = [each for each in held if each[0] == row]
        if mine:
            one = rng.choice(mine)
            held.remove(one)
            table.end_prefill(*one)
            table.end_lease(*one)

    changes: list[Callable[[int], object]] = [
        lambda row: held.append((row, table.add_lease(row, Work(200, 0.5, 70), number=1))),
        end_one,
        lambda row: table.set_worker_inflight([row], rng.randrange(5)),
        lambda row: table.set_state(
            row, rng.choice([State.READY, *State]), suspect=rng.random() < 0.3
        ),
        lambda row: table.set_foreign_load(row, (rng.randrange(4), rng.random())),
        lambda row: table.set(row, last_chosen=rng.randrange(9)),
        lambda row: table.set(row, capacity_tokens=rng.randrange(900, 1100)),
        lambda row: table.set(row, max_inflight=rng.randrange(1, 5)),
        lambda row: table.set_s(row, pace=rng.uniform(0.5, 2)),
    ]
    table.rows()
    for _ in range(300):
        rng.choice(changes)(rng.choice(rows))
        found = table.rows()
        views = [found.view(row) for row in rows]
        again = rows_of(views)
        assert astuple(found.counts) == astuple(again.counts), seed
        assert found.counts.n_left == sum(each.state is State.LEFT for each in views), seed
        assert found.counts.n_suspect == sum(each.suspect for each in views), seed
        for row, each in enumerate(views):
            is_down = each.state is not State.READY or each.worker_inflight >= each.max_inflight
            is_full = each.queued_tokens >= each.max_queued_tokens
            assert found.unavailable[row] == DOWN * is_down + QUEUE_FULL * is_full, seed
            assert found.load_s[row] == each.queued_s * each.pace + each.foreign_s, seed
            assert found.batch[row] == each.inflight + each.foreign_requests + 1, seed
            mean = (each.context_tokens + 9) / (each.inflight + 1)
            assert found.mean_tokens(9)[row] == mean, seed
            assert bool(table.unavailable[row] & DOWN) is is_down, seed


def test_what_others_are_taken_to_have_sent_counts_as_what_they_did() -> None:
    table = LoadTable()
    table.now_s = lambda: 0.0
    for at in range(3):
        table.add_row(f"w{at}:1", None)
        table.add_lease(at, Work(1, 1.0, 1), number=1)
    table.set_foreign_load(0, (4, 2.0))
    table.set_foreign_load(2, None)
    assert table.rows().batch.tolist() == [6, 2, 4]
    assert table.rows().load_s.tolist() == [3.0, 1.0, 2.0]
