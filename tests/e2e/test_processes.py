"""`slagate serve --processes 2`: real processes on one port, that are one gateway to all who ask."""

import copy
import json
import os
import re
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest

from slagate.proto import gateway_pb2 as gw
from slagate.proto import gateway_pb2_grpc as gw_grpc
from slagate.proto import openengine_pb2 as oe
from support.gateway.foreign_client import Client, endless, read, request
from support.gateway.processes import (
    LOOPBACK,
    Cluster,
    Gateway,
    eventually,
    gateway,
    run_cli,
    run_here,
    serve_arguments,
    starting,
)
from support.gateway.several import (
    N_CLIENTS,
    Streams,
    config_of,
    is_whole_again,
    kill,
    pids,
    ready_lines,
    two_processes,
)
from support.limits import HANG_S
from support.seeds import is_long_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("processes")


@pytest.fixture(scope="module")
def two(folder: Path) -> Iterator[Cluster]:
    with two_processes(folder) as running:
        yield running


def test_two_hundred_requests_split_evenly_and_a_killed_process_ends_only_its_own(
    two: Cluster,
) -> None:
    served = two.gateway
    before = served.outcomes("cancelled")
    lost_before = served.metrics("slagate_process_lost_requests_total")[""]
    requests_before = served.pools()[0].requests_total
    with ExitStack() as stack:
        streams = Streams(served.address, 200, 3000, stack)
        loads = [worker.inflight for worker in served.workers()]
        assert sum(loads) == served.pools()[0].inflight == 200
        assert min(loads) >= 80, "no worse than 60 to 40"
        assert sum(served.metrics("slagate_worker_inflight").values()) == 200
        kill(served, 0)
        n_left = served.pools()[0].inflight
        assert 0 < n_left < 200, "both had some"
        assert sum(worker.inflight for worker in served.workers()) <= n_left
        assert sum(served.metrics("slagate_worker_inflight").values()) <= n_left
        seen = served.admin.Explain(gw.ExplainRequest(request=_explained(range(50))))
        assert sum(each.inflight for each in seen.stages[0].candidates) <= n_left
        eventually(lambda: len(streams.ended) == 200 - n_left, "what it had has ended")
        others = set(range(200)) - set(streams.ended)
        streams.go_on(others)
        streams.cancel(others)
        statuses = streams.join()
        lost = [streams.ended[at] for at in streams.ended if at not in others]
        # A connection is of one process, so all or none of its streams have ended.
        dead = Counter(at % N_CLIENTS for at in streams.ended if at not in others)
        assert set(dead.values()) == {10}
        assert {answer.code for answer in lost} == {grpc.StatusCode.UNAVAILABLE}
        left = {grpc.StatusCode.CANCELLED: n_left}
        assert statuses == left | {grpc.StatusCode.UNAVAILABLE: 200 - n_left}
    is_whole_again(served)
    eventually(served.is_idle, "nothing is left of it")
    assert served.is_ready()
    assert served.outcomes("cancelled") == before + n_left
    assert served.metrics("slagate_process_lost_requests_total")[""] == lost_before + 200 - n_left
    assert served.pools()[0].requests_total == requests_before + 200
    for worker in two.workers["a"]:
        with Client(worker.address) as direct:
            eventually(lambda c=direct: not c.load().running_requests, "the engines are idle")  # type: ignore[misc]
    with Client(served.address) as client:
        assert not client.generate(request(range(50), 4)).failed


def test_counters_of_a_killed_process_stay(two: Cluster) -> None:
    served = two.gateway
    for _ in range(8):
        with Client(served.address) as client:
            client.generate(request(range(50), 4))
    names = ("slagate_requests_total", "slagate_output_tokens_total", "slagate_ttft_seconds_count")
    before = {name: served.metrics(name) for name in names}
    assert before["slagate_output_tokens_total"][""] >= 32
    kill(served, 1)
    assert {name: served.metrics(name) for name in names} == before
    is_whole_again(served)
    assert {name: served.metrics(name) for name in names} == before
    assert set(pids(served)) == {0, 1}


def test_control_answers_for_all_processes(two: Cluster) -> None:
    with ExitStack() as stack:
        clients = [stack.enter_context(Client(two.gateway.address)) for _ in range(8)]
        infos = [client.control("GetServerInfo") for client in clients]
        assert len({info.instance_id for info in infos}) == 1
        calls = [client.start(endless(range(50))) for client in clients]
        for call in calls:
            next(call)
        assert {client.load().running_requests for client in clients} == {8}
        of_each = two.gateway.metrics("slagate_process_running_requests")
        assert set(of_each) == {'{process="0"}', '{process="1"}'}
        assert sum(of_each.values()) == 8
        for client in clients:
            assert client.control("Abort", request_id="r-1").status
        assert {read(call).code for call in calls} == {grpc.StatusCode.CANCELLED}
    eventually(two.gateway.is_idle, "all were aborted")


def test_receipts_of_all_have_numbers_of_their_own(two: Cluster) -> None:
    served = two.gateway
    following = served.admin.WatchReceipts(
        gw.WatchReceiptsRequest(follow=True, limit=0), timeout=HANG_S
    )
    assert next(following).config.version == _version(served)
    n_requests = 24
    for at in range(n_requests):
        with Client(served.address) as client:
            client.generate(request(range(50), 2, request_id=f"receipt-{at}"))
    followed = [next(following).receipt for _ in range(n_requests)]
    following.cancel()
    wanted = {f"receipt-{at}" for at in range(n_requests)}
    assert {each.decision.request_id for each in followed} == wanted
    kept = [
        each.receipt
        for each in served.admin.WatchReceipts(
            gw.WatchReceiptsRequest(limit=n_requests), timeout=HANG_S
        )
        if each.HasField("receipt")
    ]
    assert [each.decision.request_id for each in kept] == [
        f"receipt-{at}" for at in range(n_requests)
    ]
    assert len({each.number for each in kept}) == n_requests
    assert {each.number % 2 for each in kept} == {0, 1}, "each process had some"
    cells = served.admin.ListCells(gw.ListCellsRequest(), timeout=HANG_S)
    assert sum(cell.requests for cell in cells.cells) >= n_requests
    decision = served.admin.Explain(
        gw.ExplainRequest(request=_explained(range(50))), metadata=(("x-slo-ttft-ms", "250"),)
    )
    assert decision.sla.ttft_ms == 250
    assert decision.stages[0].worker in two.addresses("a")
    with pytest.raises(grpc.RpcError) as refused:
        served.admin.Explain(
            gw.ExplainRequest(request=_explained(range(50))), metadata=(("x-slo-ttft-ms", "no"),)
        )
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]


def _explained(tokens: range) -> oe.GenerateRequest:
    return oe.GenerateRequest.FromString(request(tokens, 2).SerializeToString())


def _version(of: Gateway) -> str:
    return str(of.admin.ListPools(gw.ListPoolsRequest(), timeout=HANG_S).config_version)


def _versions(of: Gateway) -> set[str]:
    """What receipts of requests of many connections say that is in force."""
    found = set()
    for _ in range(12):
        with Client(of.address) as client:
            answer = client.generate(request(range(50), 2))
            assert not answer.failed
    for each in of.admin.WatchReceipts(gw.WatchReceiptsRequest(limit=12), timeout=HANG_S):
        if each.HasField("receipt"):
            found.add(each.receipt.config_version)
    return found


def test_the_ready_line_has_the_pid_and_those_of_the_processes(two: Cluster) -> None:
    process = two.gateway.process
    assert process.ready["pid"] == process.popen.pid
    # The first two: other tests of this module kill processes of this cluster.
    eventually(lambda: len(ready_lines(two.gateway)) >= 2, "the log says which processes there are")
    first = ready_lines(two.gateway)[:2]
    by_number = sorted((each["process_number"], each["pid"]) for each in first)
    assert [number for number, _ in by_number] == [0, 1]
    assert process.ready["process_pids"] == [pid for _, pid in by_number]


def test_a_reload_is_in_force_in_all_processes_or_in_none(two: Cluster, folder: Path) -> None:
    whole = config_of(two)
    with gateway(folder, whole, "--processes", "2", name="reloaded") as served:
        eventually(served.is_ready, "it is ready")
        first = _version(served)
        assert _versions(served) == {first}
        changed = copy.deepcopy(whole)
        changed["pools"]["a"]["workers"].pop()
        path = folder / "changed.json"
        path.write_text(json.dumps(changed))
        ended = run_here(
            "reload", "--insecure", "--target", served.admin_address, "--config", str(path)
        )
        assert (ended.returncode, ended.stderr) == (0, "")
        second = _version(served)
        assert second != first
        assert _versions(served) == {second}
        assert len(served.workers()) == 1
        path.write_text(json.dumps({"mode": "agg"}))
        assert run_here(
            "reload", "--insecure", "--target", served.admin_address, "--config", str(path)
        ).returncode
        assert _versions(served) == {second}
        # One that starts from now on has what is in force, and not what the file says.
        for number in (0, 1) if is_long_run() else (0,):
            kill(served, number)
            is_whole_again(served)
            eventually(served.is_ready, "it is ready")
        assert _versions(served) == {second}
        ended = run_here("reload", "--insecure", "--target", served.admin_address, "--rollback")
        assert ended.returncode == 0
        assert _versions(served) == {first}
        (folder / "reloaded.json").write_text(json.dumps(changed))
        served.process.popen.send_signal(signal.SIGHUP)
        eventually(lambda: _version(served) == second, "the file was read again")
        assert _versions(served) == {second}
        reloads = served.metrics("slagate_reloads_total")
        assert reloads == {'{result="applied"}': 3, '{result="refused"}': 1}


def test_a_mode_of_admission_is_in_force_in_all_processes_and_in_those_that_start_later(
    two: Cluster, folder: Path
) -> None:
    def modes() -> set[tuple[str, str]]:
        """What is in force, and the file's, as each process says."""
        listed = [served.admin.ListPools(gw.ListPoolsRequest(), timeout=HANG_S)]
        for number in (0, 1):
            with grpc.insecure_channel(f"unix:{sockets}/{number}.admin") as channel:
                process = gw_grpc.GatewayStub(channel)
                listed.append(process.ListPools(gw.ListPoolsRequest(), timeout=HANG_S))
        return {(each.admission, each.file_admission) for each in listed}

    with gateway(folder, config_of(two), "--processes", "2", name="admission") as served:
        eventually(served.is_ready, "it is ready")
        sockets = _folder(pids(served)[0])
        request = gw.SetAdmissionRequest(mode="shadow")
        answer = served.admin.SetAdmission(request, timeout=HANG_S)
        assert (answer.previous_mode, answer.mode) == ("off", "shadow")
        assert modes() == {("shadow", "off")}
        kill(served, 0)
        is_whole_again(served)
        assert modes() == {("shadow", "off")}
        # The file is the same: what is in force is the file's again, and nothing else changes.
        answer = served.admin.Reload(gw.ReloadRequest(), timeout=HANG_S)
        assert list(answer.changes) == ["admission in force shadow -> off"]
        assert not answer.applied
        assert modes() == {("off", "off")}
        kill(served, 1)
        is_whole_again(served)
        assert modes() == {("off", "off")}


def _folder(pid: int) -> Path:
    """The folder of the gateway that a process is one of."""
    environment = Path(f"/proc/{pid}/environ").read_bytes().decode()
    place = json.loads(re.search(r"SLAGATE_PROCESS=([^\0]*)", environment)[1])  # type: ignore[index]
    return Path(place["folder"])


@pytest.mark.parametrize("options", [("--processes", "2"), ()] if is_long_run() else [()])
def test_a_second_server_on_the_port_is_an_error(
    two: Cluster, folder: Path, options: tuple[str, ...]
) -> None:
    path = folder / "second.json"
    path.write_text(json.dumps(config_of(two)))
    with gateway(folder, config_of(two), name="alone") as alone:
        taken = [
            ("--listen", two.gateway.address),
            ("--listen", alone.address),
            ("--admin", alone.admin_address),
            ("--http", alone.http_address),
        ]
        for option, address in taken:
            others = {
                "--listen": f"{LOOPBACK}:0",
                "--admin": f"{LOOPBACK}:0",
                "--http": f"{LOOPBACK}:0",
            }
            arguments = [word for pair in (others | {option: address}).items() for word in pair]
            plain = ["--insecure", "--worker-insecure"]
            ended = run_here("serve", "--config", str(path), *arguments, *plain, *options)
            assert (ended.returncode, ended.stdout) == (2, "")
            why = f"{option}: cannot listen on {address}: Address already in use"
            assert f"slagate: {why}\n" in ended.stderr


def test_it_drains_in_all_processes_and_logs_name_them(two: Cluster, folder: Path) -> None:
    with ExitStack() as stack:
        served = stack.enter_context(
            gateway(folder, config_of(two), "--processes", "2", name="drained")
        )
        eventually(served.is_ready, "it is ready")
        streams = Streams(served.address, 40, 25, stack)
        served.process.popen.send_signal(signal.SIGTERM)
        assert streams.join() == {grpc.StatusCode.OK: 40}
        assert served.process.popen.wait(HANG_S) == 0
        assert served.process.rest_of_stdout() == b""
        lines = [json.loads(line) for line in served.process.stderr().splitlines()]
        done = Counter(line["process_number"] for line in lines if line["event"] == "request.done")
        assert set(done) == {0, 1}
        assert sum(done.values()) == 40


def test_processes_end_with_their_parent(two: Cluster, folder: Path) -> None:
    path = folder / "orphans.json"
    path.write_text(json.dumps(config_of(two)))
    with starting("orphans", serve_arguments(path, "--processes", "2"), folder) as process:
        process.wait_ready()
        served = Gateway(process)
        with served.channel:
            children = pids(served)
        folder_of_all = _folder(children[0])
        assert folder_of_all.is_dir()
        process.kill()
        try:
            for pid in children.values():
                eventually(lambda pid=pid: not _is_running(pid), "a child ends")  # type: ignore[misc]
        finally:
            for pid in filter(_is_running, children.values()):
                os.kill(pid, signal.SIGKILL)
        assert not folder_of_all.exists()


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_a_bad_file_is_an_error_of_the_parent(folder: Path) -> None:
    path = folder / "bad.json"
    path.write_text('{"mode": "agg"}')
    ended = run_cli(*serve_arguments(path, "--processes", "2"))
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr
