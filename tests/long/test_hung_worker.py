"""A worker that is there and says nothing: stopped, not dead."""

import signal
import threading
from collections.abc import Iterator

import grpc
import pytest

from support.engine.tokens import expected, prompt
from support.gateway.foreign_client import Answer, Client, request
from support.gateway.processes import Cluster, Pool, cluster, eventually


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """All ready and idle whenever a test of this module has ended."""
    pools = {"prefill": Pool("prefill", 2), "decode": Pool("decode", 2)}
    with cluster(tmp_path_factory.mktemp("hung"), pools) as running:
        yield running


@pytest.mark.parametrize("stage", ["prefill", "decode"])
def test_health_04_a_hung_worker_leaves_and_its_unanswered_requests_go_elsewhere(
    fleet: Cluster, stage: str
) -> None:
    with Client(fleet.gateway.address) as client:
        hung = fleet.workers[stage][0]
        hung.popen.send_signal(signal.SIGSTOP)
        try:
            answers: list[Answer] = []
            clients = [
                threading.Thread(
                    target=lambda i=i: answers.append(
                        client.generate(request(prompt(50, seed=i), 3, request_id=f"r{i}"))
                    )
                )
                for i in range(12)
            ]
            for each in clients:
                each.start()
            for each in clients:
                each.join()
            assert {answer.code for answer in answers} == {grpc.StatusCode.OK}
            assert sorted(answer.tokens for answer in answers) == sorted(
                expected(prompt(50, seed=i), 3) for i in range(12)
            )
            states = {worker.worker: worker.state for worker in fleet.gateway.workers()}
            assert states[hung.address] == "not_ready"
            assert fleet.gateway.is_ready()
        finally:
            hung.popen.send_signal(signal.SIGCONT)
        eventually(
            lambda: all(worker.state == "ready" for worker in fleet.gateway.workers()),
            "the worker is back",
        )
        eventually(fleet.gateway.is_idle, "nothing is held")
