"""Rows: what is written is what a frozen copy shows, and nothing after it."""

import random

from slagate.pools.table import UNLIMITED, RowView, State, Table, rows_of
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
    table = Table()
    for at in range(9):
        assert table.add(f"w{at}:1", None) == at
    before = table.rows()
    table.set(3, inflight=2)
    table.add_to(3, inflight=1)
    table.set_s(3, queued_s=1.5)
    table.set_state(3, State.READY, suspect=True)
    table.set_models(3, frozenset({"m"}))
    table.add("new:1", 0)
    table.rename(0, 7)
    blank = before.view(3)
    assert (blank.inflight, blank.queued_s, blank.suspect, len(before)) == (0, 0.0, False, 9)
    assert (before.view(0).rank, before.view(3).models) == (None, frozenset())
    after = table.rows()
    changed = after.view(3)
    assert (changed.inflight, changed.queued_s, changed.state) == (3, 1.5, State.READY)
    assert (changed.suspect, changed.models) == (True, frozenset({"m"}))
    assert (after.view(0).rank, after.view(9).address) == (7, "new:1")


def test_who_does_not_tell_has_the_mean_of_those_who_do() -> None:
    table = Table()
    for at in range(4):
        table.add(f"w{at}:1", None)
    table.set_foreign(0, (4, 2.0))
    table.set_foreign(1, (8, 4.0))
    table.set_foreign(2, None)
    table.set_foreign(3, None)
    shown = [table.rows().view(at) for at in range(4)]
    assert [each.foreign_requests for each in shown] == [4, 8, 6, 6]
    assert [each.foreign_s for each in shown] == [2.0, 4.0, 3.0, 3.0]
    table.set_foreign(2, (1, 0.0))
    assert table.rows().view(2).foreign_requests == 1
