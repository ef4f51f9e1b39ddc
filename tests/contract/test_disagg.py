"""The contract of the `Worker` port between prefill and decode: slow set-ups, handoffs left behind."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial, wraps
from typing import Any

import anyio
import grpc
import pytest

from slagate.pools.fleet.member import pair_of
from slagate.pools.inflight.pair_key import PairFit, fit
from slagate.proto import openengine_pb2 as oe
from slagate.workers.kv_transfer.memory import MemoryExchange, MemoryTransport
from slagate.workers.kv_transfer.transport import Blocks, Done
from slagate.workers.legs import decode_leg
from slagate.workers.runtime import virtual_loop
from slagate.workers.sim.api import VERSIONS, Llm11
from slagate.workers.sim.outputs import RequestOutput
from support.engine.sim_llm import until
from support.engine.workers import SimWorker, expected, request, sim
from support.worker.contract import DIRECT, Play, Setup, ask, hand_off, resume, start
from support.worker.sinks import KeepingSink

Code = grpc.StatusCode
SETUP_S = 3.0
direct = pytest.mark.parametrize("setup", DIRECT, ids=str)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    """In virtual time, of which there is enough for anything that ends."""

    async def main() -> None:
        with anyio.fail_after(600):
            await scenario()

    virtual_loop.run(main)


class SlowToMeet:
    """A `KvTransport` in memory that takes `SETUP_S` before its first pull from another one."""

    def __init__(self, inner: MemoryTransport, number: int) -> None:
        self.name = inner.name
        self.problem, self.counters = inner.problem, inner.counters
        self.acks, self.release, self.close = inner.acks, inner.release, inner.close
        self._inner = inner
        self._number = number
        self._known: set[int] = set()
        self._waiting: defaultdict[int, list[Callable[[], None]]] = defaultdict(list)

    def export(self, session_id: int, blocks: Blocks) -> bytes:
        return bytes([self._number]) + self._inner.export(session_id, blocks)

    def pull(self, descriptor: bytes, done: Done) -> None:
        peer = descriptor[0]
        go_on = partial(self._inner.pull, descriptor[1:], done)
        if peer in self._known:
            go_on()
            return
        if peer not in self._waiting:
            asyncio.get_running_loop().call_later(SETUP_S, self._met, peer)
        self._waiting[peer].append(go_on)

    def _met(self, peer: int) -> None:
        self._known.add(peer)
        for go_on in self._waiting.pop(peer):
            go_on()


@asynccontextmanager
async def strangers(setup: Setup) -> AsyncIterator[tuple[list[SimWorker], list[SimWorker]]]:
    """Two prefill and two decode workers that have not met."""
    exchange = MemoryExchange()
    async with AsyncExitStack() as stack:
        workers: list[SimWorker] = []
        for number, role in enumerate(("prefill", "prefill", "decode", "decode")):
            transport = SlowToMeet(exchange.transport(), number)
            made = setup.engine(role, transport=transport)
            workers.append(await stack.enter_async_context(made))
        yield workers[:2], workers[2:]
        for worker in workers:
            assert (worker.inner.n_live, worker.llm.used_blocks, worker.llm.n_parked) == (0, 0, 0)
            assert (worker.llm.n_unsafe_aborts, worker.llm.n_expired) == (0, 0)


def prompt_of(number: int) -> list[int]:
    """Of four blocks, none of which another prompt has."""
    return [1000 + number, *range(1, 100)]


@direct
def test_disagg_08_a_burst_after_a_cold_start_waits_for_one_set_up(setup: Setup) -> None:
    """DISAGG-08: 16 requests over four pairs that have to meet first, and no pair waits for another."""

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        ended_s: list[float] = []
        async with strangers(setup) as (prefill, decode):

            async def one(number: int) -> None:
                at = prefill[number % 2], decode[number // 2 % 2]
                leg = request(f"r{number}", prompt_of(number))
                session = await hand_off(at[0].worker, leg, leg_id=f"p{number}")
                sink = await resume(at[1].worker, leg, session, leg_id=f"d{number}")
                assert sink.tokens == expected(prompt_of(number), 8)
                ended_s.append(loop.time())

            for round_number, due_s in ((0, SETUP_S), (1, 0.0)):
                started_s = loop.time()
                ended_s.clear()
                async with anyio.create_task_group() as tasks:
                    for i in range(16):
                        tasks.start_soon(one, 100 * round_number + i)
                assert len(ended_s) == 16
                assert started_s + due_s <= min(ended_s)
                assert max(ended_s) < started_s + due_s + 0.5
            await prefill[0].llm.handoffs_collected()
            await prefill[1].llm.handoffs_collected()

    run(scenario)


@direct
def test_disagg_08_a_deadline_covers_the_set_up(setup: Setup) -> None:
    """DISAGG-08: 16 clients are answered in time, and what comes for them later is given back."""

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        async with strangers(setup) as (prefill, decode):
            ended_s: list[float] = []

            async def one(number: int) -> None:
                leg = request(f"r{number}", prompt_of(number))
                session = await hand_off(prefill[number % 2].worker, leg, leg_id=f"p{number}")
                data = decode_leg(
                    leg.SerializeToString(), f"d{number}", session=session, max_tokens=None
                )
                sink, started_s = KeepingSink(), loop.time()
                start(decode[number // 2 % 2].worker, data, sink, timeout_s=1.0)
                assert (await sink.done()).code is Code.DEADLINE_EXCEEDED
                assert sink.messages == []
                ended_s.append(loop.time() - started_s)

            async with anyio.create_task_group() as tasks:
                for i in range(16):
                    tasks.start_soon(one, i)
            assert ended_s == pytest.approx([1.0] * 16)
            assert [worker.llm.n_running for worker in decode] == [8, 8]
            await until(SETUP_S + 0.5)

    run(scenario)


SMALL = {"kv_cache_config": {"max_tokens": 50 * 4 * 32}}
"""Just enough for 50 prompts of four blocks."""


@direct
def test_disagg_09_handoffs_that_nobody_collects_end_at_their_limit(setup: Setup) -> None:
    """DISAGG-09: 50 of them fill the worker; what comes then waits for the first to expire."""

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        async with setup.engine("prefill", **SMALL) as at:
            parked_s = []
            for i in range(50):
                await until(i * 0.5)
                await hand_off(at.worker, request("r", prompt_of(i)))
                parked_s.append(loop.time())
            load = await at.worker.load(oe.GetLoadRequest())
            assert (load.active_kv_sessions, load.used_kv_blocks) == (50, 200)
            assert load.total_kv_blocks or setup.version in ("1.1", "1.2")
            await hand_off(at.worker, request("r", prompt_of(50)))
            assert loop.time() == pytest.approx(parked_s[0] + 60.0, abs=0.1)
            assert (at.llm.n_expired, at.llm.n_parked) == (1, 50)
            for i, its_s in enumerate(parked_s[1:], 1):
                await until(its_s + 60.0 - 0.01)
                assert at.llm.n_expired == i
                await until(its_s + 60.0 + 0.1)
                assert at.llm.n_expired == i + 1
            assert (at.llm.n_parked, at.llm.used_blocks) == (1, 4)
            await until(loop.time() + 61.0)
            assert (at.llm.n_expired, at.llm.used_blocks) == (51, 0)

    run(scenario)


def test_disagg_09_a_handoff_that_decode_refuses_can_go_elsewhere_or_be_released(
    inside: Play,
) -> None:
    """DISAGG-09: 50 times each, on a worker that has room for 50."""

    async def scenario(setup: Setup) -> None:
        keys = {name: {"handoff_key": name.encode() * 16} for name in "kx"}
        async with (
            setup.engine("prefill", worker_options=keys["k"], **SMALL) as prefill,
            setup.engine("decode", worker_options=keys["x"]) as refusing,
            setup.engine("decode", worker_options=keys["k"]) as other,
        ):
            for i in range(100):
                prompt = prompt_of(i)
                session = await hand_off(prefill.worker, request("r", prompt))
                refused = await resume(refusing.worker, request("r", prompt), session)
                assert (refused.code, refused.messages) == (Code.INVALID_ARGUMENT, [])
                if i % 2:
                    sink = await resume(other.worker, request("r", prompt, 2), session)
                    assert sink.tokens == expected(prompt, 2)
                else:
                    target = oe.KvSessionRef(session_id=session.session_id)
                    await prefill.worker.abort(oe.AbortRequest(kv_session=target))
            await prefill.llm.handoffs_collected()
            assert (prefill.llm.used_blocks, prefill.llm.n_expired) == (0, 0)
            load = await prefill.worker.load(oe.GetLoadRequest())
            assert load.active_kv_sessions == 0
            assert refusing.llm.used_blocks == 0

    inside(scenario)


LAYOUTS = {
    "KV type": {"kv_cache_config": {"dtype": "fp8"}},
    "block size": {"kv_cache_config": {"tokens_per_block": 64}},
    "back-end": {"cache_transceiver_config": {"backend": "UCX"}},
    "runtime": {"cache_transceiver_config": {"transceiver_runtime": "PYTHON"}},
    "manager": {
        "cache_transceiver_config": {"transceiver_runtime": "PYTHON"},
        "kv_cache_config": {"use_kv_cache_manager_v2": True},
    },
}


@pytest.mark.parametrize("args", LAYOUTS.values(), ids=LAYOUTS)
def test_an_engine_takes_no_kv_cache_that_lies_or_moves_otherwise(
    args: dict[str, dict[str, Any]],
) -> None:
    """Nor does the other one take its; the handoff is still there for one that can."""
    setup = DIRECT[-1]
    plain = {"cache_transceiver_config": {"transceiver_runtime": "CPP"}}
    plain |= {"kv_cache_config": {"use_kv_cache_manager_v2": False, "dtype": "bfloat16"}}
    one = {section: plain.get(section, {}) | args.get(section, {}) for section in plain}

    async def scenario() -> None:
        for kinds in ((plain, one), (one, plain)):
            async with (
                setup.engine("prefill", **kinds[0]) as prefill,
                setup.engine("decode", **kinds[1]) as other,
                setup.engine("decode", **kinds[0]) as same,
            ):
                told = [(await each.worker.server_info()) for each in (prefill, other, same)]
                giver, *takers = map(pair_of, told)
                assert [fit(giver, taker) for taker in takers] == [PairFit.NO, PairFit.YES]
                prompt = prompt_of(1)
                session = await hand_off(prefill.worker, request("r", prompt))
                refused = await resume(other.worker, request("r", prompt), session)
                (message,) = refused.messages
                assert message.error.code == oe.ERROR_CODE_KV_TRANSFER_FAILED
                sink = await resume(same.worker, request("r", prompt, 2), session)
                assert len(sink.tokens) == 2  # which ones depends on the size of a block

    run(scenario)


TRACE = [("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")]


def test_an_engine_without_trace_headers_is_never_given_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its signature says so, and nothing is tried: each leg is one call."""
    early = DIRECT[0]
    calls = []
    submit = Llm11.generate_async

    @wraps(submit)
    def counted(*args: Any, **keywords: Any) -> RequestOutput:
        calls.append(keywords.keys())
        return submit(*args, **keywords)

    monkeypatch.setattr(Llm11, "generate_async", counted)

    async def scenario() -> None:
        async with (
            early.engine("agg") as agg,
            early.engine("prefill") as prefill,
            early.engine("decode") as decode,
        ):
            leg = request("r", prompt_of(1))
            assert (await ask(agg.worker, leg, TRACE)).tokens == expected(prompt_of(1), 8)
            session = await hand_off(prefill.worker, leg, TRACE)
            sink = await resume(decode.worker, leg, session, TRACE)
            assert sink.tokens == expected(prompt_of(1), 8)
            assert len(calls) == 3
            assert not any("trace_headers" in keywords for keywords in calls)

    run(scenario)


@pytest.mark.parametrize("version", VERSIONS)
def test_w05_simulated_workers_hand_off_in_every_version(version: str) -> None:
    """Early ones would not survive the prefill leg with the overlap scheduler on."""

    async def scenario() -> None:
        prompt = list(range(1, 101))
        data = request("r", prompt, 4)
        async with (
            sim("prefill", served=False, api=version) as prefill,
            sim("decode", served=False, api=version) as decode,
        ):
            session = await hand_off(prefill, data)
            assert (await resume(decode, data, session)).tokens == expected(prompt, 4)

    run(scenario)
