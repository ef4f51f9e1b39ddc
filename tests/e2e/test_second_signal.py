"""The second SIGTERM, and the second Ctrl-C: what drains is ended at once, by the signal."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from support.engine.tokens import prompt
from support.gateway.foreign_client import Client, read, request
from support.gateway.processes import (
    Gateway,
    Process,
    eventually,
    fleet_config,
    gateway,
    running,
    worker_arguments,
)
from support.limits import HANG_S

NEVER = ("--drain", "600")
SLOW = ("--time-scale", "100")
"""A stream of these workers outlasts every test."""

SIGNALS = [signal.SIGTERM, signal.SIGINT]


@contextmanager
def streaming(address: str) -> Iterator[Any]:
    """A call that has had a token, and will not end for minutes."""
    with Client(address) as client:
        call = client.start(request(prompt(20), 1000), timeout_s=600)
        next(call)
        yield call


def end_twice(process: Process, number: signal.Signals, *, drains: Callable[[], object]) -> int:
    """The exit status after two signals, the second once the first has come."""
    process.popen.send_signal(number)
    eventually(drains, "it drains")
    assert process.popen.poll() is None
    process.popen.send_signal(number)
    return process.popen.wait(HANG_S)


@contextmanager
def serving(folder: Path, *options: str) -> Iterator[Gateway]:
    """A gateway over a slow worker, with a stream that runs."""
    with running("worker", worker_arguments("agg", *SLOW), folder) as worker:
        config = fleet_config({"a": ("agg", [worker.address])})
        with gateway(folder, config, *NEVER, *options) as served:
            eventually(served.is_ready, "the gateway is ready")
            with streaming(served.address) as call:
                yield served
                assert read(call).code is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("number", SIGNALS)
def test_a_gateway(tmp_path: Path, number: signal.Signals) -> None:
    with serving(tmp_path) as served:
        status = end_twice(served.process, number, drains=lambda: not served.is_ready())
        assert status == -number


def test_a_gateway_of_processes_ends_with_all_of_them(tmp_path: Path) -> None:
    with serving(tmp_path, "--processes", "2") as served:
        status = end_twice(served.process, signal.SIGTERM, drains=lambda: not served.is_ready())
        assert status == 1, "they were killed"
        for pid in served.process.ready["process_pids"]:
            eventually(lambda pid=pid: not Path(f"/proc/{pid}").exists(), "a process has ended")  # type: ignore[misc]


@pytest.mark.parametrize("number", SIGNALS)
def test_a_worker(tmp_path: Path, number: signal.Signals) -> None:
    arguments = worker_arguments("agg", *SLOW, *NEVER)
    with (
        running("worker", arguments, tmp_path) as worker,
        streaming(worker.address),
        Client(worker.address) as client,
    ):

        def refuses() -> bool:
            answer = client.generate(request(prompt(20), 1, request_id="another"))
            return answer.code is grpc.StatusCode.UNAVAILABLE

        assert end_twice(worker, number, drains=refuses) == -number
