"""A prefill and a decode worker process that die, freeze and come back while handoffs run between them.

Legs are sent straight to the workers, as the gateway sends them. Every leg must end, within its bound, in
the right tokens or in an error that says what happened to the KV cache or to the worker.
"""

import random
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import grpc
from anyio.abc import TaskGroup, TaskStatus

from slagate.proto import openengine_pb2 as oe
from slagate.workers.client.client import connect_worker
from slagate.workers.errors import WorkerError
from slagate.workers.legs import decode_leg, prefill_leg
from slagate.workers.runtime.clock import monotonic_s
from slagate.workers.worker import Worker
from support.engine.tokens import expected
from support.gateway.processes import MODEL, Process, eventually, running, worker_arguments
from support.worker.sinks import KeepingSink

PULL_LIMIT_S = 1.0
PARK_LIMIT_S = 3.0
LEG_LIMIT_S = 6.0
"""A leg's deadline: what a frozen worker's client waits for. Nothing may take longer."""

MARGIN_S = 4.0
"""What a busy machine may add before an end counts as late."""

SHORT_FREEZE_S = 0.3
LONG_FREEZE_S = 2 * PULL_LIMIT_S

N_TOKENS = 6

_TAKEN = ("kv_slots_taken", "kv_slots_quarantined", "kv_sessions_offered")
"""Of these a transport reports those it has."""
GONE = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}


@dataclass
class Tally:
    """How the transfers of a run ended."""

    ends: Counter[str] = field(default_factory=Counter)
    longest_s: float = 0.0
    wrong: list[str] = field(default_factory=list)


class Side:
    """One worker that may be replaced; `process` is the one that runs now."""

    def __init__(self, role: str, folder: Path, options: tuple[str, ...]) -> None:
        self.role = role
        self._folder = folder
        self._options = options
        self._stack = ExitStack()
        self._n_starts = 0
        self.up = threading.Event()
        self.start()

    def start(self) -> None:
        """A new process, with a new address."""
        self._n_starts += 1
        arguments = worker_arguments(self.role, *self._options)
        name = f"{self.role}-{self._n_starts}"
        self.process: Process = self._stack.enter_context(running(name, arguments, self._folder))
        self.up.set()

    def replace(self) -> None:
        """SIGKILL, then another process."""
        self.up.clear()
        self.process.kill()
        self.start()

    def close(self) -> None:
        self._stack.close()


@contextmanager
def sides(
    folder: Path,
    transport: str,
    *,
    pull_limit_s: float = PULL_LIMIT_S,
    park_limit_s: float = PARK_LIMIT_S,
) -> Iterator[tuple[Side, Side]]:
    """A prefill and a decode worker without engine times."""
    options = (
        *("--transport", transport, "--time-scale", "0", "--kv-blocks", "2000"),
        *("--kv-transfer-timeout", str(pull_limit_s), "--handoff-timeout", str(park_limit_s)),
    )
    with ExitStack() as stack:
        both = []
        for role in ("prefill", "decode"):
            side = Side(role, folder, options)
            stack.callback(side.close)
            both.append(side)
        yield both[0], both[1]


async def transfers(
    pair: tuple[Side, Side],
    n_transfers: int,
    *,
    seed: int,
    n_clients: int = 8,
    strike: Callable[[int], Callable[[], None] | None] = lambda number: None,
    leg_limit_s: float = LEG_LIMIT_S,
    releases: bool = False,
) -> Tally:
    """Run transfers over whatever processes the pair has; `strike(number)` may name a thing to do.

    What was parked for a decode leg that failed is left to its time limit, unless it `releases` that.
    """
    tally = Tally()
    numbers = iter(range(n_transfers))
    prompts = random.Random(seed)

    async def client(links: _Links) -> None:
        for number in numbers:
            size = prompts.randint(1, 700)
            prompt = [prompts.randrange(100_000) for _ in range(size)]
            blow = strike(number)
            if blow is not None:
                await anyio.to_thread.run_sync(blow)
            for side in pair:
                # Else the refusals of a starting process would use up most of the run.
                if not side.up.is_set():
                    await anyio.to_thread.run_sync(side.up.wait)
            started_s = monotonic_s()
            legs = _Legs(pair, links, leg_limit_s, releases=releases)
            end = await legs.transfer(f"t{seed}-{number}", prompt)
            tally.longest_s = max(tally.longest_s, monotonic_s() - started_s)
            tally.ends[end.split(":")[0]] += 1
            if end.startswith("WRONG"):
                tally.wrong.append(f"transfer {number}: {end}")

    async with anyio.create_task_group() as keeping:
        links = _Links(keeping)
        async with anyio.create_task_group() as tasks:
            for _ in range(n_clients):
                tasks.start_soon(client, links)
        keeping.cancel_scope.cancel()
    return tally


class _Links:
    """A connection to each process that has been asked for, for as long as the task group runs."""

    def __init__(self, tasks: TaskGroup) -> None:
        self._tasks = tasks
        self._workers: dict[Process, Worker] = {}

    async def worker(self, process: Process) -> Worker:
        """The one to this process, made where there is none yet."""
        if process not in self._workers:
            self._workers[process] = await self._tasks.start(self._keep, process)
        return self._workers[process]

    async def _keep(self, process: Process, *, task_status: TaskStatus[Worker]) -> None:
        async with connect_worker(process.address) as worker:
            task_status.started(worker)
            await anyio.sleep_forever()


class _Legs:
    """One prefill and one decode leg."""

    def __init__(
        self, pair: tuple[Side, Side], links: _Links, limit_s: float, *, releases: bool
    ) -> None:
        self._pair = pair
        self._links = links
        self._limit_s = limit_s
        self._releases = releases

    async def transfer(self, request_id: str, prompt: list[int]) -> str:
        """How they ended."""
        data = oe.GenerateRequest(
            request_id=request_id,
            model=MODEL,
            token_ids=oe.TokenIds(ids=prompt),
            stopping=oe.StoppingOptions(max_tokens=N_TOKENS, ignore_eos=True),
        ).SerializeToString()
        prefill = await self._links.worker(self._pair[0].process)
        leg = prefill_leg(data, f"{request_id}-p")
        ready = await leg_over(prefill, leg, limit_s=self._limit_s)
        if ready.events != ["prefill_ready"]:
            return _failure("prefill", ready)
        session = ready.messages[0].prefill_ready.kv_session
        leg = decode_leg(data, f"{request_id}-d", session=session, max_tokens=None)
        decode = await self._links.worker(self._pair[1].process)
        sink = await leg_over(decode, leg, limit_s=self._limit_s)
        if sink.tokens != expected(prompt, len(sink.tokens)):
            return f"WRONG: tokens {sink.tokens}"
        if sink.code is grpc.StatusCode.OK and sink.events[-1] == "finished":
            return "ok" if len(sink.tokens) == N_TOKENS else f"WRONG: {len(sink.tokens)} tokens"
        if self._releases:
            with suppress(WorkerError):  # it may be dead as well, or the session used up
                await prefill.abort(oe.AbortRequest(kv_session=session))
        return _failure("decode", sink)


async def leg_of(process: Process, data: bytes, *, limit_s: float = LEG_LIMIT_S) -> KeepingSink:
    """One leg, straight to a worker over a connection of its own, and what came of it."""
    async with connect_worker(process.address) as worker:
        return await leg_over(worker, data, limit_s=limit_s)


async def leg_over(worker: Worker, data: bytes, *, limit_s: float = LEG_LIMIT_S) -> KeepingSink:
    """One leg over this connection, and what came of it."""
    sink = KeepingSink()
    call = worker.generate(data, (), sink, timeout_s=limit_s)
    try:
        return await sink.done()
    finally:
        call.cancel()


def _failure(stage: str, sink: KeepingSink) -> str:
    if sink.code in GONE:
        return f"{stage} {sink.code.name}"
    error = sink.messages[-1].error if sink.messages else oe.EngineError()
    if stage == "decode" and error.code == oe.ERROR_CODE_KV_TRANSFER_FAILED:
        return f"decode KV_TRANSFER_FAILED: {error.message}"
    return f"WRONG: {stage} ended with {sink.status} after {sink.events}, {error}"


async def load(process: Process) -> oe.LoadInfo | None:
    """What the worker says of its load, or None while it cannot."""
    async with connect_worker(process.address) as worker:
        try:
            return await _ask(worker)
        except WorkerError:
            return None


async def _ask(worker: Worker) -> oe.LoadInfo:
    return await worker.load(oe.GetLoadRequest())


def comes_to_rest(side: Side) -> None:
    """Nothing runs, is parked, holds a block or a slot of the transport any more."""

    def rests() -> bool:
        info = anyio.run(load, side.process)
        return info is not None and not (
            info.running_requests
            or info.active_kv_sessions
            or info.used_kv_blocks
            or any(info.attributes.fields[name].number_value for name in _TAKEN)
        )

    eventually(rests, f"the {side.role} worker comes to rest")


def freeze(side: Side, seconds: float) -> Callable[[], None]:
    """SIGSTOP for that long; the process goes on afterwards."""
    process = side.process.popen

    def blow() -> None:
        process.send_signal(signal.SIGSTOP)
        try:
            anyio.run(anyio.sleep, seconds)
        finally:
            process.send_signal(signal.SIGCONT)

    return blow
