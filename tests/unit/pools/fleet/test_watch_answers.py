"""What a look at a worker makes of answers that are strange, missing or late."""

import anyio
import grpc
import pytest

from slagate.pools.fleet.watch import PROBE_LIMIT_S
from slagate.pools.inflight.row_view import State
from slagate.proto import openengine_pb2 as oe
from slagate.proto.rpc.status import Status
from slagate.workers.runtime.virtual_loop import run
from support.builders import MODEL
from support.fleet.watched import LOOK_S, first, watched
from support.worker.fake import FakeWorker

OF_A_LATER_REVISION = 9


def test_a_health_state_of_a_later_revision_is_not_ready_and_named_by_its_number() -> None:
    async def main() -> None:
        worker = FakeWorker()
        async with watched({"p1:1": worker}) as of:
            worker.state = OF_A_LATER_REVISION  # type: ignore[assignment]
            await anyio.sleep(3 * LOOK_S)
            assert first(of).state is State.NOT_READY
            assert first(of).reason == "reports unknown state 9"
            worker.state = oe.HEALTH_STATE_READY
            await anyio.sleep(2 * LOOK_S)
            assert first(of).state is State.READY

    run(main)


def test_a_role_of_a_later_revision_is_read_as_unsaid() -> None:
    async def main() -> None:
        worker = FakeWorker()
        worker.info.engine_role = OF_A_LATER_REVISION  # type: ignore[assignment]
        async with watched({"p1:1": worker}) as of:
            assert first(of).state is State.READY

    run(main)


class Broken(FakeWorker):
    """Its health cannot be read while `broken`."""

    broken = True

    async def health(self, request: oe.HealthRequest) -> oe.HealthResponse:
        if self.broken:
            raise ZeroDivisionError("whatever it was")
        return await super().health(request)


def test_an_answer_that_breaks_a_look_is_a_failed_probe_and_the_loop_goes_on() -> None:
    async def main() -> None:
        worker = Broken()
        async with watched({"p1:1": worker}) as of:
            assert first(of).state is State.CONNECTING
            assert first(of).reason == "answers what cannot be read: ZeroDivisionError"
            assert [m.state for m in of.members()].count(State.READY) == 3
            worker.broken = False
            await anyio.sleep(LOOK_S)
            assert first(of).state is State.READY
            worker.broken = True
            await anyio.sleep(3 * LOOK_S)
            assert first(of).state is State.NOT_READY

    run(main)


class Hung(FakeWorker):
    """Never answers one method while `hung`."""

    hung = ""

    async def health(self, request: oe.HealthRequest) -> oe.HealthResponse:
        await self._hang("health")
        return await super().health(request)

    async def load(self, request: oe.GetLoadRequest) -> oe.LoadInfo:
        await self._hang("load")
        return await super().load(request)

    async def server_info(self) -> oe.ServerInfo:
        await self._hang("server_info")
        return await super().server_info()

    async def _hang(self, method: str) -> None:
        if self.hung == method:
            await anyio.sleep_forever()


@pytest.mark.parametrize("method", ["health", "load", "server_info"])
def test_a_look_is_bounded_whatever_hangs(method: str) -> None:
    async def main() -> None:
        worker = Hung()
        worker.hung = method
        async with watched({"p1:1": worker}) as of:
            await anyio.sleep(PROBE_LIMIT_S)
            assert first(of).state is State.CONNECTING
            assert first(of).reason == f"does not answer within {PROBE_LIMIT_S} s"
            worker.hung = ""
            await anyio.sleep(LOOK_S)
            assert first(of).state is State.READY

    run(main)


def test_a_worker_that_hangs_is_out_after_three_looks() -> None:
    async def main() -> None:
        worker = Hung()
        async with watched({"p1:1": worker}) as of:
            worker.hung = "health"
            await anyio.sleep(3 * (LOOK_S + PROBE_LIMIT_S))
            assert first(of).state is State.NOT_READY

    run(main)


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNIMPLEMENTED])
def test_a_worker_without_load_figures_is_healthy_all_the_same(code: grpc.StatusCode) -> None:
    async def main() -> None:
        worker = FakeWorker()
        async with watched({"p1:1": worker}) as of:
            assert first(of).load is not None
            worker.load_fails = Status(code, "no iteration stats")
            await anyio.sleep(5 * LOOK_S)
            assert first(of).state is State.READY
            assert first(of).load is None
            worker.load_fails = None
            await anyio.sleep(LOOK_S)
            assert first(of).load is not None

    run(main)


def test_who_it_is_is_asked_once_while_its_load_reports_name_the_same_instance() -> None:
    async def main() -> None:
        worker = FakeWorker()
        async with watched({"p1:1": worker}) as of:
            await anyio.sleep(10 * LOOK_S)
            assert (worker.n_server_infos, worker.n_model_infos) == (1, 1)
            restarted = oe.ServerInfo()
            restarted.CopyFrom(worker.info)
            restarted.instance_id = "i2"
            worker.info = restarted
            await anyio.sleep(LOOK_S)
            assert (worker.n_server_infos, worker.n_model_infos) == (2, 2)
            assert first(of).server_info == restarted

    run(main)


def test_who_it_is_is_asked_every_time_where_no_load_report_says() -> None:
    async def main() -> None:
        worker = FakeWorker(load_fails=Status(grpc.StatusCode.UNIMPLEMENTED, "no"))
        async with watched({"p1:1": worker}) as of:
            await anyio.sleep(4 * LOOK_S)
            assert worker.n_server_infos > 3
            assert worker.n_model_infos == 1
            assert set(first(of).models) == {MODEL}

    run(main)
