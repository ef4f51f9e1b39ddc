"""The self-check of a TensorRT-LLM worker: what of a first run on a GPU can be run before it serves.

The engine is constructed as for serving, and asked by the worker that would serve it, through the `Worker`
port; nobody listens. So what is seen here is what a gateway would see. The worker takes legs of all roles
meanwhile, as one engine is to be both ends of a handoff.
"""

import logging
import uuid
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, TypeAlias

import anyio
import grpc
from anyio.abc import TaskGroup
from typing_extensions import override

from slagate.proto import openengine_pb2 as oe
from slagate.proto.rpc.sinks import BufferedSink
from slagate.workers.errors import WorkerError
from slagate.workers.legs import decode_leg, prefill_leg
from slagate.workers.runtime.usage import UsageError
from slagate.workers.serving.start import (
    Phases,
    Started,
    StartingWorker,
    TrtllmOptions,
    abilities,
    prepare_start,
    start_engine,
    worker_over,
)
from slagate.workers.serving.trtllm import leave_at_once
from slagate.workers.trtllm.encode import EncodeWorker, start_encoder
from slagate.workers.trtllm.engine import setting
from slagate.workers.trtllm.metrics import Observer, Outcome
from slagate.workers.trtllm.package import shut_down
from slagate.workers.trtllm.watch import EngineWatch
from slagate.workers.trtllm.worker import TrtllmWorker

log = logging.getLogger(__name__)

Result: TypeAlias = Literal["ok", "failed", "off", "not possible here", "not run"]

ANSWER_LIMIT_S = 60.0
"""For one request, once the warm-up went well."""

POLL_LIMIT_S = 10.0
"""For KV events and statistics to come after the requests that they are about."""

LONG_ANSWER = 512
"""Tokens of the request that is aborted, or as many as the context has room for."""

SHORT_ANSWER = 8
"""Tokens of the other requests."""

HOW_POLLED = {
    "call": "polled by calls to its process",
    "queue": "polled through a queue",
    "streamed": "streamed by the engine over ZMQ",
}
"""What `abilities` says -> how it reads in a row."""

NOT_POSSIBLE: Result = "not possible here"


class CheckRow(NamedTuple):
    """One check: what was checked, how it went, and what was seen; `advice` where it failed."""

    what: str
    result: Result
    seconds: float
    seen: str
    advice: str = ""


class _Seen(NamedTuple):
    """What a check saw, and how it went."""

    text: str
    result: Result = "ok"


class _CheckFailed(Exception):
    """A check did not see what it should; the message is what it saw."""


_ADVICE = {
    "constructor": "the log above has the engine's own error; `slagate worker check` tells wrong arguments",
    "warm-up": "the engine takes requests and does not answer: see its log, nvidia-smi, --warm-up-timeout",
    "request": "the log has what the engine said; `--log-level debug` says more",
    "handoff to itself": "compare cache_transceiver_config of both roles, UCX_TLS and UCX_NET_DEVICES; "
    "then try a pair of workers, as an engine may be unable to fetch from itself",
    "KV events": "prefix routing would not see this worker: look for poll.failed in the log, or serve "
    "with --kv-events 0 and --policy least_loaded",
    "statistics": "gateways would see no load of this worker: look for poll.failed in the log",
    "capacity": "gateways know the size of the KV cache from statistics only: the log has what the "
    "engine's own call for it did",
    "abort": "clients that leave would go on costing GPU time: report it with the log",
    "health": "gateways would send nothing to this worker; the check that failed is named",
    "shutdown": "the processes of the engine may be left: look for them with nvidia-smi; "
    "--shutdown-timeout gives them longer",
}


class _Polled(Observer):
    """Keeps the first row of statistics, and tells when the engine has finished with a leg."""

    def __init__(self) -> None:
        self.row: Any = None
        self.row_came = anyio.Event()
        self._leg_ended = anyio.Event()

    async def next_end(self) -> None:
        """Wait until the engine has finished with one more leg."""
        await self._leg_ended.wait()

    @override
    def leg_ended(self, outcome: Outcome, result: Any | None) -> None:
        self._leg_ended.set()
        self._leg_ended = anyio.Event()

    @override
    def stats_polled(self, rows: list[Any]) -> None:
        self.row = self.row or next(iter(rows), None)
        self.row_came.set()


class Checks:
    """The rows of a self-check, in order; health checks and the log are told which check runs."""

    def __init__(self, phases: Phases) -> None:
        self._phases = phases
        self.rows: list[CheckRow] = []

    async def add_row(
        self, what: str, check: Awaitable[_Seen], *, until: Sequence[anyio.Event] = ()
    ) -> bool:
        """Run a check and keep its row, also where it is cancelled, or given up for one of these events.

        Whether it did not fail. Raises `UsageError`, which is no finding about the engine.
        """
        self._phases.begin_phase(what)
        started_s = anyio.current_time()
        seen: _Seen | None = None
        try:
            seen = await self._phases.run_unless(check, until=until)
        except UsageError:
            raise
        except Exception as error:
            log.exception("self_check.failed", extra={"check": what})
            known = isinstance(error, _CheckFailed | WorkerError | ValueError)
            text = str(error) if known else f"{type(error).__name__}: {error}"
            seen = _Seen(text, "failed")
        finally:
            text, result = seen or _Seen("given up before its end", "failed")
            advice = _ADVICE.get(what, "") if result == "failed" else ""
            seconds = anyio.current_time() - started_s
            self.rows.append(CheckRow(what, result, seconds, text, advice))
        return result != "failed"

    def leave_out(self, names: Sequence[str], why: str, result: Result = "not run") -> None:
        """Rows of those checks that have none yet."""
        done = {row.what for row in self.rows}
        self.rows += [CheckRow(what, result, 0.0, why) for what in names if what not in done]


async def run_self_check(options: TrtllmOptions) -> tuple[list[CheckRow], bool]:
    """Check the engine that these options start: the rows, and whether the engine has ended.

    Raises `UsageError` for what serving would refuse to start with; all else that goes wrong is a row.
    """
    key = prepare_start(options)
    instance_id = uuid.uuid4().hex
    phases = Phases(StartingWorker("import"), every_s=options.progress_s)
    checks = Checks(phases)
    if options.role == "encode":
        return await _check_encoder(options, checks, instance_id)
    started: list[Started] = []

    async def start() -> _Seen:
        one = await start_engine(options, instance_id=instance_id, phases=phases)
        started.append(one)
        return _Seen(f"tensorrt_llm {one.package.version}, {type(one.llm).__name__} constructed")

    if not await checks.add_row("constructor", start()):
        checks.leave_out([*EngineCheck.NAMES, "shutdown"], "the engine did not start")
        return checks.rows, False
    if death := await EngineCheck(started[0], options, key, checks).run():
        # A dead engine's own shutdown would wait for its ranks, which are gone.
        checks.leave_out(["shutdown"], death)
        return checks.rows, False
    limit_s = options.shutdown_limit_s
    return checks.rows, await _ended(checks, shut_down(started[0].llm, limit_s=limit_s), limit_s)


async def _ended(checks: Checks, end: Awaitable[str], limit_s: float) -> bool:
    """The row of the shutdown, which `end` does within `limit_s`, or says why not. Whether it did."""

    async def check() -> _Seen:
        if failure := await end:
            raise _CheckFailed(failure)
        return _Seen(f"ended within {limit_s:g} s")

    return await checks.add_row("shutdown", check())


async def _check_encoder(
    options: TrtllmOptions, checks: Checks, instance_id: str
) -> tuple[list[CheckRow], bool]:
    """The checks of a worker that only encodes."""
    workers: list[EncodeWorker] = []

    async def start() -> _Seen:
        encoder = await start_encoder(options.args.values)
        workers.append(EncodeWorker(encoder, model=options.served_name, instance_id=instance_id))
        kind = "no encoder" if encoder.engine is None else type(encoder.engine).__name__
        return _Seen(f"tensorrt_llm {encoder.version}, {kind}")

    if not await checks.add_row("constructor", start()):
        checks.leave_out(["health", "shutdown"], "the engine did not start")
        return checks.rows, False
    checks.leave_out(["request"], "OpenEngine has no call for encoders", NOT_POSSIBLE)

    async def health() -> _Seen:
        response = await workers[0].health(oe.HealthRequest())
        # Degraded is the model that has no encoder of its own.
        return _healthy(response, also=oe.HEALTH_STATE_DEGRADED)

    await checks.add_row("health", health())
    limit_s = options.shutdown_limit_s
    return checks.rows, await _ended(checks, workers[0].shut_down(limit_s), limit_s)


def _healthy(
    response: oe.HealthResponse, *, also: oe.HealthState.ValueType = oe.HEALTH_STATE_READY
) -> _Seen:
    """What a health check said. Raises `_CheckFailed` unless the state is READY, or `also` this one."""
    states = ", ".join(
        f"{check.name} {oe.HealthState.Name(check.state).removeprefix('HEALTH_STATE_')}"
        f"{f' ({check.message})' if check.message else ''}"
        for check in response.checks
    )
    if response.state not in (oe.HEALTH_STATE_READY, also):
        raise _CheckFailed(states)
    return _Seen(states)


class EngineCheck:
    """The checks of one constructed engine, by a worker over it."""

    NAMES = (
        "warm-up",
        "request",
        "KV events",
        "statistics",
        "capacity",
        "abort",
        "health",
        "handoff to itself",
    )

    def __init__(
        self, started: Started, options: TrtllmOptions, key: bytes | None, checks: Checks
    ) -> None:
        self._identity = started.identity
        identity = replace(started.identity, takes_any_leg=True)
        self._started = started._replace(identity=identity)
        self._options = options
        self._key = key
        self._checks = checks
        self._abilities = abilities(started)
        self._polled = _Polled()
        self._events = BufferedSink()
        self._n_requests = 0

    async def run(self) -> str:
        """Run all checks, each after those that it depends on. Why the engine is dead, or ""."""
        why = "the checks were broken off"
        async with anyio.create_task_group() as tasks:
            worker = self._worker = self._worker_in(tasks)
            watch = EngineWatch(
                self._started.llm,
                times=self._options.watch,
                on_death=worker.declare_dead,
                leave=leave_at_once,
            )
            tasks.start_soon(watch.run)
            self._subscribe()
            checks = (
                self._warm_up,
                self._request,
                self._kv_events,
                self._statistics,
                self._capacity,
                self._abort,
                self._health,
                # Last: errors of a transfer may end an engine.
                self._handoff,
            )
            for what, check in zip(self.NAMES, checks, strict=True):
                passed = await self._checks.add_row(what, check(), until=[worker.fatal])
                if worker.fatal.is_set():
                    break
                if what == "warm-up" and not passed:
                    why = "no warm-up"
                    break
            tasks.cancel_scope.cancel()
        death = f"the engine died: {worker.problem}" if worker.fatal.is_set() else ""
        self._checks.leave_out(self.NAMES, death or why)
        return death

    def _worker_in(self, tasks: TaskGroup) -> TrtllmWorker:
        return worker_over(
            self._started,
            self._options,
            tasks=tasks,
            handoff_key=self._key,
            observer=self._polled,
        )

    def _subscribe(self) -> None:
        wanted = oe.SubscribeKvEventsRequest(start_sequence_number=0)
        self._worker.kv_events(wanted.SerializeToString(), (), self._events)

    async def _warm_up(self) -> _Seen:
        limit_s = self._options.warm_up_limit_s
        failure = await self._worker.warm_up(limit_s, on_canary=lambda: None)
        if failure:
            raise _CheckFailed(failure)
        return _Seen("a request on each rank, and a canary")

    async def _new_request(self, max_tokens: int) -> bytes:
        """A request whose answer does not end by itself, and whose prompt fills two KV blocks.

        Both are shorter where the engine has no room for them.
        """
        capacity = (await self._worker.server_info()).capacity
        window = (await self._worker.model_info(self._identity.model)).max_context_length
        transceiver = setting(self._started.llm.args, "cache_transceiver_config")
        max_tokens = min(max_tokens, window // 2 or max_tokens)
        limits = (
            2 * capacity.kv_block_size + 1,
            window and window - max_tokens,
            capacity.max_batched_tokens,
            setting(transceiver, "max_tokens_in_buffer"),
        )
        self._n_prompt = min(limit for limit in limits if limit)
        self._n_requests += 1
        return oe.GenerateRequest(
            request_id=f"self-check-{self._n_requests}",
            model=self._identity.model,
            # Ids that every vocabulary has; another prompt each time, so that nothing is cached.
            token_ids=oe.TokenIds(
                ids=[self._n_requests + 1, *(2 + n % 100 for n in range(1, self._n_prompt))]
            ),
            stopping=oe.StoppingOptions(max_tokens=max_tokens, ignore_eos=True),
        ).SerializeToString()

    async def _answer(self, leg: bytes) -> list[oe.GenerateResponse]:
        """All messages of a leg. Raises `_CheckFailed` where it is refused, or ends with an error."""
        sink = BufferedSink()
        self._worker.generate(leg, (), sink, timeout_s=ANSWER_LIMIT_S)
        messages = []
        while (message := await _next_message(sink)) is not None:
            messages.append(message)
        return messages

    async def _request(self) -> _Seen:
        request = await self._new_request(SHORT_ANSWER)
        return _whole_answer(await self._answer(request), SHORT_ANSWER)

    async def _handoff(self) -> _Seen:
        """A prefill leg and its decode leg; it is no failure where the other role's leg does not work."""
        if not self._identity.transfer_backend:
            why = "no cache_transceiver_config, or an aggregated worker: nothing is handed over"
            return _Seen(why, "off")
        is_prefill = self._identity.role == oe.ENGINE_ROLE_PREFILL
        if not is_prefill and self._would_end_engine():
            why = "before 1.3 a context-only request ends an engine that has overlap scheduling"
            return _Seen(f"{why}: try a pair of workers", NOT_POSSIBLE)
        request = await self._new_request(SHORT_ANSWER)
        try:
            last = (await self._answer(prefill_leg(request, f"prefill-{self._n_requests}")))[-1]
            if not last.HasField("prefill_ready"):
                raise _CheckFailed("the prefill leg ended without a handoff")
        except _CheckFailed as failed:
            if is_prefill:
                raise
            return _Seen(f"this engine made no handoff: {failed}", NOT_POSSIBLE)
        session = last.prefill_ready.kv_session
        leg_id = f"decode-{self._n_requests}"
        leg = decode_leg(request, leg_id, session=session, max_tokens=None)
        try:
            seen = _whole_answer(await self._answer(leg), SHORT_ANSWER)
        except _CheckFailed as failed:
            text = f"a handoff was made ({session.transfer_backend}), and not fetched: {failed}"
            if is_prefill:
                return _Seen(text, NOT_POSSIBLE)
            raise _CheckFailed(text) from failed
        return _Seen(f"by {session.transfer_backend}: {seen.text}")

    def _would_end_engine(self) -> bool:
        """Whether a context-only request may end the engine instead of being refused.

        With overlap scheduling TensorRT-LLM 1.1 and 1.2 raise for it outside of what catches a request's
        errors (`_enqueue_request`, executor/base_worker.py @7b437aaa); these have no `priority`.
        """
        has_overlap = not setting(self._started.llm.args, "disable_overlap_scheduler")
        return has_overlap and "priority" in self._abilities["off"]

    async def _kv_events(self) -> _Seen:
        if not (await self._worker.kv_event_sources(oe.GetKvEventSourcesRequest())).sources:
            status = self._events.status
            return _Seen("" if status is None else status.message, "off")
        block_tokens = (await self._worker.server_info()).capacity.kv_block_size
        if self._n_prompt < block_tokens:
            why = f"the longest prompt, {self._n_prompt} tokens, fills no block of {block_tokens}"
            return _Seen(why, NOT_POSSIBLE)
        with anyio.move_on_after(POLL_LIMIT_S):
            while (data := await self._events.next()) is not None:
                batch = oe.SubscribeKvEventsResponse.FromString(data).batch
                for event in batch.events:
                    if event.HasField("block_stored"):
                        how = HOW_POLLED[self._abilities["kv_events"]]
                        return _Seen(f"{how}; {_described(batch, event.block_stored)}")
        counts = {name: count for name, count in self._worker.counters().items() if count}
        raise _CheckFailed(f"no block was announced in {POLL_LIMIT_S:g} s; counters: {counts}")

    async def _statistics(self) -> _Seen:
        if not setting(self._started.llm.args, "enable_iter_perf_stats"):
            return _Seen("enable_iter_perf_stats is off", "off")
        if not self._abilities["statistics"]:
            return _Seen("this engine has no method to be polled for them", "off")
        with anyio.move_on_after(POLL_LIMIT_S):
            await self._polled.row_came.wait()
        load = await self._worker.load(oe.GetLoadRequest(include_per_rank=True))
        row = self._polled.row
        if row is None:
            raise _CheckFailed(f"no row came in {POLL_LIMIT_S:g} s")
        if not isinstance(row, dict):
            raise _CheckFailed(f"a row is {type(row).__name__}, not a dict: {row!r:.200}")
        blocks = f"{load.used_kv_blocks} of {load.total_kv_blocks} KV blocks used"
        how = HOW_POLLED[self._abilities["statistics"]]
        return _Seen(f"{how}; a row has {len(row)} keys: {', '.join(sorted(row))}; {blocks}")

    async def _capacity(self) -> _Seen:
        info = await self._worker.server_info()
        model = await self._worker.model_info(self._identity.model)
        # An old engine has no call that tells it, and has told it by its statistics now.
        n_blocks = (await self._worker.load(oe.GetLoadRequest())).total_kv_blocks
        capacity, n_ranks = info.capacity, info.parallelism.data_parallel_size
        context = f"{model.max_context_length:,}" if model.max_context_length else "not known"
        seen = (
            f"{f'{n_blocks:,}' if n_blocks else 'not known how many'} KV blocks of "
            f"{capacity.kv_block_size} tokens on {n_ranks} rank(s), context {context}, batch "
            f"{capacity.max_running_requests:,}, step {capacity.max_batched_tokens:,} tokens"
        )
        if self._started.capacity is None and hasattr(self._started.llm, "get_kv_cache_capacity"):
            raise _CheckFailed(f"get_kv_cache_capacity() told nothing; otherwise {seen}")
        return _Seen(seen)

    async def _abort(self) -> _Seen:
        """Abort a request behind its first message; the engine must be rid of it."""
        data = await self._new_request(LONG_ANSWER)
        target = oe.AbortRequest(request_id=f"self-check-{self._n_requests}")
        sink = BufferedSink()
        self._worker.generate(data, (), sink, timeout_s=ANSWER_LIMIT_S)
        await _next_message(sink)
        status = (await self._worker.abort(target)).status
        if status != oe.ABORT_STATUS_ABORTED:
            raise _CheckFailed(f"{oe.AbortStatus.Name(status)}: the request had ended before")
        with anyio.move_on_after(ANSWER_LIMIT_S):
            # Until the engine is rid of it, a further abort finds it.
            while (status := (await self._worker.abort(target)).status) == oe.ABORT_STATUS_ABORTED:
                await self._polled.next_end()
        if status == oe.ABORT_STATUS_ABORTED:
            raise _CheckFailed(f"the engine still had the request {ANSWER_LIMIT_S:g} s later")
        assert sink.status is not None
        return _Seen(f"{sink.status.code.name}, and the engine ended the request")

    async def _health(self) -> _Seen:
        wanted = oe.HealthRequest(include_inference_probe=True)
        return _healthy(await self._worker.health(wanted))


async def _next_message(sink: BufferedSink) -> oe.GenerateResponse | None:
    """The next message of a leg, or None at its end. Raises `_CheckFailed` for an error, or a refusal."""
    data = await sink.next()
    if data is None:
        assert sink.status is not None
        if sink.status.code is not grpc.StatusCode.OK:
            raise _CheckFailed(f"{sink.status.code.name}: {sink.status.message}")
        return None
    message = oe.GenerateResponse.FromString(data)
    if message.HasField("error"):
        raise _CheckFailed(f"{oe.ErrorCode.Name(message.error.code)}: {message.error.message}")
    return message


def _described(batch: oe.KvEventBatch, stored: oe.BlockStored) -> str:
    """An event as a subscriber gets it, in one line."""
    medium = oe.StorageMedium.Name(stored.medium).removeprefix("STORAGE_MEDIUM_")
    return (
        f"rank {batch.data_parallel_rank}: {len(stored.block_hashes)} blocks of {stored.block_size} "
        f"tokens stored on {medium}, hashes of {len(stored.block_hashes[0].value)} bytes"
    )


def _whole_answer(messages: list[oe.GenerateResponse], n_wanted: int) -> _Seen:
    """What an answer of `n_wanted` tokens has. Raises `_CheckFailed` where it is another one."""
    n_tokens = sum(len(message.token.tokens) for message in messages)
    ends = [message.finished for message in messages if message.HasField("finished")]
    usage = messages[-1].usage if messages else oe.Usage()
    reason = oe.FinishReason.Name(ends[-1].reason) if ends else "no end"
    seen = (
        f"{n_tokens} tokens in {len(messages)} messages, {reason.removeprefix('FINISH_REASON_')}, "
        f"usage {usage.prompt_tokens} + {usage.completion_tokens}"
    )
    if len(ends) != 1 or not n_tokens == usage.completion_tokens == n_wanted:
        raise _CheckFailed(f"{seen}; {n_wanted} tokens were asked for")
    return _Seen(seen)
