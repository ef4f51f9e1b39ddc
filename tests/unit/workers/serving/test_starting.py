"""A worker whose engine is not there yet, and the one that it becomes."""

from types import SimpleNamespace

import grpc
import pytest

from slagate.proto import openengine_pb2 as oe
from slagate.workers.errors import WorkerError
from slagate.workers.runtime import virtual_loop
from slagate.workers.serving.start import (
    NIXL_LIBRARY,
    StartingWorker,
    kv_transport,
    transfer_library,
)
from support.engine.workers import MODEL, expected, request, sim
from support.worker.contract import ask
from support.worker.sinks import KeepingSink

PROMPT = list(range(1, 50))
WHY = "the engine is starting: engine"


def test_until_it_is_there_all_but_health_is_unavailable() -> None:
    async def main() -> None:
        starting = StartingWorker("import")
        starting.phase = "engine"
        assert starting.why_not_ready == WHY
        health = await starting.health(oe.HealthRequest())
        assert health.state == oe.HEALTH_STATE_STARTING
        assert [(c.name, c.message) for c in health.checks] == [("grpc", ""), ("model", WHY)]
        sink = await ask(starting, request("r", PROMPT))
        assert (sink.status, sink.messages) == ((grpc.StatusCode.UNAVAILABLE, WHY, ()), [])
        events = KeepingSink()
        starting.kv_events(b"", (), events)
        assert events.code is grpc.StatusCode.UNAVAILABLE
        for answer in (
            starting.server_info(),
            starting.model_info(MODEL),
            starting.load(oe.GetLoadRequest()),
            starting.abort(oe.AbortRequest(request_id="r")),
            starting.kv_event_sources(oe.GetKvEventSourcesRequest()),
        ):
            with pytest.raises(WorkerError) as raised:
                await answer
            assert raised.value.status == (grpc.StatusCode.UNAVAILABLE, WHY, ())

    virtual_loop.run(main)


def test_once_it_is_there_it_is_that_worker() -> None:
    async def main() -> None:
        starting = StartingWorker("canary")
        async with sim("agg", served=False) as worker:
            starting.become(worker)
            assert starting.why_not_ready == ""
            health = await starting.health(oe.HealthRequest())
            assert health.state == oe.HEALTH_STATE_READY
            sink = await ask(starting, request("r", PROMPT, 4))
            assert sink.tokens == expected(PROMPT, 4)
            assert (await starting.server_info()).supported_models == [MODEL]
            assert (await starting.load(oe.GetLoadRequest())).running_requests == 0

    virtual_loop.run(main)


@pytest.mark.parametrize(
    ("backend", "variable", "overrides", "library"),
    [
        ("NIXL", "", None, "UCX"),
        ("NIXL", "libfabric", None, "LIBFABRIC"),
        ("NIXL", "LIBFABRIC", {NIXL_LIBRARY: "UCX"}, "UCX"),
        ("UCX", "LIBFABRIC", None, "UCX"),
        ("MOONCAKE", "", None, ""),
        ("", "", None, ""),
    ],
)
def test_what_a_transport_stands_on_is_told_as_far_as_it_is_known(
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
    variable: str,
    overrides: dict[str, str] | None,
    library: str,
) -> None:
    monkeypatch.setenv(NIXL_LIBRARY, variable)
    llm = SimpleNamespace(args=SimpleNamespace(env_overrides=overrides))
    assert transfer_library(llm, backend) == library


@pytest.mark.parametrize(
    ("backend", "version", "overrides", "transport"),
    [
        ("DEFAULT", "1.1.0", {}, "UCX"),
        ("DEFAULT", "1.2.0rc7", {}, "NIXL"),
        ("DEFAULT", "1.4rc", {"TRTLLM_USE_UCX_KVCACHE": "1"}, "UCX"),
        ("DEFAULT", "1.4rc", {"TRTLLM_USE_UCX_KVCACHE": "0", "TRTLLM_USE_MPI_KVCACHE": "1"}, "MPI"),
        ("DEFAULT", "unknown", {}, ""),
        ("MOONCAKE", "unknown", {"TRTLLM_USE_UCX_KVCACHE": "1"}, "MOONCAKE"),
        ("", "1.4rc", {}, ""),
    ],
)
def test_what_the_default_transport_is_depends_on_version_and_variables(
    backend: str, version: str, overrides: dict[str, str], transport: str
) -> None:
    llm = SimpleNamespace(args=SimpleNamespace(env_overrides=overrides))
    assert kv_transport(llm, backend, version) == transport
