"""`TrtllmWorker` over engines that the double is not: older ones, and results that cannot be read."""

from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import anyio
import grpc
import pytest

from slagate.proto import openengine_pb2 as oe
from slagate.workers import sim_llm
from slagate.workers.errors import WorkerError
from slagate.workers.trtllm import TrtllmWorker
from slagate.workers.trtllm_info import WorkerIdentity
from slagate.workers.worker import Metadata
from support import virtual_loop
from support.builders import MODEL, request
from support.engine_result import Result
from support.sinks import KeepingSink

Code = grpc.StatusCode


class OldEngine:
    """As much of an `LLM` as every version has."""

    def __init__(self, *results: Result) -> None:
        self.args = SimpleNamespace(
            max_seq_len=1000,
            max_batch_size=8,
            max_num_tokens=8192,
            kv_cache_config=SimpleNamespace(tokens_per_block=32),
        )
        self.submitted: list[dict[str, Any]] = []
        self._results = list(results)

    def generate_async(self, tokens: list[int], sampling_params: Any, **kwargs: Any) -> Result:
        self.submitted.append(kwargs)
        return self._results.pop(0)


def play(
    scenario: Callable[[TrtllmWorker], Awaitable[None]],
    engine: OldEngine,
    *,
    release_session: Callable[[int], bool] | None = None,
    role: oe.EngineRole.ValueType = oe.ENGINE_ROLE_AGGREGATED,
) -> None:
    identity = WorkerIdentity(
        role=role,
        model=MODEL,
        instance_id="i1",
        engine_version="0",
        transfer_backend="NIXL",
        tensor_parallel_size=1,
        end_id=2,
    )

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            await scenario(
                TrtllmWorker(
                    engine,
                    api=sim_llm,
                    identity=identity,
                    tasks=tasks,
                    release_session=release_session,
                )
            )

    virtual_loop.run(main)


async def answer(worker: TrtllmWorker, request_id: str, metadata: Metadata = ()) -> KeepingSink:
    sink = KeepingSink()
    worker.generate(request(request_id).SerializeToString(), metadata, sink, timeout_s=None)
    return await sink.done()


@pytest.mark.parametrize("frees", [True, False])
def test_a_worker_claims_to_free_handoffs_only_where_its_engine_can(*, frees: bool) -> None:
    async def scenario(worker: TrtllmWorker) -> None:
        info = await worker.server_info()
        assert info.kv_connector.enabled
        assert info.kv_connector.supports_abort_cleanup == frees
        abort = oe.AbortRequest(kv_session=oe.KvSessionRef(session_id="7"))
        if frees:
            assert (await worker.abort(abort)).status == oe.ABORT_STATUS_ABORTED
            assert released == [7]
            return
        with pytest.raises(WorkerError) as caught:
            await worker.abort(abort)
        assert caught.value.status.code is Code.UNIMPLEMENTED
        assert "kv_session" in caught.value.status.message

    released: list[int] = []

    def release(session_id: int) -> bool:
        released.append(session_id)
        return True

    play(scenario, OldEngine(), release_session=release if frees else None)


def test_a_late_abort_of_a_prefill_frees_its_handoff_or_says_that_it_had_finished() -> None:
    released: list[int] = []

    def release(session_id: int) -> bool:
        released.append(session_id)
        return True

    for release_session, status in (
        (release, oe.ABORT_STATUS_ABORTED),
        (None, oe.ABORT_STATUS_ALREADY_FINISHED),
    ):

        async def scenario(worker: TrtllmWorker, status: oe.AbortStatus.ValueType = status) -> None:
            sink = KeepingSink()
            leg = request("p")
            leg.extra.update({"request_type": "context_only"})
            leg.stopping.max_tokens = 1
            worker.generate(leg.SerializeToString(), (), sink, timeout_s=None)
            assert (await sink.done()).events == ["prefill_ready"]
            await anyio.wait_all_tasks_blocked()
            assert (await worker.abort(oe.AbortRequest(request_id="p"))).status == status

        engine = OldEngine(Result(ctx_request_id=7, tokens=[3]))
        play(scenario, engine, release_session=release_session, role=oe.ENGINE_ROLE_PREFILL)
    assert released == [7]


def test_trace_context_goes_to_the_engine_and_nothing_else_does() -> None:
    async def scenario(worker: TrtllmWorker) -> None:
        trace = [("traceparent", "00-ab-cd-01"), ("tracestate", "v=1")]
        await answer(worker, "traced", [*trace, ("authorization", "secret")])
        await answer(worker, "plain", [("x-other", "1")])
        traced, plain = engine.submitted
        assert traced["trace_headers"] == dict(trace)
        assert "trace_headers" not in plain

    engine = OldEngine(Result(tokens=[3]), Result(tokens=[3]))
    play(scenario, engine)


def test_a_result_that_cannot_be_passed_on_ends_its_leg_and_not_the_worker() -> None:
    async def scenario(worker: TrtllmWorker) -> None:
        sink = await answer(worker, "bad")
        assert sink.events == ["error"]
        assert sink.messages[0].error.code == oe.ERROR_CODE_INTERNAL
        assert sink.code is Code.OK
        assert bad.n_aborts == 1
        assert not worker.fatal.is_set()
        assert (await answer(worker, "good")).tokens == [3]
        await anyio.wait_all_tasks_blocked()
        assert worker.n_live == 0

    bad = Result(tokens=["no token id"])
    play(scenario, OldEngine(bad, Result(tokens=[3])))


def test_an_engines_own_error_still_ends_the_worker() -> None:
    class Dead(Result):
        async def __aiter__(self) -> AsyncIterator[Result]:
            raise RuntimeError("executor died")
            yield self

    async def scenario(worker: TrtllmWorker) -> None:
        assert (await answer(worker, "r")).events == ["error"]
        await worker.fatal.wait()

    play(scenario, OldEngine(Dead(tokens=[3])))


def test_an_engine_that_cannot_say_how_it_is_counts_as_ready() -> None:
    async def scenario(worker: TrtllmWorker) -> None:
        health = await worker.health(oe.HealthRequest())
        assert health.state == oe.HEALTH_STATE_READY
        assert [check.name for check in health.checks] == ["grpc", "model"]

    play(scenario, OldEngine())


@pytest.mark.parametrize("alive", [True, False])
def test_an_engine_that_can_say_how_it_is_is_believed(*, alive: bool) -> None:
    class Engine(OldEngine):
        def _check_health(self) -> bool:
            return alive

    async def scenario(worker: TrtllmWorker) -> None:
        state = oe.HEALTH_STATE_READY if alive else oe.HEALTH_STATE_NOT_READY
        assert (await worker.health(oe.HealthRequest())).state == state

    play(scenario, Engine())
