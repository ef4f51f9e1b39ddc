"""The long-running commands: one ready line with real addresses, a clean end, clear refusals."""

import json
import signal
import socket
from pathlib import Path
from typing import Any

import grpc
import pytest

from support.engine.tokens import expected, prompt
from support.gateway.foreign_client import Client, prefill_leg, read, read_tokens, request
from support.gateway.processes import (
    LOOPBACK,
    MODEL,
    Cluster,
    eventually,
    fleet_config,
    gateway,
    run_cli,
    run_here,
    running,
    serve_arguments,
    worker_arguments,
)
from support.limits import HANG_S

EXIT_USAGE = 2


def assert_reachable(address: str) -> None:
    host, _, port = address.rpartition(":")
    assert int(port) > 0
    socket.create_connection((host, int(port)), timeout=HANG_S).close()


def config_file(folder: Path, config: Any) -> Path:
    path = folder / "fleet.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    return path


@pytest.mark.parametrize("role", ["prefill", "decode", "agg"])
def test_a_worker_says_where_it_is_and_ends_cleanly(tmp_path: Path, role: str) -> None:
    with running("worker", worker_arguments(role), tmp_path) as worker:
        assert worker.ready["event"] == "ready"
        assert worker.ready["role"] == role
        assert worker.ready["model"] == MODEL
        assert worker.ready["pid"] == worker.popen.pid
        assert worker.ready["kv_transport"] == ("none" if role == "agg" else "NIXL")
        assert_reachable(worker.address)
        assert worker.terminate() == 0
        assert worker.rest_of_stdout() == b""
        assert "Traceback" not in worker.stderr()


def test_a_gateway_says_where_it_is_and_ends_cleanly(tmp_path: Path) -> None:
    config = fleet_config({"a": ("agg", [f"{LOOPBACK}:9"])})
    with gateway(tmp_path, config) as served:
        process = served.process
        assert process.ready["event"] == "ready"
        addresses = [served.address, served.admin_address, served.http_address]
        assert len(set(addresses)) == 3
        for address in addresses:
            assert_reachable(address)
        assert process.terminate() == 0
        assert process.rest_of_stdout() == b""
        assert "Traceback" not in process.stderr()


def test_sigterm_lets_running_requests_finish(tmp_path: Path) -> None:
    """The gateway takes no new request, and ends when the last one has."""
    with (
        running("a", worker_arguments("agg"), tmp_path) as worker,
        gateway(tmp_path, fleet_config({"a": ("agg", [worker.address])})) as served,
        Client(served.address) as client,
    ):
        eventually(served.is_ready, "the gateway is ready")
        call = client.start(request(prompt(50), 150))
        tokens = read_tokens(call, 1)
        served.process.popen.terminate()
        answer = read(call)
        assert tokens + answer.tokens == expected(prompt(50), 150)
        assert answer.reason == "FINISH_REASON_LENGTH"
        assert served.process.popen.wait(HANG_S) == 0
        assert "Traceback" not in served.process.stderr()


def test_a_worker_does_not_share_a_port(agg: Cluster) -> None:
    taken = agg.addresses("a")[0]
    ended = run_cli(*worker_arguments("agg", listen=taken))
    assert_refused(ended, naming=f"--listen: cannot listen on {taken}: Address already in use")


@pytest.mark.parametrize("listener", ["listen", "admin", "http"])
def test_a_gateway_does_not_share_a_port(agg: Cluster, tmp_path: Path, listener: str) -> None:
    served = agg.gateway
    addresses = {
        "listen": served.address,
        "admin": served.admin_address,
        "http": served.http_address,
    }
    taken = addresses[listener]
    config = config_file(tmp_path, fleet_config({"a": ("agg", agg.addresses("a"))}))
    # Of an option given twice the last one counts.
    ended = run_here(*serve_arguments(config, f"--{listener}", taken))
    told = f"--{listener}: cannot listen on {taken}: Address already in use"
    assert_refused(ended, naming=told)
    assert served.is_ready()


def assert_refused(ended: Any, *, naming: str) -> None:
    assert ended.returncode == EXIT_USAGE, ended.stderr
    assert naming in ended.stderr
    assert "Traceback" not in ended.stderr
    assert ended.stdout == ""


@pytest.mark.parametrize(
    ("options", "naming"),
    [
        (("--kv-block-size", "64"), "No such option: --kv-block-size"),
        (("--profile", "no-such-profile"), "no-such-profile"),
        (("--tp", "3"), "no tensor-parallel size 3; available: 1, 2, 4"),
        (("--role", "both"), "'both'"),
        (("--listen", "nowhere"), "nowhere"),
        (("--listen", "127.0.0.1:99999"), "99999"),
        (("--log-level", "loud"), "'loud'"),
        (("--kv-block-bytes", "17"), "kv_block_bytes"),
        (("--handoff-timeout", "inf"), "--handoff-timeout"),
        (("--kv-transfer-timeout", "nan"), "--kv-transfer-timeout"),
        (("--drain", "inf"), "--drain"),
        (("--time-scale", "inf"), "--time-scale"),
        (("--kv-blocks", "99999999999"), "--kv-blocks"),
        (("--max-batch-size", "99999999999999999999"), "--max-batch-size"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else value,
)
def test_a_wrong_option_of_a_worker_is_refused_by_name(
    options: tuple[str, ...], naming: str
) -> None:
    assert_refused(run_here(*worker_arguments("agg"), *options), naming=naming)


def _config(**changes: Any) -> dict[str, Any]:
    return fleet_config({"a": ("agg", [f"{LOOPBACK}:9"])}) | changes


def _strategy(**changes: Any) -> dict[str, Any]:
    whole = _config()
    whole["agg_pool_selection_strategy"] |= changes
    return whole


@pytest.mark.parametrize(
    ("config", "naming"),
    [
        ("{", "JSON"),
        (_config(modus="agg"), "modus"),
        (_strategy(ttft_resoluton=4), "agg_pool_selection_strategy.ttft_resoluton"),
        (_strategy(agg_pool_mapping=[[0, 0], [0, 1]]), "agg_pool_mapping[1][1]"),
        (_config(pools={"a": {"workers": ["here"]}}), "pools.a.workers[0]"),
        (_config(pools={"a": {"workers": []}}), "pools.a.workers"),
        (
            _config(pools={"a": {"workers": ["here:1"], "profile": "llama-3.1-8b-h100", "tp": 3}}),
            "no tensor-parallel size 3",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_fleet_file_is_refused_by_path(tmp_path: Path, config: Any, naming: str) -> None:
    """CFG-06, CFG-10: at the start, not at the first request."""
    ended = run_here(*serve_arguments(config_file(tmp_path, config)))
    assert_refused(ended, naming=naming)


def test_a_missing_fleet_file_is_refused_by_name(tmp_path: Path) -> None:
    ended = run_cli(*serve_arguments(tmp_path / "nowhere.json"))
    assert_refused(ended, naming="nowhere.json")


def test_a_kv_event_subscriber_does_not_hold_up_the_end(tmp_path: Path) -> None:
    """Its stream has no end of its own, so a graceful stop must end it, in words."""
    arguments = worker_arguments("agg", "--drain", "600")
    with running("worker", arguments, tmp_path) as worker, Client(worker.address) as client:
        stream = client.subscribe(include_snapshot=True)
        first = next(stream)
        assert first.batch.events[0].WhichOneof("event") == "all_blocks_cleared"
        assert worker.terminate() == 0
        with pytest.raises(grpc.RpcError):
            list(stream)
        assert stream.code() is grpc.StatusCode.UNAVAILABLE
        assert "shutting down" in stream.details()


def test_ops_02_a_parked_handoff_can_be_freed_while_its_worker_drains(tmp_path: Path) -> None:
    """OPS-02: the worker stays reachable for who holds its handoff, and ends once it is let go."""
    arguments = worker_arguments("prefill", "--drain", "600")
    with running("worker", arguments, tmp_path) as worker, Client(worker.address) as client:
        parked = client.generate(prefill_leg(request(prompt(50), 5)))
        worker.popen.send_signal(signal.SIGTERM)

        def refuses() -> bool:
            again = client.generate(prefill_leg(request(prompt(50), 5, request_id="again")))
            if again.session is not None:
                client.control("Abort", kv_session=again.session)
            return again.code is grpc.StatusCode.UNAVAILABLE

        eventually(refuses, "new requests are refused")
        assert worker.popen.poll() is None
        assert client.load().active_kv_sessions >= 1
        client.control("Abort", kv_session=parked.session)
        eventually(lambda: worker.popen.poll() is not None, "the worker ends")
        assert worker.popen.returncode == 0
