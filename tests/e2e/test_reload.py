"""Hot reload of a real gateway: by command, by signal, by a file that changes, and under load."""

import copy
import json
import os
import random
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import grpc
import pytest

from slagate.proto import gateway_pb2 as gw
from support.engine.tokens import prompt
from support.gateway.foreign_client import Client, endless, read, request
from support.gateway.processes import (
    Cluster,
    Gateway,
    Pool,
    Process,
    cluster,
    eventually,
    fleet_config,
    gateway,
    run_cli,
    run_here,
    serve_arguments,
    starting,
)
from support.gateway.reloads import Run, reload_between_requests
from support.limits import HANG_S
from support.seeds import is_long_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reload")


@pytest.fixture(scope="module")
def fleet(folder: Path) -> Iterator[Cluster]:
    """Two prefill and two decode workers, which may drain for as long as they like."""
    pools = {"p": Pool("prefill", 2), "d": Pool("decode", 2)}
    with cluster(folder, pools, "--worker-drain", str(HANG_S)) as running:
        yield running


def whole(fleet: Cluster) -> dict[str, Any]:
    """The file with every worker."""
    return fleet_config(
        {name: (role, fleet.addresses(name)) for name, role in (("p", "prefill"), ("d", "decode"))}
    )


def without(file: dict[str, Any], *addresses: str) -> dict[str, Any]:
    made = copy.deepcopy(file)
    for spec in made["pools"].values():
        spec["workers"] = [each for each in spec["workers"] if each not in addresses]
    return made


class Served:
    """A gateway with a file of its own, and `slagate reload` for it."""

    def __init__(self, running: Gateway, path: Path) -> None:
        self.running = running
        self.path = path

    def write(self, file: dict[str, Any]) -> None:
        """As an editor does, that never leaves half a file."""
        beside = self.path.with_suffix(".new")
        beside.write_text(json.dumps(file))
        beside.rename(self.path)

    def reload(self, *options: str) -> tuple[int, str, str]:
        ended = run_here("reload", "--insecure", "--target", self.running.admin_address, *options)
        assert "Traceback" not in ended.stderr
        return ended.returncode, ended.stdout, ended.stderr

    def version(self) -> str:
        listed = self.running.admin.ListPools(gw.ListPoolsRequest(), timeout=HANG_S)
        return str(listed.config_version)

    def workers(self) -> set[str]:
        return {each.worker for each in self.running.workers()}


@pytest.fixture
def served(fleet: Cluster, folder: Path) -> Iterator[Served]:
    """The gateway of the fleet, with the whole file again and every worker ready when a test is over."""
    shared = Served(fleet.gateway, folder / "gateway.json")
    yield shared
    shared.write(whole(fleet))
    assert shared.reload()[0] == 0
    listed = {*fleet.addresses("p"), *fleet.addresses("d")}

    def is_whole() -> bool:
        ready = {each.worker for each in shared.running.workers() if each.state == "ready"}
        return ready == listed

    eventually(is_whole, "every worker is ready")


@pytest.fixture
def fresh(fleet: Cluster, tmp_path: Path) -> Iterator[Served]:
    """A gateway of its own, that was never reloaded, and gives workers a second to drain."""
    with gateway(tmp_path, whole(fleet), "--worker-drain", "1") as running:
        eventually(running.is_ready, "a worker of each stage is ready")
        yield Served(running, tmp_path / "gateway.json")


def test_the_command_takes_over_a_changed_file_and_goes_back(
    fleet: Cluster, fresh: Served, tmp_path: Path
) -> None:
    served = fresh
    first, gone = served.version(), fleet.addresses("d")[1]
    assert served.reload() == (0, f"{first} is in force already, nothing changes\n", "")
    served.write(without(whole(fleet), gone))
    status, said, _ = served.reload("--dry-run")
    assert (status, served.version(), gone in served.workers()) == (0, first, True)
    assert said.startswith(f"would go from {first} to ")
    assert said.endswith(f"\n  pool d: - {gone}\n")
    status, said, complaints = served.reload()
    second = served.version()
    assert (status, complaints) == (0, "")
    assert said == f"went from {first} to {second}\n  pool d: - {gone}\n"
    assert gone not in served.workers()
    other = tmp_path / "other.json"
    file = whole(fleet)
    file["prefill_pool_selection_strategy"]["ttft_max_ms"] = 1000
    other.write_text(json.dumps(file))
    status, said, _ = served.reload("--config", str(other), "--json")
    answer = json.loads(said)
    assert (status, answer["applied"], answer["previous_version"]) == (0, True, second)
    assert answer["version"] == served.version() != second
    assert answer["changes"] == [
        "prefill axis ttft_ms 100 to 900 in 2 bands -> 100 to 1000 in 2 bands",
        f"pool d: + {gone}",
    ]
    assert served.reload("--rollback")[1].startswith(f"went from {answer['version']} to {second}\n")
    assert served.reload("--rollback", "--dry-run")[1].startswith(f"would go from {second} to ")
    assert served.reload("--rollback")[0] == 0
    assert served.version() == first
    status, _, complaints = served.reload("--rollback")
    assert (status, "FAILED_PRECONDITION" in complaints) == (1, True)
    assert served.reload("--rollback", "--config", str(other))[0] == 2
    reloads = served.running.metrics("slagate_reloads_total")
    assert reloads == {'{result="applied"}': 4, '{result="refused"}': 0}


def test_an_operator_switches_admission_until_the_next_reload(
    fleet: Cluster, fresh: Served
) -> None:
    def admission(*options: str) -> tuple[int, str, str]:
        address = fresh.running.admin_address
        ended = run_here("admission", *options, "--insecure", "--target", address)
        return ended.returncode, ended.stdout, ended.stderr

    assert admission() == (0, "off\n", "")
    assert admission("shadow") == (0, "went from off to shadow\n", "")
    assert admission("shadow") == (0, "shadow is in force already\n", "")
    assert admission() == (0, "shadow (the fleet file says off)\n", "")
    status, said, _ = admission("--json")
    assert (status, json.loads(said)) == (0, {"mode": "shadow", "file_mode": "off"})
    status, said, _ = admission("on", "--json")
    assert (status, json.loads(said)) == (0, {"mode": "on", "previous_mode": "shadow"})
    assert admission("sometimes")[0] == 2
    version = fresh.version()
    again = f"{version} is in force already\n  admission in force on -> off\n"
    assert fresh.reload("--dry-run") == (0, again, "")
    assert admission()[1].startswith("on ")
    assert fresh.reload() == (0, again, "")
    assert admission() == (0, "off\n", "")
    fresh.write(whole(fleet) | {"scheduling": {"admission": "shadow"}})
    assert fresh.reload()[1].endswith("\n  scheduling: admission off -> shadow\n")
    assert admission() == (0, "shadow\n", "")
    with pytest.raises(grpc.RpcError) as refused:
        fresh.running.admin.SetAdmission(gw.SetAdmissionRequest(mode="auto"), timeout=HANG_S)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "mode: must be one of off, shadow, on" in refused.value.details()


def test_a_bad_file_changes_nothing_and_every_problem_is_told(
    fleet: Cluster, served: Served, tmp_path: Path
) -> None:
    version, workers = served.version(), served.workers()
    applied = served.running.metrics("slagate_reloads_total")['{result="applied"}']
    bad = without(whole(fleet), *fleet.addresses("d"))
    bad["prefill_pool_selection_strategy"] |= {"isl_min": 5, "isl_max": 5}
    bad["decode_pool_selection_strategy"]["decode_pool_mapping"] = [[0, 1], [0, 0]]
    served.write(bad)
    status, said, complaints = served.reload()
    assert (status, said) == (2, "")
    first, *lines = complaints.splitlines()
    assert first == f"slagate: refused, {len(lines)} problems; {version} stays in force"
    for place in (
        "prefill_pool_selection_strategy.isl_",
        "decode_pool_selection_strategy.decode_pool_mapping[0][1]",
        "pools.d.workers",
    ):
        assert any(line.startswith(f"  {place}") for line in lines), (place, lines)
    # The same file is refused in the same words where it is sent.
    assert served.reload("--config", str(served.path)) == (status, said, complaints)
    served.path.write_text("{")
    assert served.reload()[0] == 2
    served.path.unlink()
    status, _, complaints = served.reload()
    assert (status, "cannot be read" in complaints) == (2, True)
    latin = tmp_path / "latin.json"
    latin.write_bytes(b'{"mode": "\xe9"}')
    assert served.reload("--config", str(latin))[0] == 2
    assert served.reload("--config", str(tmp_path / "nowhere.json"))[0] == 2
    assert (served.version(), served.workers()) == (version, workers)
    assert served.running.metrics("slagate_reloads_total")['{result="applied"}'] == applied
    assert run_cli("reload", "--insecure", "--target", "127.0.0.1:9").returncode == 1


def test_a_hang_up_reloads_and_a_bad_file_is_logged_and_changes_nothing(
    fleet: Cluster, served: Served
) -> None:
    process, gone = served.running.process, fleet.addresses("p")[0]
    n_before = process.stderr_size()
    served.write(without(whole(fleet), gone))
    os.kill(process.popen.pid, signal.SIGHUP)
    eventually(lambda: gone not in served.workers(), "the worker has left")
    version = served.version()
    served.write({"mode": "agg"})
    os.kill(process.popen.pid, signal.SIGHUP)
    eventually(lambda: "config.refused" in process.stderr(n_before), "the refusal is logged")
    logged = [json.loads(line) for line in process.stderr(n_before).splitlines() if line[:1] == "{"]
    (refused,) = (each for each in logged if each["event"] == "config.refused")
    assert any("agg_pool_selection_strategy" in each for each in refused["problems"])
    assert served.version() == version
    served.write(whole(fleet))
    os.kill(process.popen.pid, signal.SIGHUP)
    eventually(lambda: gone in served.workers(), "it is back")


def survives_hang_ups(process: Process) -> bool:
    """Whether the process ignores SIGHUP, or has a handler for it."""
    status = Path(f"/proc/{process.popen.pid}/status").read_text()
    masks = [line.split()[1] for line in status.splitlines() if line[:6] in ("SigIgn", "SigCgt")]
    return any(int(mask, 16) >> (signal.SIGHUP - 1) & 1 for mask in masks)


def test_a_hang_up_ends_no_gateway_that_starts_or_that_ends(fleet: Cluster, tmp_path: Path) -> None:
    path = tmp_path / "fleet.json"
    path.write_text(json.dumps(whole(fleet)))
    with starting("hung-up", serve_arguments(path), tmp_path) as process:

        def hangs_up_until_it_ends() -> bool:
            process.popen.send_signal(signal.SIGHUP)
            return process.popen.poll() is not None

        eventually(lambda: survives_hang_ups(process), "it has begun")
        process.popen.send_signal(signal.SIGHUP)
        process.wait_ready()
        process.popen.send_signal(signal.SIGTERM)
        eventually(hangs_up_until_it_ends, "it has ended")
        assert process.popen.returncode == 0
        assert "config.bug" not in process.stderr()


def test_a_file_that_cannot_be_read_for_ever_keeps_no_gateway_from_its_end(
    fleet: Cluster, tmp_path: Path
) -> None:
    """As on a mount that is dead: here a pipe that nobody writes to."""
    with gateway(tmp_path, whole(fleet)) as running:
        path = tmp_path / "gateway.json"
        path.unlink()
        os.mkfifo(path)
        writers: list[int] = []

        def is_read() -> bool:
            with suppress(OSError):
                writers.append(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
            return bool(writers)

        os.kill(running.process.popen.pid, signal.SIGHUP)
        eventually(is_read, "the gateway reads it")
        try:
            assert running.process.terminate() == 0
        finally:
            os.close(writers[0])


def test_a_watched_file_is_taken_over_by_itself(fleet: Cluster, tmp_path: Path) -> None:
    with gateway(tmp_path, whole(fleet), "--watch") as running:
        served, gone = Served(running, tmp_path / "gateway.json"), fleet.addresses("d")[0]
        served.write({})
        refused = {'{result="applied"}': 0, '{result="refused"}': 1}
        eventually(lambda: running.metrics("slagate_reloads_total") == refused, "it was refused")
        served.write(without(whole(fleet), gone))
        eventually(lambda: gone not in served.workers(), "the worker has left")
        # What is in force stays until the file is written again.
        assert served.reload("--rollback")[0] == 0
        assert gone in served.workers()


def decoder(served: Served) -> str:
    (busy,) = (w.worker for w in served.running.workers() if w.inflight)
    return busy


def test_ops_01_a_worker_that_drains_ends_what_it_has_and_is_gone(
    fleet: Cluster, served: Served
) -> None:
    n_tokens = 200
    cut = served.running.metrics("slagate_drains_cut_total")
    with Client(served.running.address) as client:
        call = client.start(request(prompt(100, seed=3), n_tokens, request_id="long"))
        next(call)
        busy = decoder(served)
        served.write(without(whole(fleet), busy))
        os.kill(served.running.process.popen.pid, signal.SIGHUP)

        def states() -> dict[str, str]:
            return {each.worker: each.state for each in served.running.workers()}

        eventually(lambda: states().get(busy) != "ready", "it drains, or has left")
        answers = [read(client.start(request(prompt(9, seed=n), 2))) for n in range(5)]
        assert not any(answer.failed for answer in answers)
        answer = read(call)
        assert not answer.failed
        assert len(answer.tokens) >= n_tokens - 2
        eventually(lambda: busy not in states(), "it is gone")
        assert served.running.metrics("slagate_drains_cut_total") == cut


def test_ops_01_a_worker_that_drains_is_shown_while_it_has_work(
    fleet: Cluster, served: Served
) -> None:
    with Client(served.running.address) as client:
        call = client.start(endless(prompt(100, seed=5), request_id="longest"))
        next(call)
        busy = decoder(served)
        served.write(without(whole(fleet), busy))
        assert served.reload()[0] == 0
        state = {each.worker: each for each in served.running.workers()}[busy]
        assert (state.state, state.inflight) == ("draining", 1)
        (pool,) = (each for each in served.running.pools() if each.name == "d")
        assert (pool.workers, pool.workers_draining) == (1, 1)
        next(call)
        call.cancel()
        eventually(lambda: busy not in served.workers(), "it is gone")


def test_ops_01_a_worker_that_drains_for_too_long_is_cut(fleet: Cluster, fresh: Served) -> None:
    served = fresh
    with Client(served.running.address) as client:
        call = client.start(endless(prompt(100, seed=4), request_id="longer"))
        next(call)
        busy = decoder(served)
        served.write(without(whole(fleet), busy))
        assert served.reload()[0] == 0
        answer = read(call)
        assert answer.code is grpc.StatusCode.UNAVAILABLE
        assert "removed from the configuration" in answer.details
        eventually(lambda: busy not in served.workers(), "it is gone")
        assert served.running.metrics("slagate_drains_cut_total") == {"": 1}


def test_reloads_under_load_cost_no_request(fleet: Cluster) -> None:
    """Of other workers, limits, targets and names of pools."""
    rng = random.Random(6)
    file, running = whole(fleet), fleet.gateway
    n_before, n_reloads = running.outcomes("completed"), 20 if is_long_run() else 5

    async def go_on() -> Run:
        return await reload_between_requests(
            fleet, file, n_requests=40, n_reloads=n_reloads, rng=rng
        )

    run = anyio.run(go_on)
    assert (run.failed, run.wrong) == ([], [])
    assert run.n_reloads == n_reloads
    assert run.named <= run.versions
    assert len(run.named) >= n_reloads
    listed = {*fleet.addresses("p"), *fleet.addresses("d")}
    eventually(lambda: {w.worker for w in running.workers()} == listed, "who was removed is gone")
    eventually(running.is_idle, "no lease is held")
    assert running.outcomes("completed") == n_before + len(run.served)
    assert len(running.metrics("slagate_worker_inflight")) == len(listed)
