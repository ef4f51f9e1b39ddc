"""`TrtllmWorker` over engines that the double is not: older ones, and results that cannot be read."""

from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import anyio
import grpc
import pytest

from slagate.proto import openengine_pb2 as oe
from slagate.proto.rpc.status import Metadata
from slagate.workers.errors import WorkerError
from slagate.workers.runtime import virtual_loop
from slagate.workers.sim import request as sim_request
from slagate.workers.sim.request import EngineDeadError, RequestError
from slagate.workers.trtllm import running as trtllm_running
from slagate.workers.trtllm.handoffs import Handoffs
from slagate.workers.trtllm.server_info import WorkerIdentity, kv_dtype
from slagate.workers.trtllm.worker import TrtllmWorker
from support.builders import MODEL, request
from support.engine.result import Result
from support.engine.sim_llm import until
from support.worker.sinks import KeepingSink

Code = grpc.StatusCode


class OldEngine:
    """As much of an `LLM` as every version has."""

    def __init__(self, *results: Result) -> None:
        self.args = SimpleNamespace(
            tensor_parallel_size=1,
            max_seq_len=1000,
            max_batch_size=8,
            max_num_tokens=8192,
            kv_cache_config=SimpleNamespace(tokens_per_block=32),
        )
        self.tokenizer = None
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
                    api=sim_request,
                    identity=identity,
                    tasks=tasks,
                    release_session=release_session,
                )
            )
            tasks.cancel_scope.cancel()

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
        # One result, with the handoff in it, is all that prefill is to give.
        assert engine.submitted[0]["streaming"] is False
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


def test_a_rank_is_asked_for_strictly_and_only_where_there_are_several() -> None:
    """A relaxed rank would be a wish, and the session would name the wrong one."""

    async def scenario(worker: TrtllmWorker) -> None:
        await answer(worker, "r", [("openengine-target-dp-rank", "0")])

    for ranks, asked in (
        (1, None),
        (2, sim_request.SchedulingParams(attention_dp_rank=0, attention_dp_relax=False)),
    ):
        engine = OldEngine(Result(tokens=[3]))
        engine.args.tensor_parallel_size, engine.args.enable_attention_dp = ranks, ranks > 1
        play(scenario, engine)
        assert engine.submitted[0].get("scheduling_params") == asked


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
        assert [check.name for check in health.checks] == ["grpc", "model", "kv_connector"]

    play(scenario, OldEngine())


def quit_with(error: Exception) -> "Future[None]":
    process: Future[None] = Future()
    process.set_exception(error)
    return process


@pytest.mark.parametrize(
    ("executor", "said"),
    [
        ({"_fatal_error": None, "mpi_futures": [Future()], "doing_shutdown": False}, ""),
        ({}, ""),
        ({"_fatal_error": OSError("gone")}, "fatal error: gone"),
        ({"mpi_futures": [Future(), quit_with(OSError("gone"))]}, "its process has ended: gone"),
        ({"doing_shutdown": True}, "it has shut down"),
    ],
)
def test_w05_health_reads_what_the_engine_knows_of_itself_and_makes_no_call_that_may_block(
    executor: dict[str, Any], said: str
) -> None:
    """Whether a watch runs or not: on the event loop nobody asks `_check_health`."""

    class Engine(OldEngine):
        def _check_health(self) -> bool:
            raise AssertionError("it would block")

    async def scenario(worker: TrtllmWorker) -> None:
        health = await worker.health(oe.HealthRequest())
        state = oe.HEALTH_STATE_NOT_READY if said else oe.HEALTH_STATE_READY
        assert (health.state, health.checks[1].message) == (state, said)

    engine: Any = Engine()
    engine._executor = SimpleNamespace(**executor)
    play(scenario, engine)


@pytest.mark.parametrize("error", [ValueError("its own"), RequestError("its own")])
def test_w05_no_error_of_a_submission_is_a_requests_once_the_engine_is_dead(
    error: Exception,
) -> None:
    """Versions before 1.4 raise there what their process died of, such as a ValueError."""

    class Engine(OldEngine):
        def generate_async(self, tokens: list[int], sampling_params: Any, **kwargs: Any) -> Result:
            raise error

    async def scenario(worker: TrtllmWorker) -> None:
        assert (await answer(worker, "r")).code is Code.INVALID_ARGUMENT
        assert not worker.fatal.is_set()
        engine._executor.mpi_futures[0].set_exception(error)
        assert (await answer(worker, "r")).code is Code.UNAVAILABLE
        assert worker.fatal.is_set()

    engine: Any = Engine()
    engine._executor = SimpleNamespace(mpi_futures=[Future()])
    play(scenario, engine)


class StrictEngine(OldEngine):
    """Refuses to be polled before its first result, as TensorRT-LLM does, and then fails its polls."""

    def __init__(self, *results: Result) -> None:
        super().__init__(*results)
        self.args.kv_cache_config.event_buffer_max_size = 100
        self.n_polls = 0
        self.n_answers = 0

    def generate_async(self, tokens: list[int], sampling_params: Any, **kwargs: Any) -> Result:
        result = super().generate_async(tokens, sampling_params, **kwargs)
        self.n_answers += 1
        return result

    def get_kv_cache_events_async(self, timeout: float) -> Any:
        assert self.n_answers, "there is nothing to poll yet"
        self.n_polls += 1
        raise OSError("the queue is broken")


def test_a_broken_event_poll_is_counted_and_the_worker_works_on() -> None:
    async def scenario(worker: TrtllmWorker) -> None:
        await until(5.0)
        assert engine.n_polls == 0
        assert (await answer(worker, "r1")).tokens == [3]
        await until(6.0)
        load = await worker.load(oe.GetLoadRequest())
        assert load.attributes["kv_event_poll_errors"] == engine.n_polls > 0
        assert (await answer(worker, "r2")).tokens == [3]
        assert not worker.fatal.is_set()

    engine = StrictEngine(Result(tokens=[3]), Result(tokens=[3]))
    play(scenario, engine)


@pytest.mark.parametrize("error", [EngineDeadError(OSError("rank 0 died")), OSError("a queue")])
def test_t2_3_a_poll_that_tells_of_a_dead_engine_ends_the_worker(error: Exception) -> None:
    class Engine(StrictEngine):
        def get_kv_cache_events_async(self, timeout: float) -> Any:
            raise error

    async def scenario(worker: TrtllmWorker) -> None:
        # Polls begin with the first result, which the end of the worker may overtake.
        events = (await answer(worker, "r1")).events
        await until(2.0)
        is_dead = isinstance(error, EngineDeadError)
        assert worker.fatal.is_set() is is_dead
        assert (events == ["error"]) is is_dead

    play(scenario, Engine(Result(tokens=[3])))


def test_an_engine_that_is_gone_at_submit_ends_the_worker() -> None:
    class Engine(OldEngine):
        def generate_async(self, tokens: list[int], sampling_params: Any, **kwargs: Any) -> Result:
            if not self._results:
                raise RuntimeError("LLM is shutting down")
            return super().generate_async(tokens, sampling_params, **kwargs)

    class Waiting(Result):
        async def __aiter__(self) -> AsyncIterator[Result]:
            yield self
            await anyio.Event().wait()

    async def scenario(worker: TrtllmWorker) -> None:
        running = KeepingSink()
        worker.generate(request("r1").SerializeToString(), (), running, timeout_s=None)
        await running.at_least(1)
        refused = await answer(worker, "r2")
        assert (refused.code, refused.messages) == (Code.UNAVAILABLE, [])
        assert (await running.done()).events == ["token", "error"]
        assert worker.fatal.is_set()
        health = await worker.health(oe.HealthRequest())
        assert health.state == oe.HEALTH_STATE_NOT_READY
        assert "shutting down" in health.checks[1].message
        await anyio.wait_all_tasks_blocked()
        assert worker.n_live == 0

    play(scenario, Engine(Waiting(tokens=[3], finish_reason=None)))


def test_health_probes_share_one_run_whoever_gives_up() -> None:
    class Slow(Result):
        async def aresult(self) -> "Slow":
            await anyio.sleep(2)
            return self

    async def scenario(worker: TrtllmWorker) -> None:
        states: list[int] = []

        async def probe() -> None:
            states.append(
                (await worker.health(oe.HealthRequest(include_inference_probe=True))).state
            )

        async with anyio.create_task_group() as callers:
            for _ in range(3):
                callers.start_soon(probe)
            with anyio.move_on_after(1.0):
                await probe()
        assert states == [oe.HEALTH_STATE_READY] * 3
        assert len(engine.submitted) == 1
        assert engine.submitted[0]["cache_salt"]

    engine = OldEngine(Slow(tokens=[3]))
    play(scenario, engine)


@pytest.mark.parametrize("error", [ValueError("no"), KeyError("no"), RuntimeError("no")])
def test_a_probe_that_fails_degrades(error: Exception) -> None:
    class Failing(Result):
        async def aresult(self) -> "Failing":
            raise error

    async def scenario(worker: TrtllmWorker) -> None:
        health = await worker.health(oe.HealthRequest(include_inference_probe=True))
        assert health.state == oe.HEALTH_STATE_DEGRADED
        assert "no" in health.checks[-1].message

    play(scenario, OldEngine(Failing(tokens=[3])))


def test_a_probe_that_is_given_up_is_not_left_in_the_engine() -> None:
    """Else each health check would add a request to the queue of an engine that hangs."""

    class Hung(Result):
        async def aresult(self) -> "Hung":
            await anyio.Event().wait()
            return self

    async def scenario(worker: TrtllmWorker) -> None:
        for result in results[:2]:
            health = await worker.health(oe.HealthRequest(include_inference_probe=True))
            assert health.state == oe.HEALTH_STATE_DEGRADED
            assert result.n_aborts == 1
        with anyio.move_on_after(1.0):
            await worker.health(oe.HealthRequest(include_inference_probe=True))

    results = [Hung(tokens=[3]) for _ in range(3)]
    play(scenario, OldEngine(*results))
    # The last one was under way when the worker ended.
    assert [result.n_aborts for result in results] == [1, 1, 1]


def test_a_probe_that_got_its_token_aborts_nothing() -> None:
    class Quick(Result):
        async def aresult(self) -> "Quick":
            return self

    async def scenario(worker: TrtllmWorker) -> None:
        health = await worker.health(oe.HealthRequest(include_inference_probe=True))
        assert health.state == oe.HEALTH_STATE_READY

    result = Quick(tokens=[3])
    play(scenario, OldEngine(result))
    assert result.n_aborts == 0


def test_an_id_that_is_used_again_is_remembered_as_long_as_any_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trtllm_running, "REMEMBERED_IDS", 2)

    async def scenario(worker: TrtllmWorker) -> None:
        for request_id in ("a", "b", "a", "c"):
            await answer(worker, request_id)
            await anyio.wait_all_tasks_blocked()
        aborted = await worker.abort(oe.AbortRequest(request_id="a"))
        assert aborted.status == oe.ABORT_STATUS_ALREADY_FINISHED
        with pytest.raises(WorkerError):
            await worker.abort(oe.AbortRequest(request_id="b"))

    play(scenario, OldEngine(*[Result(tokens=[3]) for _ in range(4)]))


def test_a_session_counts_as_parked_until_the_engine_has_let_it_go() -> None:
    class StuckError(Exception):
        pass

    def stuck(session_id: int) -> bool:
        raise StuckError(session_id)

    async def main() -> None:
        for release, left in ((None, 1), (lambda _: False, 0), (lambda _: True, 0), (stuck, 1)):
            handoffs = Handoffs(backend="NIXL", limit_s=60.0, release=release)
            handoffs.park(Result(ctx_request_id=7, tokens=[3]).params, rank=None)
            with suppress(StuckError):
                assert handoffs.release(7) == (release is not None and left == 0 and release(7))
            assert handoffs.n_parked == left

    virtual_loop.run(main)


def test_disagg_09_sessions_nobody_can_count_are_counted_until_their_limit() -> None:
    """DISAGG-09: an engine that cannot say what it holds, and no word when a session is collected."""

    async def prefill(worker: TrtllmWorker, request_id: str) -> None:
        leg = request(request_id)
        leg.extra.update({"request_type": "context_only"})
        sink = KeepingSink()
        worker.generate(leg.SerializeToString(), (), sink, timeout_s=None)
        assert (await sink.done()).events == ["prefill_ready"]

    async def parked(worker: TrtllmWorker) -> int:
        return (await worker.load(oe.GetLoadRequest())).active_kv_sessions

    async def scenario(worker: TrtllmWorker) -> None:
        assert await parked(worker) == 0
        await prefill(worker, "p1")
        await until(10.0)
        await prefill(worker, "p2")
        assert await parked(worker) == 2
        await worker.abort(oe.AbortRequest(kv_session=oe.KvSessionRef(session_id="8")))
        assert await parked(worker) == 1
        await until(29.9)
        assert await parked(worker) == 1
        await until(30.1)
        assert await parked(worker) == 0

    engine = OldEngine(Result(ctx_request_id=7, tokens=[3]), Result(ctx_request_id=8, tokens=[3]))
    engine.args.cache_transceiver_config = {"kv_transfer_timeout_ms": 30_000}
    play(scenario, engine, release_session=lambda _: True, role=oe.ENGINE_ROLE_PREFILL)


def test_an_end_of_the_worker_is_an_error_of_its_streams() -> None:
    """Not a bare status: what was accepted has been answered, and the answer says that it broke off."""

    class Waiting(Result):
        async def __aiter__(self) -> AsyncIterator[Result]:
            if self.outputs[0].token_ids:
                yield self
            await anyio.Event().wait()

    begun, silent = KeepingSink(), KeepingSink()

    async def scenario(worker: TrtllmWorker) -> None:
        for name, sink in (("r1", begun), ("r2", silent)):
            worker.generate(request(name).SerializeToString(), (), sink, timeout_s=None)
        await begun.at_least(1)

    play(scenario, OldEngine(*(Waiting(tokens=t, finish_reason=None) for t in ([3], []))))
    for sink, events, may_be_tried in (
        (begun, ["token", "error"], False),
        (silent, ["error"], True),
    ):
        assert (sink.code, sink.events) == (Code.OK, events)
        error = sink.messages[-1].error
        assert (error.code, error.retryable) == (oe.ERROR_CODE_INTERNAL, may_be_tried)
        assert "shutting down" in error.message


def test_one_requests_error_is_nobody_elses_whatever_it_says() -> None:
    class Failing(Result):
        async def __aiter__(self) -> AsyncIterator[Result]:
            raise sim_request.RequestError("cannot open \udcff")
            yield self

    async def scenario(worker: TrtllmWorker) -> None:
        assert (await answer(worker, "r1")).messages[-1].error.message == "cannot open ?"
        assert (await answer(worker, "r2")).tokens == [3]
        assert not worker.fatal.is_set()

    play(scenario, OldEngine(Failing(tokens=[]), Result(tokens=[3])))


def test_w10_an_assertion_about_an_answer_is_that_requests_error_and_ends_it_in_the_engine() -> (
    None
):
    class Asserting(Result):
        async def __aiter__(self) -> AsyncIterator[Result]:
            yield self
            raise AssertionError("logprobs length: 1 != 2")

    async def scenario(worker: TrtllmWorker) -> None:
        sink = KeepingSink()
        worker.generate(request().SerializeToString(), (), sink, timeout_s=None)
        await sink.done()
        assert sink.messages[-1].error.message == "logprobs length: 1 != 2"
        assert result.n_aborts == 1
        assert not worker.fatal.is_set()

    result = Asserting(tokens=[3], finish_reason=None)
    play(scenario, OldEngine(result))


@pytest.mark.parametrize(
    ("dtype", "of_checkpoint", "said"),
    [
        ("fp8", None, "fp8"),
        ("auto", None, "auto"),
        ("auto", "FP8", "fp8"),
        ("nvfp4", "FP8", "nvfp4"),
        (None, "FP8", None),
    ],
)
def test_the_kv_type_is_what_the_engine_makes_of_auto(
    dtype: str | None, of_checkpoint: str | None, said: str | None
) -> None:
    args = SimpleNamespace(
        kv_cache_config=SimpleNamespace(dtype=dtype),
        quant_config=SimpleNamespace(kv_cache_quant_algo=of_checkpoint),
    )
    assert kv_dtype(args) == said
