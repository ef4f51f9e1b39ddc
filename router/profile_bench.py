"""What `slagate profile measure` does to a worker: one prompt, or a batch that decodes."""

import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import anyio
import grpc

from slagate.proto import openengine_pb2 as oe
from slagate.workers.clock import monotonic_s
from slagate.workers.errors import UsageError, status_of_engine_error
from slagate.workers.legs import decode_leg, prefill_leg
from slagate.workers.worker import OK, Status, Worker


class Timed(NamedTuple):
    """One prompt: seconds until its first token or its handoff, and what the worker had cached of it.

    `cached_tokens` is 0 where the worker does not say.
    """

    seconds: float
    cached_tokens: int


class Tick(NamedTuple):
    """Tokens that came at one moment."""

    at_s: float
    n_tokens: int


@dataclass(slots=True)
class Stream:
    """The sink of one request: when its tokens came, and what it ended in."""

    now_s: Callable[[], float]
    ticks: list[Tick] = field(default_factory=list)
    status: Status = OK
    usage: oe.Usage | None = None
    session: oe.KvSessionRef | None = None
    first_s: float | None = None
    ended: anyio.Event = field(default_factory=anyio.Event)

    def message(self, data: bytes, /) -> None:
        """Take one response."""
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
            self.ticks.append(Tick(now_s, len(response.token.tokens)))
        elif event == "prefill_ready":
            self.session = response.prefill_ready.kv_session

    def end(self, status: Status, /) -> None:
        """Take the end of the call."""
        if self.status.code is grpc.StatusCode.OK:
            self.status = status
        self.ended.set()


class Bench(Protocol):
    """A worker, or a pair of them, that prompts can be timed on."""

    async def prefill(self, prompt: Sequence[int]) -> Timed:
        """Process one prompt. Raises `UsageError` when the worker refuses it."""

    async def decode(self, prompts: Sequence[Sequence[int]], n_tokens: int) -> list[Stream]:
        """Have all prompts answered together, in `n_tokens` each. Raises `UsageError`."""


class AggBench:
    """One aggregated worker: prompts are put into its cache first, then asked again all at once."""

    def __init__(
        self,
        worker: Worker,
        model: str,
        *,
        timeout_s: float,
        now_s: Callable[[], float] = monotonic_s,
    ) -> None:
        self._worker, self._model = worker, model
        self._timeout_s, self._now_s = timeout_s, now_s

    async def prefill(self, prompt: Sequence[int]) -> Timed:
        """As `Bench.prefill`."""
        sent_s = self._now_s()
        return _timed(await self._ask(_request(self._model, prompt, 1)), sent_s)

    async def decode(self, prompts: Sequence[Sequence[int]], n_tokens: int) -> list[Stream]:
        """As `Bench.decode`."""
        for prompt in prompts:
            await self.prefill(prompt)
        return await _together(
            [(self._ask, _request(self._model, prompt, n_tokens)) for prompt in prompts]
        )

    async def _ask(self, request: bytes) -> Stream:
        return await _ask(self._worker, request, self._timeout_s, self._now_s)


class PairBench:
    """A prefill worker and a decode worker: handoffs are made first, then collected all at once."""

    def __init__(
        self,
        prefill: Worker,
        decode: Worker,
        model: str,
        *,
        timeout_s: float,
        now_s: Callable[[], float] = monotonic_s,
    ) -> None:
        self._prefill, self._decode, self._model = prefill, decode, model
        self._timeout_s, self._now_s = timeout_s, now_s

    async def prefill(self, prompt: Sequence[int]) -> Timed:
        """As `Bench.prefill`."""
        sent_s = self._now_s()
        stream = await self._first(_request(self._model, prompt, 1))
        await self._prefill.abort(oe.AbortRequest(kv_session=stream.session))
        return _timed(stream, sent_s)

    async def decode(self, prompts: Sequence[Sequence[int]], n_tokens: int) -> list[Stream]:
        """As `Bench.decode`."""
        legs = []
        for prompt in prompts:
            request = _request(self._model, prompt, n_tokens)
            session = (await self._first(request)).session
            assert session is not None
            leg = decode_leg(request, uuid.uuid4().hex, session=session, max_tokens=None)
            legs.append((self._second, leg))
        return await _together(legs)

    async def _first(self, request: bytes) -> Stream:
        leg = prefill_leg(request, uuid.uuid4().hex)
        stream = await _ask(self._prefill, leg, self._timeout_s, self._now_s)
        if stream.session is None:
            raise UsageError("the prefill worker gave no handoff for a prompt")
        return stream

    async def _second(self, leg: bytes) -> Stream:
        return await _ask(self._decode, leg, self._timeout_s, self._now_s)


def _request(model: str, prompt: Sequence[int], max_tokens: int) -> bytes:
    return oe.GenerateRequest(
        request_id=uuid.uuid4().hex,
        model=model,
        token_ids=oe.TokenIds(ids=prompt),
        stopping=oe.StoppingOptions(max_tokens=max_tokens, ignore_eos=True),
    ).SerializeToString()


async def _ask(
    worker: Worker, request: bytes, timeout_s: float, now_s: Callable[[], float]
) -> Stream:
    stream = Stream(now_s)
    call = worker.generate(request, (), stream, timeout_s=timeout_s)
    try:
        await stream.ended.wait()
    finally:
        call.cancel()
    if stream.status.code is not grpc.StatusCode.OK:
        code, message = stream.status.code.name, stream.status.message
        raise UsageError(f"the worker answered {code}: {message}")
    return stream


async def _together(
    asked: Sequence[tuple[Callable[[bytes], Awaitable[Stream]], bytes]],
) -> list[Stream]:
    streams: dict[int, Stream] = {}
    refusals: list[UsageError] = []

    async def one(at: int) -> None:
        ask, request = asked[at]
        try:
            streams[at] = await ask(request)
        except UsageError as error:
            refusals.append(error)

    async with anyio.create_task_group() as tasks:
        for at in range(len(asked)):
            tasks.start_soon(one, at)
    if refusals:
        raise refusals[0]
    return [streams[at] for at in range(len(asked))]


def _timed(stream: Stream, sent_s: float) -> Timed:
    if stream.first_s is None:
        raise UsageError("the worker ended a prompt without an answer")
    cached = 0 if stream.usage is None else stream.usage.cached_prompt_tokens
    return Timed(stream.first_s - sent_s, cached)
