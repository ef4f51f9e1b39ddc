"""Measures a live worker over OpenEngine: seconds of prompts and of steps of batches, as rows of a profile.

    prefill row    a prompt of fresh tokens with one token of output, on a worker that is otherwise idle;
                   for cached tokens, behind a prefix that was sent before
    decode row     a batch whose prompts are in the KV cache; the steps in which all of it decodes

Each is repeated and the median taken. Times are the client's own: the way to the worker is in them, as in
those that a gateway sees. `Bench` is what is measured: one worker, or a prefill and a decode worker.
"""

import math
import random
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import NamedTuple

import anyio
import grpc

from slagate.proto import openengine_pb2 as oe
from slagate.proto.rpc.status import OK, Status
from slagate.workers.errors import status_of_engine_error
from slagate.workers.legs import decode_leg, prefill_leg
from slagate.workers.runtime.clock import monotonic_s
from slagate.workers.runtime.usage import UsageError
from slagate.workers.worker import Worker


class TimedPrompt(NamedTuple):
    """How long one prompt took."""

    seconds: float  # until its first token or its handoff
    cached_tokens: int  # that the worker says it had; 0 where it does not say


class TokenArrival(NamedTuple):
    """Tokens of one response, and when it came."""

    at_s: float
    n_tokens: int


@dataclass(slots=True)
class TimedStream:
    """The sink of one request: records when its tokens came, and how it ended."""

    now_s: Callable[[], float]
    ticks: list[TokenArrival] = field(default_factory=list)
    status: Status = OK
    usage: oe.Usage | None = None
    session: oe.KvSessionRef | None = None
    first_s: float | None = None
    ended: anyio.Event = field(default_factory=anyio.Event)

    def message(self, data: bytes, /) -> None:
        """Take one serialised `GenerateResponse`."""
        now_s = self.now_s()
        response = oe.GenerateResponse.FromString(data)
        event = response.WhichOneof("event")
        if response.HasField("usage"):
            self.usage = response.usage
        if event == "error":
            self.status = status_of_engine_error(response.error)
            return
        if self.first_s is None:
            self.first_s = now_s
        if event == "token":
            self.ticks.append(TokenArrival(now_s, len(response.token.tokens)))
        elif event == "prefill_ready":
            self.session = response.prefill_ready.kv_session

    def finish(self, status: Status, /) -> None:
        """Take the end of the call."""
        if self.status.code is grpc.StatusCode.OK:
            self.status = status
        self.ended.set()


class Bench:
    """An aggregated worker or, with `decode`, a prefill worker and its decode worker, to be timed."""

    def __init__(
        self,
        worker: Worker,
        model: str,
        *,
        decode: Worker | None = None,
        timeout_s: float,
        now_s: Callable[[], float] = monotonic_s,
    ) -> None:
        self._worker, self._decode, self._model = worker, decode, model
        self._timeout_s, self._now_s = timeout_s, now_s

    async def prefill(self, prompt: Sequence[int]) -> TimedPrompt:
        """Time one prompt with one token of output. Raises `UsageError` if it is not answered."""
        sent_s = self._now_s()
        request = _request(self._model, prompt, 1)
        if self._decode is None:
            return _timed(await self._ask(self._worker, request), sent_s)
        stream = await self._hand_over(request)
        await self._worker.abort(oe.AbortRequest(kv_session=stream.session))
        return _timed(stream, sent_s)

    async def decode(self, prompts: Sequence[Sequence[int]], n_tokens: int) -> list[TimedStream]:
        """Time `n_tokens` of output for each prompt, all prompts at once. Raises `UsageError`.

        The prompts are prefilled before that, one by one: into the cache of the aggregated worker, which is
        asked for them again, or into handoffs for the decode worker.
        """
        asked = []
        for prompt in prompts:
            request = _request(self._model, prompt, n_tokens)
            if self._decode is None:
                await self.prefill(prompt)
            else:
                session = (await self._hand_over(request)).session
                assert session is not None
                request = decode_leg(request, uuid.uuid4().hex, session=session, max_tokens=None)
            asked.append(request)
        return await self._ask_together(self._decode or self._worker, asked)

    async def _hand_over(self, request: bytes) -> TimedStream:
        stream = await self._ask(self._worker, prefill_leg(request, uuid.uuid4().hex))
        if stream.session is None:
            raise UsageError("the prefill worker gave no handoff for a prompt")
        return stream

    async def _ask_together(self, worker: Worker, requests: Sequence[bytes]) -> list[TimedStream]:
        streams: dict[int, TimedStream] = {}
        refusals: list[UsageError] = []

        async def ask(at: int) -> None:
            try:
                streams[at] = await self._ask(worker, requests[at])
            except UsageError as error:
                refusals.append(error)

        async with anyio.create_task_group() as tasks:
            for at in range(len(requests)):
                tasks.start_soon(ask, at)
        if refusals:
            raise refusals[0]
        return [streams[at] for at in range(len(requests))]

    async def _ask(self, worker: Worker, request: bytes) -> TimedStream:
        stream = TimedStream(self._now_s)
        call = worker.generate(request, (), stream, timeout_s=self._timeout_s)
        try:
            await stream.ended.wait()
        finally:
            call.cancel()
        if stream.status.code is not grpc.StatusCode.OK:
            code, message = stream.status.code.name, stream.status.message
            raise UsageError(f"the worker answered {code}: {message}")
        return stream


def _request(model: str, prompt: Sequence[int], max_tokens: int) -> bytes:
    return oe.GenerateRequest(
        request_id=uuid.uuid4().hex,
        model=model,
        token_ids=oe.TokenIds(ids=prompt),
        stopping=oe.StoppingOptions(max_tokens=max_tokens, ignore_eos=True),
    ).SerializeToString()


def _timed(stream: TimedStream, sent_s: float) -> TimedPrompt:
    if stream.first_s is None:
        raise UsageError("the worker ended a prompt without an answer")
    cached = 0 if stream.usage is None else stream.usage.cached_prompt_tokens
    return TimedPrompt(stream.first_s - sent_s, cached)


MIN_STEPS = 8
"""The fewest steps of a whole batch whose mean is taken."""

MOST_TRIES = 5
"""Prompts tried for one time: a random one may begin as an earlier one did, and more of it be cached."""


@dataclass(frozen=True, slots=True)
class MeasurePlan:
    """Which rows to measure, each `repeats` times; decode rows over about `steps` tokens of output."""

    new_tokens: tuple[int, ...]
    cached_tokens: tuple[int, ...]
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    repeats: int = 3
    steps: int = 64


class MeasurableRange(NamedTuple):
    """The limits of what can be measured: the longest context, and the KV cache of one rank."""

    context_tokens: int
    kv_tokens: int


class PrefillRow(NamedTuple):
    """A row of `prefill` in a profile: how long a prompt of new tokens behind cached ones takes."""

    new_tokens: int
    cached_tokens: int
    ms: float


class DecodeRow(NamedTuple):
    """A row of `decode` in a profile: how long one step of a batch takes."""

    batch_size: int
    context_tokens: int
    itl_ms: float


def capacity(server: oe.ServerInfo, model: oe.ModelInfo, kv_tokens: int | None) -> MeasurableRange:
    """The limits that a worker reports; `kv_tokens`, if given, replaces the KV cache that it reports.

    Raises `UsageError` if the KV cache is neither reported nor given.
    """
    ranks = max(1, server.parallelism.data_parallel_size)
    said = server.capacity.total_kv_blocks * server.capacity.kv_block_size // ranks
    if kv_tokens is None and not said:
        raise UsageError("the worker does not say how much KV cache it has: give --kv-capacity")
    total = kv_tokens or said
    return MeasurableRange(model.max_context_length or total, total)


async def measure_prefill(
    bench: Bench,
    plan: MeasurePlan,
    limit: MeasurableRange,
    *,
    rng: random.Random,
    on_row: Callable[[str], None],
    into: list[PrefillRow] | None = None,
) -> list[PrefillRow]:
    """Measure the prefill rows of the plan that fit into the worker's limits.

    `on_row` is called with a line of text for each row, also for one that is left out. Rows are appended to
    `into` as they are measured, so that a caller who cancels this keeps them.
    """
    rows = [] if into is None else into
    for cached in plan.cached_tokens:
        prefix = fresh(cached, rng)
        for new in plan.new_tokens:
            if new + cached + 1 > min(limit):
                on_row(f"prefill {new} + {cached} cached: left out, more than the worker takes")
                continue
            seconds = []
            try:
                if cached:
                    await bench.prefill([*prefix, *fresh(1, rng)])
                for _ in range(plan.repeats):
                    for _ in range(MOST_TRIES):
                        timed = await bench.prefill([*prefix, *fresh(new, rng)])
                        if timed.cached_tokens <= cached:
                            break
                    if timed.cached_tokens == cached:
                        seconds.append(timed.seconds)
            except UsageError as error:
                on_row(f"prefill {new} + {cached} cached: left out, {error}")
                continue
            if not seconds:
                on_row(f"prefill {new} + {cached} cached: left out, the worker had not cached that")
                continue
            rows.append(PrefillRow(new, cached, median(seconds) * 1000.0))
            on_row(f"prefill {new} + {cached} cached: {rows[-1].ms:.2f} ms")
    return rows


async def measure_decode(
    bench: Bench,
    plan: MeasurePlan,
    limit: MeasurableRange,
    *,
    max_batch: int,
    rng: random.Random,
    on_row: Callable[[str], None],
    into: list[DecodeRow] | None = None,
) -> list[DecodeRow]:
    """Measure the decode rows of the plan that fit into the worker's limits, as `measure_prefill` does."""
    rows = [] if into is None else into
    for context in plan.contexts:
        for batch in plan.batches:
            name = f"decode {batch} x {context}"
            longest = context + plan.steps
            if (
                batch > max_batch
                or longest > limit.context_tokens
                or batch * longest > limit.kv_tokens
            ):
                on_row(f"{name}: left out, more than the worker takes")
                continue
            found = []
            try:
                for _ in range(plan.repeats):
                    # So that in the middle of the output the context is that of the row.
                    n_prompt = max(1, context - plan.steps // 2)
                    prompts = [fresh(n_prompt, rng) for _ in range(batch)]
                    step_s = itl_s(await bench.decode(prompts, plan.steps))
                    if step_s is not None:
                        found.append(step_s)
            except UsageError as error:
                on_row(f"{name}: left out, {error}")
                continue
            if not found:
                on_row(f"{name}: left out, the batch was never whole for {MIN_STEPS} steps")
                continue
            rows.append(DecodeRow(batch, context, median(found) * 1000.0))
            on_row(f"{name}: {rows[-1].itl_ms:.3f} ms")
    return rows


def itl_s(streams: Sequence[TimedStream]) -> float | None:
    """Mean seconds of a step while all of these streams decoded; None: fewer than `MIN_STEPS` steps."""
    start_s = max(stream.ticks[0].at_s for stream in streams)
    end_s = min(stream.ticks[-1].at_s for stream in streams)
    means = []
    for stream in streams:
        inside = [tick for tick in stream.ticks if start_s <= tick.at_s <= end_s]
        n_tokens = sum(tick.n_tokens for tick in inside[1:])
        if n_tokens < MIN_STEPS:
            return None
        means.append((inside[-1].at_s - inside[0].at_s) / n_tokens)
    return fmean(means)


def fresh(n_tokens: int, rng: random.Random) -> list[int]:
    """Random token ids from a range that every vocabulary has, for a prompt that nobody has cached."""
    return [rng.randrange(100, 20_000) for _ in range(n_tokens)]


def measured_content(
    prefill: Sequence[PrefillRow],
    decode: Sequence[DecodeRow],
    *,
    model: str,
    system: str,
    engine: str,
    source: str,
    tp: int,
    kv_capacity_tokens: int,
    kv_bytes_per_token: int,
    is_whole: bool = True,
) -> dict[str, object]:
    """The content of a profile file with these rows.

    Raises `UsageError` for a row that took no time and, where `is_whole`, for a kind without rows.
    """
    for kind, rows in (("prefill", prefill), ("decode", decode)):
        if not rows and is_whole:
            raise UsageError(f"no {kind} row could be measured")
        if any(not 0.0 < row[2] < math.inf for row in rows):
            raise UsageError(f"a {kind} row took no time at all: the worker is not a real one")
    return {
        "schema": 1,
        "model": model,
        "system": system,
        "engine": engine,
        "source": source,
        "prefill_columns": ["new_tokens", "cached_tokens", "ms"],
        "decode_columns": ["batch_size", "context_tokens", "itl_ms"],
        "kv_bytes_per_token": kv_bytes_per_token,
        "tp": {
            str(tp): {
                "kv_capacity_tokens": kv_capacity_tokens,
                "prefill": [[*row[:2], round(row.ms, 4)] for row in prefill],
                "decode": [[*row[:2], round(row.itl_ms, 5)] for row in decode],
            }
        },
    }
