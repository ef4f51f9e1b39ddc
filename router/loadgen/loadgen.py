"""A load client: open loop (each request at its time, whatever became of those before it) or closed loop.

It speaks OpenEngine like any client, over the `Worker` port. Times are the client's own, so they have the
gateway's queues and relays in them.
"""

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import NamedTuple

import anyio
import grpc
import numpy as np
from google.protobuf.message import DecodeError

from slagate.proto import gateway_pb2 as gw
from slagate.proto import openengine_pb2 as oe
from slagate.proto.rpc.status import OK, Status
from slagate.router.request.metadata import RECEIPT_TRAILER
from slagate.workers.errors import status_of_engine_error
from slagate.workers.runtime.clock import monotonic_s
from slagate.workers.worker import Worker


class LoadRequest(NamedTuple):
    """One request to send, `at_s` after the start of the run."""

    at_s: float
    request_id: str
    data: bytes  # serialised GenerateRequest
    metadata: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """One request that has ended: its answer, its latencies, and what was wrong with it."""

    request_id: str
    # Sent so much after its time; above a few ms the client was the bottleneck.
    late_s: float
    ttft_s: float | None  # None: no token came
    itl_s: float | None  # mean; None: fewer than two tokens
    tokens: tuple[int, ...]
    status: Status  # an error event of the stream counts as its status
    fault: str  # how the stream broke the contract; empty: it did not
    receipt: gw.Receipt | None
    e2e_s: float  # from sending to the end of the call

    @property
    def failed(self) -> bool:
        """Whether its status is not OK; a `fault` alone is no failure."""
        return self.status.code is not grpc.StatusCode.OK


@dataclass(slots=True)
class Progress:
    """Live counts of a run."""

    n_sent: int = 0
    n_done: int = 0
    n_failed: int = 0
    n_tokens: int = 0


class StreamProbe:
    """The sink of one request: keeps its tokens and times, and checks the stream against the contract."""

    def __init__(self, request_id: str, *, now_s: Callable[[], float], progress: Progress) -> None:
        self.ended = anyio.Event()
        self._request_id = request_id
        self._now_s = now_s
        self._progress = progress
        self._sent_s = now_s()
        self._first_s: float | None = None
        self._last_s = 0.0
        self._ended_s = self._sent_s
        self._tokens: list[int] = []
        self._terminal = ""
        self._engine_error: oe.EngineError | None = None
        self._fault = ""
        self._status = OK

    def message(self, data: bytes, /) -> None:
        """Take one serialised `GenerateResponse`."""
        now_s = self._now_s()
        try:
            response = oe.GenerateResponse.FromString(data)
        except DecodeError:
            self._note_fault("a response that cannot be read")
            return
        event = response.WhichOneof("event")
        if response.request_id != self._request_id:
            self._note_fault(f"a response for request {response.request_id!r}")
        if self._terminal:
            self._note_fault(f"{event} after {self._terminal}")
        elif event == "token":
            self._add_tokens([token.token_id for token in response.token.tokens], now_s)
        elif event == "finished":
            self._terminal = event
            if response.usage.completion_tokens != len(self._tokens):
                self._note_fault(f"usage of {response.usage.completion_tokens} completion tokens")
        elif event == "error":
            self._terminal = event
            self._engine_error = response.error
        else:
            self._note_fault(f"an event {event} that no client asked for")

    def finish(self, status: Status, /) -> None:
        """Take the end of the call."""
        self._status = status
        self._ended_s = self._now_s()
        self.ended.set()

    def served(self, *, late_s: float) -> ServedRequest:
        """The result, once `ended` is set; `late_s` is how long after its time the request was sent."""
        status = self._status
        if status.code is grpc.StatusCode.OK and self._engine_error is not None:
            status = status_of_engine_error(self._engine_error)._replace(trailers=status.trailers)
        if status.code is grpc.StatusCode.OK and not self._terminal:
            self._note_fault("no finished event")
        n_tokens = len(self._tokens)
        first_s, itl_s = self._first_s, None
        if first_s is not None and n_tokens > 1:
            itl_s = (self._last_s - first_s) / (n_tokens - 1)
        return ServedRequest(
            request_id=self._request_id,
            late_s=late_s,
            ttft_s=None if first_s is None else first_s - self._sent_s,
            itl_s=itl_s,
            tokens=tuple(self._tokens),
            status=status,
            fault=self._fault,
            receipt=_receipt(status),
            e2e_s=self._ended_s - self._sent_s,
        )

    def _add_tokens(self, tokens: list[int], now_s: float) -> None:
        if not tokens:
            return
        self._last_s = now_s
        if self._first_s is None:
            self._first_s = now_s
        self._tokens += tokens
        self._progress.n_tokens += len(tokens)

    def _note_fault(self, fault: str) -> None:
        # The first one counts: those after it are usually its consequences.
        self._fault = self._fault or fault


def _receipt(status: Status) -> gw.Receipt | None:
    raw = dict(status.trailers).get(RECEIPT_TRAILER)
    if not isinstance(raw, bytes):
        return None
    try:
        return gw.Receipt.FromString(raw)
    except DecodeError:
        return None


def mismatch(served: ServedRequest, expected: Sequence[int]) -> str:
    """How a stream differs from the reference continuation, in words; empty when it does not.

    The tokens of a failed request must be the right ones as far as they go.
    """
    if served.fault:
        return served.fault
    for at, (got, want) in enumerate(zip(served.tokens, expected, strict=False)):
        if got != want:
            return f"token {at} is {got}, not {want}"
    n_got, n_want = len(served.tokens), len(expected)
    if n_got > n_want or (n_got < n_want and not served.failed):
        return f"{n_got} tokens, not {n_want}"
    return ""


def _sender(
    timeout_s: float, on_change: Callable[[Progress], None], now_s: Callable[[], float]
) -> Callable[[Worker, LoadRequest, float], Awaitable[ServedRequest]]:
    """A function that sends one request, `late_s` after its time, and returns its result at the end."""
    progress = Progress()

    async def send(target: Worker, request: LoadRequest, late_s: float) -> ServedRequest:
        probe = StreamProbe(request.request_id, now_s=now_s, progress=progress)
        call = target.generate(request.data, request.metadata, probe, timeout_s=timeout_s)
        progress.n_sent += 1
        on_change(progress)
        try:
            await probe.ended.wait()
        finally:
            call.cancel()
        served = probe.served(late_s=late_s)
        progress.n_done += 1
        progress.n_failed += served.failed
        on_change(progress)
        return served

    return send


async def run_load(
    targets: Sequence[Worker],
    requests: Iterable[LoadRequest],
    *,
    timeout_s: float,
    on_change: Callable[[Progress], None],
    now_s: Callable[[], float] = monotonic_s,
) -> list[ServedRequest]:
    """Open loop: send every request at its time, spread over `targets`, and wait until all have ended.

    Results are in the order of sending. `requests` is read one ahead of its time, so that prompts need not
    all be in memory. `timeout_s` is each request's deadline. `on_change` is called when a request starts or
    ends. `now_s` measures latencies.
    """
    results: dict[int, ServedRequest] = {}
    send = _sender(timeout_s, on_change, now_s)
    started_s = anyio.current_time()

    async def serve(number: int, target: Worker, request: LoadRequest) -> None:
        late_s = anyio.current_time() - started_s - request.at_s
        results[number] = await send(target, request, late_s)

    async with anyio.create_task_group() as tasks:
        for number, (target, request) in enumerate(zip(cycle(targets), requests, strict=False)):
            await anyio.sleep_until(started_s + request.at_s)
            tasks.start_soon(serve, number, target, request)
    return [results[number] for number in sorted(results)]


async def run_callers(
    targets: Sequence[Worker],
    requests: Iterator[LoadRequest],
    *,
    concurrency: int,
    seconds: float | None,
    timeout_s: float,
    on_change: Callable[[Progress], None],
    results: list[ServedRequest],
    now_s: Callable[[], float] = monotonic_s,
) -> None:
    """Closed loop: each of `concurrency` callers sends its next request when its last one has ended.

    It ends when `requests` or `seconds` are used up and all that were sent have ended; `at_s` of requests
    does not count. Results are appended to `results` as requests end, so that a caller who cancels this
    keeps them. The other parameters are those of `run_load`.
    """
    send = _sender(timeout_s, on_change, now_s)
    started_s = anyio.current_time()

    async def caller(target: Worker) -> None:
        while seconds is None or anyio.current_time() - started_s < seconds:
            request = next(requests, None)
            if request is None:
                return
            results.append(await send(target, request, 0.0))

    async with anyio.create_task_group() as tasks:
        for _, target in zip(range(concurrency), cycle(targets), strict=False):
            tasks.start_soon(caller, target)


def percentiles_ms(
    seconds: Iterable[float | None], *, of: Sequence[int] = (50, 99)
) -> dict[str, float | None]:
    """Percentiles in ms, by name as "p50", of the seconds that are not None; without any, all are None."""
    ms = [value * 1000 for value in seconds if value is not None]
    return {f"p{q}": round(float(np.percentile(ms, q)), 3) if ms else None for q in of}
