"""What is left in a worker of the requests that clients gave up: nothing."""

import asyncio
import gc
import logging
import random
import sys
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path

import anyio
import grpc
import pytest
from anyio.abc import TaskGroup

from slagate.proto import openengine_pb2 as oe
from slagate.proto.rpc.sinks import Call
from slagate.proto.rpc.status import Status
from slagate.workers.kv_transfer.memory import MemoryExchange
from slagate.workers.legs import decode_leg, prefill_leg
from slagate.workers.runtime import virtual_loop
from support.engine.sim_llm import n_timers, until
from support.engine.workers import SimWorker, engine_worker, request
from support.seeds import is_long_run

N_REQUESTS, N_WARM = (50_000, 10_000) if is_long_run() else (4000, 1000)
WAVE = 250
HANDOFF_LIMIT_S = 1.0
LONGEST_S = 0.05
"""A request's life before it is given up: from waiting for a place over prefill to some tokens."""

OF_A_REQUEST = {
    "Allocation",
    "EngineRequest",
    "EngineStream",
    "OutputCursor",
    "OutputFeed",
    "RequestOutput",
    "SimSequence",
    "Task",
    "_Leg",
    "_Pull",
    "_Session",
}
ROLES = ("agg", "prefill", "decode")


class _Leg:
    """The sink of one leg, and how that is given up.

    By its call, at any time or in step with the engine, by its id, or by its deadline.
    """

    def __init__(self, run: "_Run", role: str, leg_id: str, data: bytes) -> None:
        self.n_messages = 0
        self.last = b""
        self.leg_id = leg_id
        self._run = run
        self._role = role
        self._timer: asyncio.TimerHandle | None = None
        self._is_over = False
        rng, worker = run.rng, run.workers[role].worker
        after_s = rng.uniform(0.0, LONGEST_S)
        how = rng.choice(("call", "step", "id", "deadline"))
        timeout_s = after_s if how == "deadline" else None
        call = worker.generate(data, (), self, timeout_s=timeout_s)
        if how != "deadline" and not self._is_over:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(after_s, self._give_up, call, how)

    def message(self, data: bytes, /) -> None:
        assert not self._is_over, "a message after the end"
        self.n_messages += 1
        self.last = data

    def finish(self, status: Status, /) -> None:
        assert not self._is_over, "a second end"
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()
        self._run.ended(self._role, self, status)

    def _give_up(self, call: Call, how: str) -> None:
        loop = asyncio.get_running_loop()
        iteration = self._run.workers[self._role].llm._engine.iteration
        if how == "step" and iteration is not None:
            # With what the engine brings at the end of its step, before anybody has looked at that.
            self._timer = loop.call_at(iteration.ends_s, call.cancel)
        elif how != "id":
            call.cancel()
        else:
            self._run.tasks.start_soon(self._run.abort, self._role, self.leg_id)


class _Run:
    """Requests in waves: some on one worker, some over two."""

    def __init__(self, workers: dict[str, SimWorker], tasks: TaskGroup, rng: random.Random) -> None:
        self.workers = workers
        self.tasks = tasks
        self.rng = rng
        self.n_open = self.n_legs = 0
        self.outcomes: Counter[tuple[str, grpc.StatusCode, bool]] = Counter()
        self._plain: dict[str, bytes] = {}

    async def wave(self, n_requests: int) -> None:
        """Start that many at once, and wait until the workers have heard the last of each."""
        for _ in range(n_requests):
            rng = self.rng
            prompt = [rng.randrange(20)] * rng.randint(1, 40) + [rng.randrange(1000)] * 9
            data = request("", prompt, rng.choice((1, 30, 30, 30))).SerializeToString()
            role = "agg" if rng.random() < 0.75 else "prefill"
            leg_id = self._next_id()
            if role == "prefill":
                self._plain[leg_id] = data
                data = prefill_leg(data, leg_id)
            else:
                data += oe.GenerateRequest(request_id=leg_id).SerializeToString()
            self.n_open += 1
            _Leg(self, role, leg_id, data)
        loop = asyncio.get_running_loop()
        while self.n_open or any(worker.inner.n_live for worker in self.workers.values()):
            await until(loop.time() + 0.01)
        assert self._plain == {}

    def ended(self, role: str, leg: _Leg, status: Status) -> None:
        self.n_open -= 1
        self.outcomes[role, status.code, leg.n_messages > 0] += 1
        plain = self._plain.pop(leg.leg_id, None)
        if plain is None or status.code is not grpc.StatusCode.OK:
            return
        if self.rng.random() < 0.3:
            # Its client went between the legs.
            self.n_open += 1
            self.tasks.start_soon(self.release, leg)
            return
        session = oe.GenerateResponse.FromString(leg.last).prefill_ready.kv_session
        leg_id = self._next_id()
        data = decode_leg(plain, leg_id, session=session, max_tokens=None)
        asyncio.get_running_loop().call_soon(_Leg, self, "decode", leg_id, data)
        self.n_open += 1

    async def abort(self, role: str, leg_id: str) -> None:
        await self.workers[role].worker.abort(oe.AbortRequest(request_id=leg_id))

    async def release(self, leg: _Leg) -> None:
        asked = oe.AbortRequest(request_id=leg.leg_id)
        if self.rng.random() < 0.5:
            response = oe.GenerateResponse.FromString(leg.last)
            asked = oe.AbortRequest(kv_session=response.prefill_ready.kv_session)
        await self.workers["prefill"].worker.abort(asked)
        self.n_open -= 1

    def _next_id(self) -> str:
        self.n_legs += 1
        return f"leg-{self.n_legs}"


def objects_of_requests() -> Counter[str]:
    """Objects alive of the kinds that belong to one request."""
    gc.collect()
    names = [type(one).__name__ for one in gc.get_objects()]
    return Counter(name for name in names if name in OF_A_REQUEST)


async def handoffs_are_over() -> None:
    """A worker counts a handoff as parked until its limit, whoever has collected it."""
    await until(asyncio.get_running_loop().time() + 2 * HANDOFF_LIMIT_S)


def resident_bytes() -> int:
    """Memory of this process, native included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_mem_01_nothing_is_left_of_requests_given_up_at_any_point(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """MEM-01, without gRPC: every table is empty; in the long run memory is flat from the 10,000th on."""
    # An abort of a request that has just ended is a warning of the engine's; pytest would keep each.
    caplog.set_level(logging.ERROR, logger="slagate.workers.sim.llm")

    async def scenario() -> None:
        exchange = MemoryExchange()
        transceiver = {"backend": "DEFAULT", "kv_transfer_timeout_ms": int(HANDOFF_LIMIT_S * 1000)}
        async with AsyncExitStack() as stack:
            workers = {
                role: await stack.enter_async_context(
                    engine_worker(
                        role,
                        transport=None if role == "agg" else exchange.transport(),
                        max_batch_size=64,
                        kv_cache_config={"max_tokens": 32 * 300},
                        stream_interval=2,
                        cache_transceiver_config=transceiver if role != "agg" else None,
                        worker_options={"kv_history_batches": 64},
                        # A pull takes about as long as a prefill.
                        sim_settings={"kv_block_bytes": 64, "transfer_bytes_per_s": 5e8},
                    )
                )
                for role in ROLES
            }
            tasks = await stack.enter_async_context(anyio.create_task_group())
            run = _Run(workers, tasks, random.Random(1))
            before = objects_of_requests()
            for n_before in range(0, N_REQUESTS, WAVE):
                if n_before == N_WARM:
                    await handoffs_are_over()
                    assert objects_of_requests() == before
                    warm_blocks, warm_bytes = sys.getallocatedblocks(), resident_bytes()
                await run.wave(WAVE)
            await handoffs_are_over()
            assert objects_of_requests() == before
            if is_long_run():
                # Before that what is remembered of the last requests, so many of them, still grows.
                assert sys.getallocatedblocks() - warm_blocks < (N_REQUESTS - N_WARM) / 5
                assert resident_bytes() - warm_bytes < 8 << 20
            # Handoffs that were collected are not counted any more, and polling has stopped.
            assert (n_timers(), exchange.n_offers) == (0, 0)
            for worker in workers.values():
                llm, inner = worker.llm, worker.inner
                assert (llm.n_running, llm.n_queued, llm.n_parked, llm.used_blocks) == (0, 0, 0, 0)
                assert (llm.n_unsafe_aborts, llm.kv_transfer_failures, llm.n_expired) == (0, 0, 0)
                assert (inner.n_live, inner._handoffs.n_parked) == (0, 0)
                assert not inner.fatal.is_set()
                load = await worker.worker.load(oe.GetLoadRequest())
                assert (load.running_requests, load.active_kv_sessions) == (0, 0)
            # Each kind of end, before the first message and after it.
            for role in ROLES:
                for code in (grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED):
                    for has_answered in (False, True) if role != "prefill" else (False,):
                        assert run.outcomes[role, code, has_answered] > N_REQUESTS / 500

    virtual_loop.run(scenario)
