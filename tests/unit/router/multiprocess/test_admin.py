"""The admin service of a gateway of several processes, over processes that are only answers."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import anyio
import grpc
import grpc.aio
import pytest

from slagate.pools.fleet_file.models import AdmissionMode
from slagate.pools.inflight.shared_counts import PoolCell
from slagate.proto import gateway_pb2 as gw
from slagate.router.metrics import Metrics
from slagate.router.multiprocess.admin import MultiprocessAdminService, watch_all
from slagate.router.receipts.config import config_message
from slagate.router.reload.reload import Proposal, Reloader, prepare
from slagate.workers.runtime.virtual_loop import run
from support.builders import config
from support.gateway.context import Aborted, Context
from support.gateway.reloads import Nowhere
from support.gateway.shared import Opened

AGG = gw.STAGE_AGG


def gone() -> grpc.aio.AioRpcError:
    none = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, none, none, details="gone")


class Answers:
    """The admin service of one process: what was put here, or nobody is there."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.asked: list[Any] = []

    def __getattr__(self, method: str) -> Callable[..., Any]:
        async def call(request: Any, **how: Any) -> Any:
            self.asked.append((method, request, how.get("metadata")))
            if method not in self.answers:
                raise gone()
            answer = self.answers[method]
            if isinstance(answer, Exception):
                raise answer
            return type(answer).FromString(answer.SerializeToString())

        return call


class Stream:
    """A call of `WatchReceipts`: what is sent, then its end, or silence until it is told more."""

    def __init__(self, items: list[gw.WatchReceiptsResponse], *, ends: bool) -> None:
        self.items = items
        self.ends = ends
        self.news = anyio.Event()
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True

    def tell(self, *items: gw.WatchReceiptsResponse, ends: bool = False) -> None:
        self.items += items
        self.ends = ends
        self.news.set()
        self.news = anyio.Event()

    async def read(self) -> Any:
        while not self.items:
            if self.ends:
                return grpc.aio.EOF
            await self.news.wait()
        return self.items.pop(0)


class Process:
    returncode: int | None = None


class Child:
    def __init__(self, number: int, gateway: Any) -> None:
        self.number = number
        self.gateway = gateway
        self.process = Process()


class Children:
    """As `Supervisor`, for those who ask."""

    def __init__(self, *gateways: Any) -> None:
        self.running = {number: Child(number, each) for number, each in enumerate(gateways)}
        self.stopping = anyio.Event()
        self.admission: AdmissionMode | None = None

    async def set_admission(self, mode: AdmissionMode) -> AdmissionMode | None:
        before, self.admission = self.admission, mode
        return before


@contextmanager
def whole(folder: Path, children: Children) -> Iterator[MultiprocessAdminService]:
    opened = Opened(folder, 2)
    for number in range(2):
        counts = opened(number)
        slot = counts.claim_slot("pool agg p")
        for at, cell in enumerate((PoolCell.REQUESTS, PoolCell.RETRIES, PoolCell.SPILLS)):
            counts.set(slot, cell, 10 * number + at + 1)
    prepared = prepare(config("agg"))
    reloader = Reloader(
        Proposal(prepared, config_message(prepared, policy="slagate")),
        put_in_force=lambda _: None,
        metrics=Metrics(),
        now_s=lambda: 5.0,
    )
    yield MultiprocessAdminService(
        children,  # type: ignore[arg-type]
        opened(None),
        reloader=reloader,
        source=Nowhere(),
        now_s=lambda: 7.5,
    )
    opened.close()


def predictions(basis: str, bias: float) -> gw.Predictions:
    off = abs(bias)
    return gw.Predictions(basis=basis, pairs=10, bias=bias, median_error=off, coverage=1 - off)


def pools(**more: Any) -> gw.ListPoolsResponse:
    pool = gw.PoolStatus(name="p", stage=AGG, workers=3, **more)
    return gw.ListPoolsResponse(
        pools=[pool],
        max_attempts=4,
        waiting_requests=2,
        policy="slagate",
        config_version="other",
        admission="on",
        file_admission="shadow",
        spill="any",
        bypass="auto",
    )


def test_pools_are_summed_and_their_totals_are_of_all_processes_there_ever_were(
    tmp_path: Path,
) -> None:
    one = pools(inflight=3, queued_tokens=10, workers_ready=3, ttft=predictions("grid", 0.5))
    two = pools(inflight=4, queued_tokens=20, workers_ready=2, ttft=predictions("learnt", -0.75))
    two.pools[0].itl.CopyFrom(predictions("profile", 0.25))
    one.pools[0].ttft.spread, two.pools[0].ttft.spread = 0.25, 0.5
    children = Children(Answers(ListPools=one), Answers(ListPools=two))
    with whole(tmp_path, children) as service:
        found = run(service.ListPools, gw.ListPoolsRequest(), Context())
        (pool,) = found.pools
        assert (pool.workers, pool.workers_ready, pool.inflight) == (3, 2, 7)
        assert pool.queued_tokens == 30
        assert pool.ttft == gw.Predictions(
            basis="grid", pairs=20, bias=-0.75, median_error=0.75, coverage=0.25, spread=0.5
        )
        assert pool.itl == predictions("profile", 0.25)
        assert (pool.requests_total, pool.retries_total, pool.spills_total) == (12, 14, 16)
        assert (found.waiting_requests, found.max_attempts, found.config_age_s) == (4, 4, 2.5)
        assert found.config_version == service._reloader.version
        assert (found.admission, found.file_admission) == ("on", "shadow")
        assert (found.spill, found.bypass) == ("any", "auto")
        children.running[0].gateway = Answers()
        (pool,) = run(service.ListPools, gw.ListPoolsRequest(), Context()).pools
        assert (pool.inflight, pool.requests_total) == (4, 12)
        children.running[1].gateway = Answers()
        with pytest.raises(Aborted) as nobody:
            run(service.ListPools, gw.ListPoolsRequest(), Context())
        assert nobody.value.code is grpc.StatusCode.UNAVAILABLE


def test_a_worker_is_as_the_process_sees_it_that_sees_the_worst(tmp_path: Path) -> None:
    def answer(**more: Any) -> Answers:
        worker = gw.WorkerStatus(worker="w:1", pool="p", stage=AGG, **more)
        return Answers(ListWorkers=gw.ListWorkersResponse(workers=[worker]))

    fresh = answer(
        state="ready", inflight=2, queued_tokens=5, models=["m"], index_blocks=7, load_age_ms=3.0
    )
    fresh.answers["ListWorkers"].workers[0].load.running_requests = 9
    fresh.answers["ListWorkers"].workers[0].prefix.requests = 2
    lost = answer(state="not_ready", reason="gone", inflight=1, index_blocks=9, instance_id="i")
    lost.answers["ListWorkers"].workers[0].prefix.requests = 3
    for order in ((fresh, lost), (lost, fresh)):
        folder = tmp_path / str(order[0] is fresh)
        folder.mkdir()
        with whole(folder, Children(*order)) as service:
            found = run(service.ListWorkers, gw.ListWorkersRequest(), Context())
            (worker,) = found.workers
            assert (worker.state, worker.reason, worker.inflight) == ("not_ready", "gone", 3)
            assert (worker.queued_tokens, worker.index_blocks) == (5, 9)
            assert (worker.instance_id, list(worker.models)) == ("i", ["m"])
            assert (worker.load.running_requests, worker.load_age_ms) == (9, 3.0)
            assert worker.prefix.requests == 5


def test_a_mode_of_admission_is_for_all_and_a_wrong_one_for_none(tmp_path: Path) -> None:
    children = Children()
    with whole(tmp_path, children) as service:

        def put(mode: str) -> tuple[str, str]:
            request = gw.SetAdmissionRequest(mode=mode)
            answer = run(service.SetAdmission, request, Context())
            return answer.previous_mode, answer.mode

        assert put("on") == ("off", "on"), "before it was the file's"
        with pytest.raises(Aborted, match="mode: must be one of off, shadow, on"):
            put("maybe")
        assert children.admission == "on"
        assert put("shadow") == ("on", "shadow")


def test_cells_are_summed_where_they_are_of_the_configuration_in_force(tmp_path: Path) -> None:
    def answer(version: str, n: int) -> Answers:
        cell = gw.CellStatus(stage=AGG, cell=[0, 1], requests=n, judged=n, met=1, failed=0)
        cells = gw.ListCellsResponse(cells=[cell], config_version=version, fleet=version)
        return Answers(ListCells=cells)

    children = Children(answer("old", 100))
    with whole(tmp_path, children) as service:
        version = service._reloader.version
        found = run(service.ListCells, gw.ListCellsRequest(), Context())
        assert (found.config_version, found.cells[0].requests) == ("old", 100)
        children.running = Children(
            answer("old", 9), answer(version, 2), answer(version, 3)
        ).running
        found = run(service.ListCells, gw.ListCellsRequest(), Context())
        (cell,) = found.cells
        assert (cell.requests, cell.judged, cell.met, list(cell.cell)) == (5, 5, 2, [0, 1])
        assert (found.config_version, found.fleet) == (version, version)


def test_explain_goes_to_a_process_that_is_there_with_the_targets(tmp_path: Path) -> None:
    good = Answers(Explain=gw.Decision(request_id="r"))
    dead = Answers()
    children = Children(dead, good)
    children.running[0].process.returncode = -9
    metadata = (("x-slo-ttft-ms", "5"), ("user-agent", "u"), ("grpc-trace-bin", "t"))
    with whole(tmp_path, children) as service:
        assert run(service.Explain, gw.ExplainRequest(), Context(*metadata)).request_id == "r"
        assert good.asked == [("Explain", gw.ExplainRequest(), [("x-slo-ttft-ms", "5")])]
        none = grpc.aio.Metadata()
        refused = grpc.aio.AioRpcError(
            grpc.StatusCode.INVALID_ARGUMENT, none, none, details="prompt: is empty"
        )
        children.running[1].gateway = Answers(Explain=refused)
        with pytest.raises(Aborted) as said:
            run(service.Explain, gw.ExplainRequest(), Context())
        assert (said.value.code, str(said.value.details)) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "prompt: is empty",
        )
        children.running[1].process.returncode = -9
        children.running[1].gateway = Answers()
        with pytest.raises(Aborted, match="no process"):
            run(service.Explain, gw.ExplainRequest(), Context())


def receipt(number: int, unix_s: float, missed: int = 0) -> gw.WatchReceiptsResponse:
    of = gw.Receipt(number=number, unix_s=unix_s)
    return gw.WatchReceiptsResponse(receipt=of, missed=missed)


def head(version: str) -> gw.WatchReceiptsResponse:
    return gw.WatchReceiptsResponse(config=gw.GatewayConfig(version=version))


class Receipts:
    """One process: kept receipts, and a stream that goes on."""

    def __init__(self, *kept: gw.WatchReceiptsResponse) -> None:
        self.kept = kept
        self.live = Stream([head("v")], ends=False)

    def WatchReceipts(self, request: gw.WatchReceiptsRequest) -> Stream:
        if request.follow and request.HasField("limit"):
            return self.live
        if request.follow:
            return Stream([head("v"), *self.kept], ends=False)
        kept = list(self.kept)
        if request.HasField("limit"):
            kept = kept[len(kept) - min(len(kept), request.limit) :]
        return Stream([head("v"), *kept], ends=True)


@asynccontextmanager
async def watched(children: Children, **asked: Any) -> AsyncIterator[Callable[[], Awaitable[int]]]:
    """What a reader gets, one number after the other; 0 is a configuration, -1 the end."""
    send, receive = anyio.create_memory_object_stream[gw.WatchReceiptsResponse](0)

    async def watch() -> None:
        async with send:
            await watch_all(children, gw.WatchReceiptsRequest(**asked), send.send)  # type: ignore[arg-type]

    async def take() -> int:
        try:
            return (await receive.receive()).receipt.number
        except anyio.EndOfStream:
            return -1

    async with receive, anyio.create_task_group() as tasks:
        tasks.start_soon(watch)
        yield take
        tasks.cancel_scope.cancel()


def test_kept_receipts_are_in_the_order_of_their_ends() -> None:
    async def main() -> None:
        children = Children(
            Receipts(receipt(1, 10.0), receipt(3, 30.0)),
            Receipts(receipt(2, 20.0), receipt(4, 40.0)),
        )
        async with watched(children) as take:
            assert [await take() for _ in range(6)] == [0, 1, 2, 3, 4, -1]
        async with watched(children, limit=1) as take:
            assert [await take() for _ in range(3)] == [0, 4, -1]
        async with watched(children, limit=0) as take:
            assert [await take() for _ in range(2)] == [0, -1]

    run(main)


def test_a_follower_goes_on_with_the_process_that_takes_a_dead_ones_place() -> None:
    async def main() -> None:
        one, two = Receipts(receipt(1, 10.0)), Receipts(receipt(2, 20.0))
        children = Children(one, two)
        async with watched(children, follow=True) as take:
            assert [await take() for _ in range(3)] == [0, 1, 2]
            # Sent by both calls, as it ended between the two: told once.
            one.live.tell(receipt(1, 10.0), receipt(3, 30.0))
            assert await take() == 3
            one.live.tell(ends=True)
            del children.running[0]
            two.live.tell(receipt(4, 40.0))
            assert await take() == 4
            children.running[0] = Child(0, Receipts(receipt(5, 50.0)))
            assert await take() == 5
            two.live.tell(ends=True)
            children.stopping.set()
        assert two.live.is_cancelled

    run(main)


def test_a_follower_ends_when_the_gateway_does() -> None:
    async def main() -> None:
        one = Receipts(receipt(1, 10.0))
        children = Children(one)
        async with watched(children, follow=True) as take:
            assert [await take() for _ in range(2)] == [0, 1]
            children.stopping.set()
            one.live.tell(receipt(3, 30.0), ends=True)
            assert [await take() for _ in range(2)] == [3, -1]

    run(main)
