"""Processes that cannot start, and what they are asked, with real sockets and real children."""

import signal
from pathlib import Path

import anyio
import grpc
import grpc.aio
import pytest
from msgspec.structs import replace

from slagate.pools.fleet.fleet import prepare
from slagate.proto import gateway_pb2 as gw
from slagate.proto import process_pb2 as ps
from slagate.proto import process_pb2_grpc as ps_grpc
from slagate.router.metrics import Metrics
from slagate.router.multiprocess import peers as process_peers
from slagate.router.multiprocess.child import (
    ChildService,
    ProcessSlot,
    config_in_force,
    own_place,
)
from slagate.router.multiprocess.supervisor import Supervisor, write_config
from slagate.router.receipts.config import UnusableReceipt, config_message, prepared_of
from slagate.router.receipts.ring import ReceiptRing
from slagate.router.reload.reload import Proposal, Reloader, put_in_force_here
from slagate.router.request import errors
from slagate.router.request.running import RunningRequests
from slagate.router.scheduling.dispatcher import Dispatcher
from slagate.workers.runtime.clock import monotonic_s
from slagate.workers.runtime.virtual_loop import run
from support.builders import PROFILE, config, fleet, rng
from support.gateway.context import Aborted, Context
from support.gateway.running import listed
from support.gateway.shared import Opened, peers_of
from support.limits import HANG_S


def place_in(folder: Path, *, n_processes: int = 2) -> ProcessSlot:
    return ProcessSlot(
        number=0, n_processes=n_processes, folder=str(folder), instance_id="i", port=1
    )


def supervised(folder: Path, *arguments: str) -> tuple[int, bool]:
    """The exit status of processes with these arguments, and whether they were said to be ready."""
    opened = Opened(folder, 2)
    is_ready = False

    def on_ready() -> None:
        nonlocal is_ready
        is_ready = True

    async def main() -> int:
        of = Supervisor(
            place_in(folder), opened(None), arguments=arguments, stop_limit_s=5, now_s=monotonic_s
        )
        return await of.run(on_ready)

    try:
        return anyio.run(main), is_ready
    finally:
        opened.close()


def test_a_process_that_cannot_start_ends_the_gateway_with_its_status(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert supervised(tmp_path, "serve", "--nonsense") == (2, False)
    assert capfd.readouterr().err.count("--nonsense") >= 2, "each says why"


def test_one_that_ends_well_but_never_was_ready_is_a_failure_too(tmp_path: Path) -> None:
    assert supervised(tmp_path, "grid", "schema") == (1, False)


def test_a_place_travels_in_the_environment_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = place_in(tmp_path)
    assert own_place() is None
    for name, value in place.in_environment().items():
        monkeypatch.setenv(name, value)
    assert own_place() == place
    assert own_place() is None
    for name, value in replace(place, admission="shadow").in_environment().items():
        monkeypatch.setenv(name, value)
    assert own_place() == replace(place, admission="shadow")


class Switched:
    """A process that takes an admission mode, or does not answer."""

    def __init__(self, number: int, *, answers: bool = True) -> None:
        self.number, self.answers = number, answers
        self.modes: list[str] = []
        self.signals: list[int] = []
        self.gateway = self.process = self

    async def SetAdmission(self, request: gw.SetAdmissionRequest, **_limits: float) -> None:
        if not self.answers:
            none = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(grpc.StatusCode.DEADLINE_EXCEEDED, none, none)
        self.modes.append(request.mode)

    def send_signal(self, number: int) -> None:
        self.signals.append(number)


def test_a_mode_of_admission_is_in_force_in_all_processes_that_run(tmp_path: Path) -> None:
    opened = Opened(tmp_path, 2)
    of = Supervisor(
        place_in(tmp_path), opened(None), arguments=(), stop_limit_s=5, now_s=monotonic_s
    )
    good, hangs = Switched(0), Switched(1, answers=False)
    of.running = {0: good, 1: hangs}  # type: ignore[dict-item]
    assert of.admission is None
    assert run(of.set_admission, "on") is None
    assert run(of.set_admission, "shadow") == "on"
    assert (of.admission, good.modes, good.signals) == ("shadow", ["on", "shadow"], [])
    assert hangs.signals == [signal.SIGKILL] * 2, "the one in its place has the mode from its start"
    opened.close()


def message_of(*, n_workers: int = 2) -> gw.GatewayConfig:
    workers = [f"w{n}:1" for n in range(n_workers)]
    pools = {"agg": {"workers": workers, "profile": PROFILE, "tp": 1, "max_inflight": 3}}
    return config_message(prepare(config("agg", pools)), policy="slagate")


def test_a_configuration_comes_out_of_its_message_as_it_went_in(tmp_path: Path) -> None:
    message = message_of()
    prepared = prepared_of(message)
    assert config_message(prepared, policy="slagate") == message
    assert prepared.config.pools["agg"].max_inflight == 3
    assert prepared.estimators["agg"].frozen.source == f"profile {PROFILE} tp 1"
    write_config(place_in(tmp_path), message)
    assert config_message(prepare(config_in_force(place_in(tmp_path))), policy="slagate") == message
    message.fleet = message.fleet.replace("w0:1", "w9:1")
    with pytest.raises(UnusableReceipt, match="version"):
        prepared_of(message)


class Running:
    """What a process answers from."""

    def __init__(self) -> None:
        self.fleet = fleet("agg")
        first = message_of(n_workers=1)
        self.dispatcher = Dispatcher(self.fleet, rng=rng())
        self.receipts = ReceiptRing(first, unix_s=lambda: 1.5)
        self.live = RunningRequests()
        metrics = Metrics()
        metrics.watch(self.dispatcher)
        self.reloader = Reloader(
            Proposal(prepared_of(first), first),
            put_in_force=put_in_force_here(self.dispatcher, self.receipts),
            metrics=metrics,
            now_s=lambda: 0.0,
        )
        self.service = ChildService(
            self.reloader, self.live, metrics, not_ready=self.fleet.not_ready
        )


def test_a_configuration_is_in_force_only_once_it_was_prepared() -> None:
    async def main() -> None:
        of = Running()
        before, message = of.reloader.version, message_of(n_workers=3)
        put = ps.PutInForceRequest(version=message.version)
        with pytest.raises(Aborted) as refused:
            await of.service.PutInForce(put, Context())
        assert refused.value.code is grpc.StatusCode.FAILED_PRECONDITION
        assert not (await of.service.Prepare(message, Context())).problem
        assert of.reloader.version == before
        await of.service.PutInForce(put, Context())
        assert of.reloader.version == of.receipts.config.version == message.version
        assert len(of.fleet.pools["agg"].members) == 3
        with pytest.raises(Aborted):
            await of.service.PutInForce(put, Context())
        message.version = "another"
        assert "version" in (await of.service.Prepare(message, Context())).problem

    anyio.run(main)


def test_a_look_has_gauges_when_they_are_asked_for() -> None:
    async def main() -> None:
        of = Running()
        of.fleet.pools["agg"].members["a1:1"].refuse("gone")
        assert await of.service.Look(ps.LookRequest(), Context()) == ps.LookResponse()
        text = (await of.service.Look(ps.LookRequest(metrics=True), Context())).metrics.decode()
        assert 'slagate_worker_ready{pool="agg",stage="agg",worker="a1:1"} 0.0' in text
        assert "slagate_requests_total" not in text
        of.fleet.pools["agg"].members["a2:1"].refuse("gone")
        look = await of.service.Look(ps.LookRequest(), Context())
        assert look.not_ready == "no agg worker is ready"

    anyio.run(main)


def test_an_abort_finds_the_process_that_has_the_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_peers, "ABORT_LIMIT_S", HANG_S)

    async def main() -> None:
        opened = Opened(tmp_path, 3)
        place = place_in(tmp_path, n_processes=3)
        of = Running()
        server = grpc.aio.server()
        ps_grpc.add_ProcessServicer_to_server(of.service, server)
        server.add_insecure_port(f"unix:{place.path('admin', number=1)}")
        await server.start()
        peers = peers_of(opened(0), admin_path=lambda number: place.path("admin", number=number))
        ended: list[str] = []

        async def serve() -> None:
            with pytest.raises(errors.Aborted) as caught, listed(of.live, "me", "r"):
                await anyio.sleep_forever()
            ended.append(str(caught.value))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(serve)
            await anyio.wait_all_tasks_blocked()
            assert not await peers.abort("somebody", "r")
            assert not await peers.abort("me", "another")
            assert not ended
            # Number 2 does not run.
            assert await peers.abort("me", "r")
        assert ended == ["aborted by the client"]
        await server.stop(None)
        opened.close()

    anyio.run(main)


def test_running_requests_are_told_to_the_others(tmp_path: Path) -> None:
    async def main() -> None:
        opened = Opened(tmp_path, 2)
        a, b = (peers_of(opened(number)) for number in range(2))
        live = RunningRequests(a.show_running)
        with listed(live, "p", "r"), listed(live, "p", "s"):
            assert (b.n_running, a.n_running) == (2, 0)
        assert (b.n_running, len(live)) == (0, 0)
        opened.close()

    run(main)
