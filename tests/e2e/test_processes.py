"""`slagate serve --processes 2`: real processes on one port, that are one gateway to all who ask."""

import copy
import itertools
import json
import os
import re
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from slagate.proto import gateway_pb2 as gw
from slagate.proto import openengine_pb2 as oe
from support.engine.tokens import expected
from support.gateway.foreign_client import Client, read, request
from support.gateway.processes import (
    LOOPBACK,
    Cluster,
    Gateway,
    Pool,
    cluster,
    eventually,
    fleet_config,
    gateway,
    run_cli,
    run_here,
    serve_arguments,
    starting,
)

N_CLIENTS = 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("processes")


@pytest.fixture(scope="module")
def two(folder: Path) -> Iterator[Cluster]:
    """Two aggregated workers behind two processes."""
    # Slow ones: what streams for seconds, while processes are killed and end, takes few tokens.
    slow = ("--time-scale", "4")
    with cluster(folder, {"a": Pool("agg", 2, slow)}, "--processes", "2") as running:
        yield running


def config_of(of: Cluster) -> dict[str, Any]:
    return fleet_config({"a": ("agg", of.addresses("a"))})


def ready_lines(of: Gateway) -> list[dict[str, Any]]:
    """What the log says so far of processes that serve: lines come late, several at once."""
    whole, _, _ = of.process.stderr().rpartition("\n")
    return [json.loads(line) for line in whole.splitlines() if '"process.ready"' in line]


def pids(of: Gateway) -> dict[int, int]:
    """The newest process of each number."""
    found: dict[int, int] = {}

    def is_told() -> bool:
        found.update({each["process_number"]: each["pid"] for each in ready_lines(of)})
        return len(found) == n_running(of)

    eventually(is_told, "the log says which processes there are")
    return found


def n_running(of: Gateway) -> int:
    return int(of.metrics("slagate_processes")[""])


class Streams:
    """Calls that have their first token, spread over connections, and so over processes."""

    def __init__(self, address: str, n_calls: int, n_tokens: int, stack: ExitStack) -> None:
        clients = [stack.enter_context(Client(address)) for _ in range(N_CLIENTS)]
        self.n_tokens = n_tokens
        self.prompts = [[600 * at + n for n in range(200)] for at in range(n_calls)]
        self.calls = [
            clients[at % N_CLIENTS].start(request(tokens, n_tokens, request_id=f"s{at}"))
            for at, tokens in enumerate(self.prompts)
        ]
        self.firsts = [next(call) for call in self.calls]
        self.ended: dict[int, Any] = {}
        self._threads = [threading.Thread(target=self._read, args=(at,)) for at in range(n_calls)]
        for thread in self._threads:
            thread.start()

    def _read(self, at: int) -> None:
        self.ended[at] = read(self.calls[at])

    def join(self) -> "Counter[grpc.StatusCode]":
        """Read all to their ends; how many ended how."""
        for thread in self._threads:
            thread.join(60)
        for at, answer in self.ended.items():
            first = [token.token_id for token in self.firsts[at].token.tokens]
            tokens = first + answer.tokens
            assert tokens == expected(self.prompts[at], len(tokens))
            assert len(tokens) == self.n_tokens or answer.code is not grpc.StatusCode.OK
        return Counter(answer.code for answer in self.ended.values())


def test_two_hundred_requests_split_evenly_and_a_killed_process_ends_only_its_own(
    two: Cluster,
) -> None:
    served = two.gateway
    before = served.outcomes("completed")
    lost_before = served.metrics("slagate_process_lost_requests_total")[""]
    requests_before = served.pools()[0].requests_total
    with ExitStack() as stack:
        streams = Streams(served.address, 200, 150, stack)
        loads = [worker.inflight for worker in served.workers()]
        assert sum(loads) == served.pools()[0].inflight == 200
        assert min(loads) >= 80, "no worse than 60 to 40"
        assert sum(served.metrics("slagate_worker_inflight").values()) == 200
        os.kill(pids(served)[0], signal.SIGKILL)
        eventually(lambda: n_running(served) == 1, "the other one is alone")
        n_left = served.pools()[0].inflight
        assert 0 < n_left < 200, "both had some"
        assert sum(worker.inflight for worker in served.workers()) <= n_left
        assert sum(served.metrics("slagate_worker_inflight").values()) <= n_left
        seen = served.admin.Explain(gw.ExplainRequest(request=_explained(range(50))))
        assert sum(each.inflight for each in seen.stages[0].candidates) <= n_left
        statuses = streams.join()
        lost = [streams.ended[at] for at in streams.ended if streams.ended[at].failed]
        # A connection is of one process, so all or none of its streams have ended.
        dead = Counter(at % N_CLIENTS for at in streams.ended if streams.ended[at].failed)
        assert set(dead.values()) == {10}
        assert {answer.code for answer in lost} == {grpc.StatusCode.UNAVAILABLE}
        assert statuses == {grpc.StatusCode.OK: n_left, grpc.StatusCode.UNAVAILABLE: 200 - n_left}
    eventually(lambda: n_running(served) == 2, "it is back", limit_s=60.0)
    eventually(served.is_idle, "nothing is left of it")
    assert served.is_ready()
    assert served.outcomes("completed") == before + n_left
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
    restarts = served.metrics("slagate_process_restarts_total")[""]
    os.kill(pids(served)[1], signal.SIGKILL)
    eventually(
        lambda: served.metrics("slagate_process_restarts_total")[""] > restarts, "it has ended"
    )
    assert {name: served.metrics(name) for name in names} == before
    eventually(lambda: n_running(served) == 2, "it is back", limit_s=60.0)
    assert {name: served.metrics(name) for name in names} == before
    assert set(pids(served)) == {0, 1}


def page(of: Gateway) -> dict[str, Metric]:
    """/metrics, every family once and as a scraper reads it."""
    text = of.http("/metrics")[1]
    about = [line.split()[1:3] for line in text.splitlines() if line.startswith("#")]
    assert [each for each, n in Counter(map(tuple, about)).items() if n > 1] == []
    families = list(text_string_to_metric_families(text))
    names = Counter(family.name for family in families)
    assert set(names.values()) == {1}, names
    assert {family.type for family in families} == {"counter", "gauge", "histogram"}
    assert not [name for name in names if name.endswith("_created")]
    return {family.name: family for family in families}


def counted(families: dict[str, Metric]) -> dict[tuple[object, ...], float]:
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in families.values()
        if family.type != "gauge"
        for sample in family.samples
    }


def test_no_counter_of_the_gateway_goes_back_when_a_process_is_started_again(two: Cluster) -> None:
    served = two.gateway

    def ask() -> None:
        with ExitStack() as stack:
            clients = [stack.enter_context(Client(served.address)) for _ in range(8)]
            for client in clients:
                assert not client.generate(request(range(50), 4)).failed
            (open_now,) = served.metrics("slagate_client_connections").values()
            assert open_now >= 8

    pages = [page(served)]
    for number in (0, 1):
        ask()
        pages.append(page(served))
        os.kill(pids(served)[number], signal.SIGKILL)
        eventually(lambda: n_running(served) == 1, "it has ended")
        pages.append(page(served))
        eventually(lambda: n_running(served) == 2, "it is back", limit_s=60.0)
        pages.append(page(served))
    ask()
    pages.append(page(served))
    for earlier, later in itertools.pairwise(map(counted, pages)):
        gone_back = {
            key: (was, later.get(key)) for key, was in earlier.items() if later.get(key, -1) < was
        }
        assert gone_back == {}
    first, last = counted(pages[0]), counted(pages[-1])
    for name in ("slagate_client_connections_accepted_total", "slagate_output_tokens_total"):
        assert last[name,] >= first[name,] + 24
    assert set(pages[0]) <= set(pages[-1])


def test_control_answers_for_all_processes(two: Cluster) -> None:
    with ExitStack() as stack:
        clients = [stack.enter_context(Client(two.gateway.address)) for _ in range(8)]
        infos = [client.control("GetServerInfo") for client in clients]
        assert len({info.instance_id for info in infos}) == 1
        calls = [client.start(request(range(50), 500)) for client in clients]
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
        gw.WatchReceiptsRequest(follow=True, limit=0), timeout=30
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
            gw.WatchReceiptsRequest(limit=n_requests), timeout=30
        )
        if each.HasField("receipt")
    ]
    assert [each.decision.request_id for each in kept] == [
        f"receipt-{at}" for at in range(n_requests)
    ]
    assert len({each.number for each in kept}) == n_requests
    assert {each.number % 2 for each in kept} == {0, 1}, "each process had some"
    cells = served.admin.ListCells(gw.ListCellsRequest(), timeout=10)
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
    return str(of.admin.ListPools(gw.ListPoolsRequest(), timeout=10).config_version)


def _versions(of: Gateway) -> set[str]:
    """What receipts of requests of many connections say that is in force."""
    found = set()
    for _ in range(12):
        with Client(of.address) as client:
            answer = client.generate(request(range(50), 2))
            assert not answer.failed
    for each in of.admin.WatchReceipts(gw.WatchReceiptsRequest(limit=12), timeout=30):
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
        for number in (0, 1):
            os.kill(pids(served)[number], signal.SIGKILL)
            eventually(lambda: n_running(served) == 1, "it has ended")
            eventually(lambda: n_running(served) == 2, "it is back", limit_s=60.0)
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


@pytest.mark.parametrize("options", [(), ("--processes", "2")], ids=["one", "two"])
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
        assert served.process.popen.wait(30) == 0
        assert served.process.rest_of_stdout() == b""
        lines = [json.loads(line) for line in served.process.stderr().splitlines()]
        done = Counter(line["process_number"] for line in lines if line["event"] == "request.done")
        assert set(done) == {0, 1}
        assert sum(done.values()) == 40


def test_what_does_not_end_in_time_gets_a_status(two: Cluster, folder: Path) -> None:
    with ExitStack() as stack:
        served = stack.enter_context(
            gateway(folder, config_of(two), "--processes", "2", "--drain", "0.2", name="cut")
        )
        eventually(served.is_ready, "it is ready")
        streams = Streams(served.address, 20, 1250, stack)
        assert served.process.terminate() == 0
        assert streams.join() == {grpc.StatusCode.UNAVAILABLE: 20}


def test_processes_end_with_their_parent(two: Cluster, folder: Path) -> None:
    path = folder / "orphans.json"
    path.write_text(json.dumps(config_of(two)))
    with starting("orphans", serve_arguments(path, "--processes", "2"), folder) as process:
        process.wait_ready()
        served = Gateway(process)
        with served.channel:
            children = pids(served)
        environment = Path(f"/proc/{children[0]}/environ").read_bytes().decode()
        place = json.loads(re.search(r"SLAGATE_PROCESS=([^\0]*)", environment)[1])  # type: ignore[index]
        assert Path(place["folder"]).is_dir()
        process.kill()
        try:
            for pid in children.values():
                eventually(lambda pid=pid: not _is_running(pid), "a child ends")  # type: ignore[misc]
        finally:
            for pid in filter(_is_running, children.values()):
                os.kill(pid, signal.SIGKILL)
        assert not Path(place["folder"]).exists()


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
