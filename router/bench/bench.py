"""`slagate bench`: wait until a gateway is healthy, warm it up, measure it at each level of concurrency."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from time import process_time
from typing import Any, NamedTuple

import anyio
import grpc
import numpy as np
import rich.progress
from rich.console import Console

from slagate.proto import gateway_pb2 as gw
from slagate.proto import gateway_pb2_grpc as gw_grpc
from slagate.proto import openengine_pb2 as oe
from slagate.router.bench.report import LevelFigures, Targets, problem
from slagate.router.client import CLIENT_LISTENER, explain_failure, only_model
from slagate.router.loadgen.loadgen import LoadRequest, Progress, ServedRequest, run_callers
from slagate.router.loadgen.trace import TraceRequest, prompt_tokens
from slagate.router.request.metadata import ITL, TTFT
from slagate.workers.client.client import WorkerClient, connect_worker, unary
from slagate.workers.client.control import channel_to
from slagate.workers.errors import WorkerError
from slagate.workers.runtime.clock import monotonic_s
from slagate.workers.tls.files import TlsFiles
from slagate.workers.tls.reloading import ClientTls

CONNECTIONS = 8
"""Connections to the gateway: its processes share out connections, not requests."""

POLL_S = 0.5

BUSY_RATIO = 0.8
"""Share of one core from which on a load client measures itself, too."""

VOCAB_SIZE = 32_000
"""Prompts are made of token ids below this, which every model of today has."""


class FixedPrompts(NamedTuple):
    """Random prompts of one size, no two alike, so that no cache has any of them."""

    isl_tokens: int
    osl_tokens: int

    def prompts(self, rng: random.Random) -> Iterator[tuple[list[int], int]]:
        """Prompts, each with the number of tokens to answer it with, without end."""
        numbers = np.random.default_rng(rng.getrandbits(64))
        while True:
            prompt = numbers.integers(0, VOCAB_SIZE, self.isl_tokens)
            yield prompt.tolist(), self.osl_tokens

    def __str__(self) -> str:
        return f"ISL {self.isl_tokens}, OSL {self.osl_tokens}"


class TracePrompts(NamedTuple):
    """The prompts of a trace in its order, from the start again after its end, without its times.

    Requests that share a prefix in the trace share it here, within one pass.
    """

    name: str
    trace: Sequence[TraceRequest]

    def prompts(self, rng: random.Random) -> Iterator[tuple[list[int], int]]:
        """Yield prompts as `FixedPrompts.prompts` does; each pass has other tokens than the one before."""
        while True:
            # Without a salt a level would find in the caches what the level before it has left there.
            salt = rng.getrandbits(64)
            for request in self.trace:
                salted = request._replace(hash_ids=tuple(h ^ salt for h in request.hash_ids))
                yield prompt_tokens(salted, VOCAB_SIZE).tolist(), request.osl_tokens

    def __str__(self) -> str:
        return f"trace {self.name}"


Prompts = FixedPrompts | TracePrompts


def load_requests(
    prompts: Prompts, rng: random.Random, *, model: str, metadata: tuple[tuple[str, str], ...]
) -> Iterator[LoadRequest]:
    """Requests of these prompts, without end, each with an id of its own."""
    run_id = f"{rng.getrandbits(64):016x}"
    for number, (prompt, osl_tokens) in enumerate(prompts.prompts(rng)):
        request_id = f"bench-{run_id}-{number}"
        message = oe.GenerateRequest(
            request_id=request_id,
            model=model,
            token_ids=oe.TokenIds(ids=prompt),
            # So that all answers have the size that was asked for.
            stopping=oe.StoppingOptions(max_tokens=osl_tokens, ignore_eos=True),
        )
        yield LoadRequest(0.0, request_id, message.SerializeToString(), metadata)


class NotReadyError(Exception):
    """The gateway cannot be measured; the text says why."""


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """A run of `slagate bench`: its levels of concurrency, and what is sent at each."""

    levels: Sequence[int]  # callers at once
    prompts: Prompts
    targets: Targets
    n_requests: int | None  # of each level
    seconds: float | None  # or for how long each level begins requests
    per_caller: int  # without either: so many requests for each caller
    n_warmup: int
    wait_s: float  # for health
    timeout_s: float  # of a request
    seed: int
    model: str | None


@dataclass(slots=True)
class Measured:
    """The results so far; they are kept after an interruption."""

    model: str = ""
    n_workers: int | None = None
    levels: list[LevelFigures] = field(default_factory=list)


class ProgressLine:
    """Progress on stderr: one line that changes, or a line for each phase where it is no terminal."""

    def __init__(self, bar: rich.progress.Progress) -> None:
        self._bar = bar
        self._task: rich.progress.TaskID | None = None

    def start_phase(self, what: str, total: float | None) -> None:
        """Begin a phase of `total` requests or seconds; None: it is not known how many."""
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._task = self._bar.add_task(what, total=total, state="")
        if not self._bar.console.is_terminal:
            self.note(what)

    def update(self, done: float, state: str) -> None:
        """Show how much of the phase's total is done, and a text on its state."""
        assert self._task is not None
        self._bar.update(self._task, completed=done, state=state)

    def note(self, text: str) -> None:
        """Print a line that stays."""
        self._bar.console.print(f"slagate: {text}", markup=False, highlight=False, soft_wrap=True)


@contextmanager
def progress_line() -> Iterator[ProgressLine]:
    """Show a line of progress on stderr within the `with`."""
    columns = (
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.TextColumn("{task.fields[state]}"),
        rich.progress.TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    with rich.progress.Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        yield ProgressLine(bar)


async def run_bench(
    target: str,
    admin: str | None,
    plan: BenchPlan,
    measured: Measured,
    progress: ProgressLine,
    *,
    tls: TlsFiles | None,
) -> str:
    """Run a plan against a gateway, with results into `measured`; returns why it could not, or "".

    A caller who cancels this keeps the results so far. Raises `UsageError` where the gateway serves several
    models and the plan names none.
    """
    side = None if tls is None else ClientTls("command", tls)
    async with AsyncExitStack() as stack:
        gateways = [
            await stack.enter_async_context(connect_worker(target, tls=side))
            for _ in range(CONNECTIONS)
        ]
        stub: Any = None
        if admin is not None:
            stub = gw_grpc.GatewayStub(await stack.enter_async_context(channel_to(admin, side)))
        progress.start_phase(f"Waiting for {target}", None)
        try:
            measured.n_workers = await wait_healthy(
                gateways[0],
                stub,
                limit_s=plan.wait_s,
                on_state=lambda why: progress.update(0, why),
                explain=lambda error: explain_failure(
                    error.status, error.address or admin or target, tls, CLIENT_LISTENER
                ),
            )
            measured.model = plan.model or await only_model(gateways[0])
            sweep = Sweep(gateways, plan, measured, progress)
            await sweep.warm_up()
            for concurrency in plan.levels:
                await sweep.measure_level(concurrency)
        except NotReadyError as error:
            # Caught here, as the task groups of the connections would wrap it.
            return f"{target}: {error}"
        except WorkerError as error:
            return f"{target}: {error}"
    return ""


async def wait_healthy(
    gateway: WorkerClient,
    admin: Any,
    *,
    limit_s: float,
    on_state: Callable[[str], None],
    explain: Callable[[WorkerError], str] = str,
) -> int | None:
    """Wait until the gateway is ready and, with an `admin` stub, all its workers; returns their number.

    Without `admin` that is None. `on_state` gets the reason whenever it is not ready, `explain` turns an
    error into such a reason. Raises `NotReadyError` after `limit_s`, with the last one.
    """
    why = "no answer yet"
    with anyio.move_on_after(limit_s):
        while True:
            n_workers = None
            try:
                health = await gateway.health(oe.HealthRequest())
                why = _unhealthy(health)
                if not why and admin is not None:
                    listed: gw.ListPoolsResponse = await unary(
                        admin.ListPools, gw.ListPoolsRequest()
                    )
                    n_workers = sum(pool.workers for pool in listed.pools)
                    n_ready = sum(pool.workers_ready for pool in listed.pools)
                    why = "" if n_ready == n_workers else f"{n_ready} of {n_workers} workers ready"
            except WorkerError as error:
                why = explain(error)
                if error.status.code is grpc.StatusCode.UNIMPLEMENTED:
                    hint = "--target is the gateway's --listen, --admin its --admin"
                    raise NotReadyError(f"{why} {hint}") from None
            if not why:
                return n_workers
            on_state(why)
            # Polled: the state of another process sets no event here.
            await anyio.sleep(POLL_S)
    raise NotReadyError(f"is not ready after {limit_s:g} s: {why}")


def _unhealthy(health: oe.HealthResponse) -> str:
    if health.state == oe.HEALTH_STATE_READY:
        return ""
    said = [check.message for check in health.checks if check.message]
    return said[0] if said else oe.HealthState.Name(health.state)


class Sweep:
    """Measures the levels of one run, one after the other, over the same connections."""

    def __init__(
        self,
        gateways: Sequence[WorkerClient],
        plan: BenchPlan,
        measured: Measured,
        progress: ProgressLine,
        *,
        now_s: Callable[[], float] = monotonic_s,
        cpu_s: Callable[[], float] = process_time,
    ) -> None:
        self._gateways = gateways
        self._plan = plan
        self._measured = measured
        self._progress = progress
        self._now_s, self._cpu_s = now_s, cpu_s
        targets = ((TTFT, plan.targets.ttft_ms), (ITL, plan.targets.itl_ms))
        self._metadata = tuple((key, f"{ms:g}") for key, ms in targets if ms is not None)

    async def warm_up(self) -> None:
        """Send requests that do not count: for connections, caches, and what engines compile at first use.

        Raises `NotReadyError` when none of them is answered.
        """
        n_requests = self._plan.n_warmup
        if not n_requests:
            return
        results: list[ServedRequest] = []
        at_once = min(n_requests, max(self._plan.levels))
        self._progress.start_phase("Warming up", n_requests)
        await self._send("warm-up", at_once, n_requests, None, results)
        if self._note_failures("warm-up", results) == len(results):
            raise NotReadyError("no request of the warm-up was answered")

    async def measure_level(self, concurrency: int) -> None:
        """Measure one level of concurrency; what has ended so far is kept when this is cancelled."""
        plan = self._plan
        n_requests = plan.n_requests
        if n_requests is None and plan.seconds is None:
            n_requests = plan.per_caller * concurrency
        results: list[ServedRequest] = []
        total = plan.seconds if n_requests is None else n_requests
        self._progress.start_phase(f"{concurrency} at once", total)
        started_s, cpu_s = anyio.current_time(), self._cpu_s()
        finished = False
        try:
            await self._send(str(concurrency), concurrency, n_requests, plan.seconds, results)
            finished = True
        finally:
            seconds = anyio.current_time() - started_s
            busy = (self._cpu_s() - cpu_s) / seconds if seconds else 0.0
            if results:
                level = LevelFigures(concurrency, results, seconds, not finished, busy)
                self._measured.levels.append(level)
        self._note_failures(f"{concurrency} at once", results)
        if busy > BUSY_RATIO:
            self._progress.note(
                f"{concurrency} at once: this process was busy {busy:.0%} of the time, so latencies "
                "are partly its own"
            )

    def _note_failures(self, phase: str, results: Sequence[ServedRequest]) -> int:
        """Note how many failed, with the first one's reason; returns their number."""
        failed = [one for one in results if problem(one) is not None]
        if failed:
            reason = failed[0].status.message or failed[0].fault
            self._progress.note(
                f"{phase}: {len(failed)} of {len(results)} failed, the first with "
                f"{problem(failed[0])}: {reason}"
            )
        return len(failed)

    async def _send(
        self,
        phase: str,
        concurrency: int,
        n_requests: int | None,
        seconds: float | None,
        results: list[ServedRequest],
    ) -> None:
        plan = self._plan
        rng = random.Random(f"{plan.seed}/{phase}")
        endless = load_requests(
            plan.prompts, rng, model=self._measured.model, metadata=self._metadata
        )
        started_s = anyio.current_time()

        def show(load: Progress) -> None:
            spent_s = anyio.current_time() - started_s
            done = min(spent_s, seconds or 0.0) if n_requests is None else load.n_done
            rate = load.n_tokens / spent_s if spent_s else 0.0
            self._progress.update(done, f"{load.n_failed} failed, {rate:,.0f} tokens/s")

        await run_callers(
            self._gateways,
            islice(endless, n_requests),
            concurrency=concurrency,
            seconds=seconds,
            timeout_s=plan.timeout_s,
            on_change=show,
            results=results,
            now_s=self._now_s,
        )
