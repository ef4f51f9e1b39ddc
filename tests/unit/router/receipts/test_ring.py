"""The ring of receipts, on the virtual loop: what it keeps, and what readers get."""

import anyio
from msgspec.structs import astuple

from slagate.pools.fleet.pool import PoolSnapshot
from slagate.pools.grid.grid import Stage
from slagate.proto import gateway_pb2 as gw
from slagate.proto.rpc.status import OK
from slagate.router.receipts.record import Record
from slagate.router.receipts.ring import CHOICE_BYTES, RECEIPT_BYTES, ROW_BYTES, ReceiptRing
from slagate.router.request.errors import Outcome
from slagate.router.scheduling.policy import NO_CONFIG, Decision, choose
from slagate.workers.runtime.cooperative import run_at_once, run_cooperatively
from slagate.workers.runtime.virtual_loop import run
from support.builders import ask, one_cell, pool_view, profiled, rng, view

CONFIG = gw.GatewayConfig(version="v1")


def ring(*, max_receipts: int = 4, max_bytes: int = 1 << 30) -> ReceiptRing:
    return ReceiptRing(CONFIG, unix_s=lambda: 1.5, max_receipts=max_receipts, max_bytes=max_bytes)


def add(to: ReceiptRing, n: int = 1, decision: Decision | None = None) -> None:
    for _ in range(n):
        record = Record(0.0)
        record.decision = decision
        to.add_receipt(record, Outcome.COMPLETED, 2.0)


def decision(n_rows: int = 1, *, config: gw.GatewayConfig = NO_CONFIG) -> Decision:
    views = [view(f"w{at}:1", device_tokens=1) for at in range(n_rows)]
    pools = {"only": pool_view("only", views, speed=profiled())}
    grids = {Stage.AGG: one_cell(Stage.AGG, "only")}
    return choose(ask(), grids, pools, rng=rng(), config=config)


async def numbers(
    of: ReceiptRing, *, limit: int | None = None, follow: bool = False
) -> list[tuple[int, int]]:
    """Number and missed of everything that one reader gets."""
    return [(e.stamp.number, missed) async for e, missed in of.watch(limit=limit, follow=follow)]


def test_the_oldest_go_when_there_are_too_many() -> None:
    of = ring()
    add(of, 6)
    assert (len(of), run(numbers, of)) == (4, [(3, 0), (4, 0), (5, 0), (6, 0)])
    assert of.n_bytes == 4 * RECEIPT_BYTES


def test_the_oldest_go_when_they_take_too_much() -> None:
    one_bytes = RECEIPT_BYTES + CHOICE_BYTES + 100 * ROW_BYTES
    of = ring(max_receipts=100, max_bytes=3 * one_bytes)
    add(of, 7, decision(100))
    assert (len(of), of.n_bytes) == (3, 3 * one_bytes)
    add(of, 1, decision(1000))
    assert len(of) == 0
    add(of)
    assert run(numbers, of) == [(9, 0)]


def test_the_estimate_is_no_less_than_the_arrays_take() -> None:
    choice = decision(1000).stages[0]
    (scored,) = choice.scored
    view: PoolSnapshot = scored.pool
    rows, cached = view.rows, view.cached
    # The other arrays of `rows` are parts of these two.
    fields = (rows._ints, rows._floats, *astuple(scored))
    owned = [each for each in fields if hasattr(each, "nbytes")]
    assert len(owned) >= 5
    owned += [cached.device_tokens, cached.host_tokens]
    n_bytes = sum(each.nbytes for each in owned)
    assert 0.5 * 1000 * ROW_BYTES < n_bytes <= 1000 * ROW_BYTES


def test_every_choice_of_a_retry_is_counted() -> None:
    record = Record(0.0)
    record.decision = decision()
    record.attempt(Stage.AGG, OK)
    record.attempt(Stage.AGG, OK)  # of one choice
    record.decision = record.decision.replace(decision().stages[0])
    of = ring()
    of.add_receipt(record, Outcome.COMPLETED, 2.0)
    assert of.n_bytes == RECEIPT_BYTES + 2 * (CHOICE_BYTES + ROW_BYTES)


def test_a_receipt_is_stamped_with_number_time_and_version() -> None:
    of = ring()
    decided = decision(config=CONFIG)
    add(of, 2, decided)

    async def second() -> gw.Receipt:
        return [await run_cooperatively(e.receipt()) async for e, _ in of.watch()][1]

    got = run(second)
    assert (got.number, got.unix_s, got.config_version) == (2, 1.5, "v1")
    assert got.actual.total_ms == 2000.0
    assert got.decision.stages[0].pools[0].name == "only"


def test_a_limit_asks_for_the_newest() -> None:
    of = ring()
    add(of, 6)
    assert run(numbers, of, limit=2) == [(5, 0), (6, 0)]
    assert run(numbers, of, limit=0) == []
    assert len(run(numbers, of, limit=100)) == 4


def test_who_follows_gets_what_comes_until_the_ring_is_closed() -> None:
    async def main() -> None:
        of = ring()
        add(of, 1)
        got: list[tuple[int, int]] = []

        async def reader() -> None:
            got.extend(await numbers(of, follow=True))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(reader)
            tasks.start_soon(reader)
            await anyio.sleep(1)
            add(of, 2)
            await anyio.sleep(1)
            add(of, 1)
            of.end_watches()
        assert sorted(got) == sorted(2 * [(1, 0), (2, 0), (3, 0), (4, 0)])
        assert await numbers(of, follow=True) == [(1, 0), (2, 0), (3, 0), (4, 0)]

    run(main)


def test_a_slow_reader_is_told_how_many_it_missed_and_holds_nothing_up() -> None:
    async def main() -> None:
        of = ring()
        got: list[tuple[int, int]] = []
        go_on = anyio.Event()

        async def slow() -> None:
            async for entry, missed in of.watch(follow=True):
                got.append((entry.stamp.number, missed))
                await go_on.wait()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(slow)
            await anyio.sleep(1)
            add(of, 1)
            await anyio.sleep(1)
            add(of, 10)
            go_on.set()
            await anyio.sleep(1)
            of.end_watches()
        assert got == [(1, 0), (8, 6), (9, 0), (10, 0), (11, 0)]

    run(main)


def test_who_does_not_follow_gets_an_end_however_many_come_meanwhile() -> None:
    async def main() -> None:
        of = ring()
        add(of, 3)
        got = []
        async for entry, missed in of.watch():
            got.append((entry.stamp.number, missed))
            add(of, 1)
        assert got == [(1, 0), (2, 0), (3, 0)]

    run(main)


def test_a_large_receipt_lets_others_run_while_it_is_put_together() -> None:
    async def main() -> None:
        record = Record(0.0)
        record.decision = decision(200)
        n_turns = 0

        async def other() -> None:
            nonlocal n_turns
            while True:
                n_turns += 1
                await anyio.lowlevel.checkpoint()

        of = ring()
        of.add_receipt(record, Outcome.COMPLETED, 1.0)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(other)
            async for entry, _ in of.watch():
                receipt = await run_cooperatively(entry.receipt())
                assert receipt == run_at_once(entry.receipt())
            tasks.cancel_scope.cancel()
        assert n_turns >= 200 // 32

    run(main)


def test_a_configuration_is_counted_once_for_each_version_in_a_row() -> None:
    """A large fleet file that changes again and again is kept as often as some receipt names it."""
    configs = [gw.GatewayConfig(version=f"v{n}", fleet=" " * 100_000) for n in range(6)]
    one_bytes = RECEIPT_BYTES + CHOICE_BYTES + ROW_BYTES
    config_bytes = configs[0].ByteSize()
    of = ring(max_receipts=100, max_bytes=3 * (config_bytes + 2 * one_bytes))
    # What was refused before it was decided names a version and keeps nothing of it.
    add(of, 1)
    assert of.n_bytes == RECEIPT_BYTES
    n_bytes = []
    for config in configs[:3]:
        of.put_in_force(config)
        add(of, 1)
        for _ in range(2):
            add(of, 1, decision(config=config))
        n_bytes.append(of.n_bytes)
    each = RECEIPT_BYTES + 2 * one_bytes + config_bytes
    assert n_bytes[:2] == [RECEIPT_BYTES + each, RECEIPT_BYTES + 2 * each]
    assert n_bytes[2] <= 3 * (config_bytes + 2 * one_bytes)
    for config in configs[3:]:
        of.put_in_force(config)
        add(of, 1, decision(config=config))
    assert of.n_bytes <= 3 * (config_bytes + 2 * one_bytes)
    # Of v2 one is left that it was not counted with.
    kept = [entry.stamp.config_version for entry in of._entries]
    assert kept == ["v2", "v3", "v4", "v5"]
