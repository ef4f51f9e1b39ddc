"""One run: a trace's requests through the gateway's own graph, over simulated workers, in virtual time.

The graph is the one that serves, from `generate` to the worker port; no HTTP/2 and no sockets are in it.
"""

import asyncio
import gc
import random
import time
from array import array
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from hashlib import blake2b

import anyio
import grpc

from slagate.pools.grid.grid import Stage
from slagate.router.app import App, build
from slagate.router.generate import generate
from slagate.router.replay.client import Answer, Ask
from slagate.router.replay.fleet import Imperfection, SimFleet, simulated_workers
from slagate.router.replay.invariants import check_always, check_idle, check_index
from slagate.router.replay.network import FarWorker
from slagate.router.replay.policies.choose import Router
from slagate.router.replay.policies.noise import NoisyChoice
from slagate.router.request.call import ClientCall
from slagate.router.request.settings import Settings
from slagate.workers.runtime import virtual_loop
from slagate.workers.serving.sim import BLOCK_TOKENS
from slagate.workers.sim.args import END_ID, VOCAB_SIZE
from slagate.workers.sim.kv_cache.blocks import AnswerLength, continuation
from slagate.workers.sim.llm import SimLLM
from slagate.workers.trtllm.worker import TrtllmWorker
from slagate.workers.worker import Worker

YOUNG_OBJECTS = 100_000
"""The collector's threshold for young objects: events of a prompt are tens of thousands, for a moment."""

TIMEOUT_S = 3600.0
"""Of each request: far above any target, so that what is late is served late, as it is by a fleet."""

STARTED_S = 1.5
"""Before the first request, for all workers to be known: each is probed every second."""

SAMPLE_S = 0.05
"""Between two looks at what waits and what is idle."""


@dataclass(slots=True)
class Idleness:
    """How much the workers of one pool had nothing to compute, in looks at one worker."""

    n_looks: int = 0
    n_idle: int = 0
    n_idle_while_waiting: int = 0  # a request of the same stage waited meanwhile


@dataclass(slots=True)
class Played:
    """What came of a run."""

    answers: list[Answer]
    idleness: dict[str, Idleness]  # by pool
    cpu_s: float = 0.0
    seconds: float = 0.0  # of virtual time, from the first arrival to the end of the last answer


def play(
    fleet: SimFleet,
    asks: Sequence[Ask],
    router: Router,
    imperfection: Imperfection,
    seed: int,
    on_ended: Callable[[], None] = lambda: None,
) -> Played:
    """Serve the requests, each at its time; `on_ended` is called as each has ended.

    Raises `AssertionError` where an invariant does not hold.
    """
    lengths: dict[bytes, int] = {}
    for ask in asks:
        # Of equal prompts the first has its length, and the others have the same.
        lengths.setdefault(_digest(ask.tokens.tobytes()), ask.answer_tokens)
    with _rare_collections():
        began_s = time.process_time()
        played = virtual_loop.run(_play, fleet, asks, router, imperfection, seed, lengths, on_ended)
        played.cpu_s = time.process_time() - began_s
    return played


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Have the collector look at new objects only, and rarely: nobody waits for it, and the run ends."""
    before, is_frozen = gc.get_threshold(), gc.get_freeze_count() > 0
    gc.collect()
    if not is_frozen:
        gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 10, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        if not is_frozen:
            gc.unfreeze()  # which forgets what somebody else had frozen too


def _digest(packed: bytes) -> bytes:
    return blake2b(packed, digest_size=16).digest()


async def _play(
    fleet: SimFleet,
    asks: Sequence[Ask],
    router: Router,
    imperfection: Imperfection,
    seed: int,
    lengths: Mapping[bytes, int],
    on_ended: Callable[[], None],
) -> Played:
    running = _running(fleet, router, imperfection, seed, lambda packed: lengths[_digest(packed)])
    async with running as (app, workers):
        played = Played([], {pool.name: Idleness() for pool in fleet.pools})
        now_s = asyncio.get_running_loop().time
        first_s = now_s()
        async with anyio.create_task_group() as looking:
            looking.start_soon(_look, fleet, app, workers, played)
            async with anyio.create_task_group() as clients:
                for ask in asks:
                    await anyio.sleep_until(first_s + ask.arrival_s)
                    answer = Answer(ask, now_s)
                    played.answers.append(answer)
                    clients.start_soon(_client, app, answer, fleet.model, on_ended)
            played.seconds = now_s() - first_s
            looking.cancel_scope.cancel()
        await check_idle(app, workers, n_requests=len(asks))
        if router.policy == "slagate":
            check_index(app, workers)
        window_tokens = app.fleet.context_window(fleet.model)
        assert window_tokens is not None, "every simulated engine says it"
        _check_tokens(played.answers, lengths, fleet.model, window_tokens)
    return played


@asynccontextmanager
async def _running(
    fleet: SimFleet,
    router: Router,
    imperfection: Imperfection,
    seed: int,
    answer_tokens: Callable[[bytes], int],
) -> AsyncIterator[tuple[App, Mapping[str, TrtllmWorker]]]:
    """A gateway over the fleet's workers, all of them ready."""
    now_s = asyncio.get_running_loop().time
    first_s = now_s() + STARTED_S
    sigma = imperfection.prediction_noise
    async with AsyncExitStack() as stack:
        workers = await stack.enter_async_context(
            simulated_workers(
                fleet, imperfection, seed=seed, first_s=first_s, answer_tokens=answer_tokens
            )
        )

        @asynccontextmanager
        async def connect(address: str) -> AsyncIterator[Worker]:
            yield FarWorker(
                workers[address],
                latency_s=imperfection.latency_s,
                events_latency_s=imperfection.events_late_s or imperfection.latency_s,
                load_every_s=imperfection.load_every_s,
            )

        app = await stack.enter_async_context(
            build(
                fleet.config,
                Settings(policy=router.policy, default_timeout_s=TIMEOUT_S, max_waiting=1 << 30),
                connect=connect,
                now_s=now_s,
                unix_s=now_s,
                rng=random.Random(seed),
                choose=NoisyChoice(router.choose, sigma, seed) if sigma else router.choose,
            )
        )
        await anyio.sleep_until(first_s)
        assert not app.fleet.unready_stages(), "every worker is up"
        yield app, workers


async def _client(app: App, answer: Answer, model: str, on_ended: Callable[[], None]) -> None:
    ask = answer.ask
    call = ClientCall(
        data=ask.request(model),
        metadata=ask.metadata(),
        peer=f"client-{ask.row.number}",
        timeout_s=None,
        out=answer,
    )
    await generate(call, app.gateway)
    on_ended()


async def _look(
    fleet: SimFleet, app: App, workers: Mapping[str, TrtllmWorker], played: Played
) -> None:
    """Count again and again which workers are idle; check what holds at any moment."""
    stages: dict[Stage, dict[str, list[SimLLM]]] = {}
    for pool in fleet.pools:
        engines = [workers[address].llm for address in pool.addresses]
        stages.setdefault(pool.stage, {})[pool.name] = engines
    while True:
        await anyio.sleep(SAMPLE_S)
        check_always(app)
        waits_here = app.gateway.dispatcher.n_waiting > 0
        for pools in stages.values():
            waits = waits_here or any(one.n_waiting for of in pools.values() for one in of)
            for name, engines in pools.items():
                n_idle = len(engines) - sum([engine.is_computing for engine in engines])
                idleness = played.idleness[name]
                idleness.n_looks += len(engines)
                idleness.n_idle += n_idle
                idleness.n_idle_while_waiting += n_idle if waits else 0


def _check_tokens(
    answers: Sequence[Answer], lengths: Mapping[bytes, int], model: str, window_tokens: int
) -> None:
    """I7: what a client got is what the engine says, from the start, without a hole, and all of it.

    An answer that fills the context window ends there.
    """
    for answer in answers:
        ask, tokens = answer.ask, answer.tokens
        packed = ask.tokens.tobytes()
        n_answer = lengths[_digest(packed)]
        expected = continuation(
            array("I", packed),
            len(tokens),
            model=model,
            block_tokens=BLOCK_TOKENS,
            vocab_size=VOCAB_SIZE,
            answer=AnswerLength(n_answer, END_ID),
        )
        assert tokens == expected, ask.row
        assert answer.status is not None
        assert answer.status.code is not grpc.StatusCode.INTERNAL, answer.status.message
        if answer.is_answered:
            n_expected = ask.max_tokens if ask.ignore_eos else min(n_answer, ask.max_tokens)
            assert len(tokens) == min(n_expected, window_tokens - len(ask.tokens)), ask.row
