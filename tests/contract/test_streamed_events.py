"""A worker whose engine streams its KV events: what clients see of it over gRPC."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace
from typing import Any

import anyio
import grpc

from slagate.proto import openengine_pb2 as oe
from slagate.proto.rpc.address import Address
from slagate.proto.rpc.status import Status
from slagate.workers.client.client import connect_worker
from slagate.workers.profiles.profile import load_profile
from slagate.workers.server import serve_worker
from slagate.workers.sim.api import NEWEST, sim_api
from slagate.workers.sim.args import END_ID, VOCAB_SIZE, SimSettings
from slagate.workers.sim.llm import SimLLM
from slagate.workers.trtllm.server_info import WorkerIdentity
from slagate.workers.trtllm.worker import TrtllmWorker
from slagate.workers.worker import Worker
from support.engine.workers import MODEL, PROFILE, expected, request
from support.kv.publisher import Publisher, publisher, removed, stored
from support.limits import HANG_S
from support.worker.contract import ask

BLOCK_TOKENS = 32
N_BLOCKS = 8


class StreamingLLM:
    """The simulated engine, with its events published instead of polled."""

    def __init__(self, llm: SimLLM, config: dict[str, Any]) -> None:
        self._llm = llm
        cache = SimpleNamespace(**llm.args.kv_cache_config.model_dump())
        cache.event_buffer_max_size, cache.kv_events_config = 0, config
        self.args = SimpleNamespace(**dict(llm.args))
        self.args.kv_cache_config = cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def get_kv_cache_events_async(self, timeout: float) -> None:
        raise AssertionError("an engine that streams has nothing to poll")

    async def publish(self, to: Publisher) -> None:
        """What has happened since the last time, as TensorRT-LLM writes it."""
        events = [streamed(event["data"]) for event in self._llm.get_kv_cache_events(0)]
        await to.publish(*filter(None, events))


def streamed(data: dict[str, Any]) -> dict[str, Any] | None:
    if data["type"] == "removed":
        return removed(*map(signed, data["block_hashes"]))
    if data["type"] != "stored":
        return None
    full = [block for block in data["blocks"] if len(block["tokens"]) == BLOCK_TOKENS]
    if not full:
        return None
    parent = data["parent_hash"]
    return stored(
        *(signed(block["block_hash"]) for block in full),
        parent=None if parent is None else signed(parent),
        token_ids=[token["token_id"] for block in full for token in block["tokens"]],
        block_size=BLOCK_TOKENS,
    )


def signed(hash_: int) -> int:
    return hash_ - (1 << 64) if hash_ >= 1 << 63 else hash_


class Cached:
    """The tokens of the blocks that are told to be cached, by hash."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, list[int]] = {}
        self.parents: dict[bytes, bytes] = {}
        self._changed = anyio.Event()

    def message(self, data: bytes, /) -> None:
        for event in oe.SubscribeKvEventsResponse.FromString(data).batch.events:
            told, parent = event.block_stored, event.block_stored.parent_block_hash.value
            for at, one in enumerate(told.block_hashes):
                ids = told.token_ids[at * BLOCK_TOKENS : (at + 1) * BLOCK_TOKENS]
                self.blocks[one.value], self.parents[one.value] = list(ids), parent
                parent = one.value
            for one in event.block_removed.block_hashes:
                del self.blocks[one.value]
        self._changed.set()

    def finish(self, status: Status, /) -> None:
        pass

    def prompts(self) -> list[list[int]]:
        """Whole chains, from the root to each last block."""
        leaves = self.blocks.keys() - {self.parents[one] for one in self.blocks}
        return sorted(self._chain(leaf) for leaf in leaves)

    def _chain(self, hash_: bytes) -> list[int]:
        return self._chain(self.parents[hash_]) + self.blocks[hash_] if hash_ else []

    async def until_so(self, is_so: Callable[[], bool]) -> None:
        """Wait for a state to be told."""
        with anyio.fail_after(HANG_S):
            while not is_so():
                self._changed = anyio.Event()
                await self._changed.wait()


@asynccontextmanager
async def streaming_worker(config: dict[str, Any]) -> AsyncIterator[tuple[Worker, StreamingLLM]]:
    """Behind a real server and channel."""
    api = sim_api()
    cache = {"event_buffer_max_size": 1000, "max_tokens": N_BLOCKS * BLOCK_TOKENS}
    sim = SimSettings(profile=load_profile(PROFILE).tp(1), time_scale=0.1)
    llm = api.LLM(MODEL, sim=sim, skip_tokenizer_init=True, kv_cache_config=cache)
    streaming = StreamingLLM(llm, {"enable_kv_cache_events": True, **config})
    identity = WorkerIdentity(
        oe.ENGINE_ROLE_AGGREGATED, MODEL, "i", NEWEST, "", 1, end_id=END_ID, vocab_size=VOCAB_SIZE
    )
    async with AsyncExitStack() as stack:
        stack.callback(llm.shutdown)
        tasks = await stack.enter_async_context(anyio.create_task_group())
        stack.callback(tasks.cancel_scope.cancel)
        inner = TrtllmWorker(
            streaming, api=api, identity=identity, tasks=tasks, release_session=None
        )
        at = await stack.enter_async_context(
            serve_worker(inner, Address("127.0.0.1", 0), grace_s=0)
        )
        yield await stack.enter_async_context(connect_worker(str(at))), streaming


def test_what_the_engine_streams_is_what_clients_see() -> None:
    """Two prompts of three blocks, the same first one; then one that needs the room of others."""
    first, second = list(range(1, 97)), [*range(1, 33), *range(200, 264)]

    async def main() -> None:
        async with (
            publisher() as engine_side,
            streaming_worker({"endpoint": engine_side.at}) as (worker, llm),
        ):
            with anyio.fail_after(HANG_S):
                await engine_side.subscribed()
            cached = Cached()
            wanted = oe.SubscribeKvEventsRequest(include_snapshot=True).SerializeToString()
            call = worker.kv_events(wanted, (), cached)
            for prompt in (first, second):
                sink = await ask(worker, request("r", [*prompt, 7], 1))
                assert sink.tokens == expected([*prompt, 7], 1)
                await llm.publish(engine_side)
            await cached.until_so(lambda: cached.prompts() == [first, second])
            third = list(range(1000, 1000 + 7 * BLOCK_TOKENS + 1))
            await ask(worker, request("r", third, 1))
            await llm.publish(engine_side)
            # With its last token, which fills no block, it takes all the room.
            await cached.until_so(lambda: cached.prompts() == [third[:-1]])
            load = await worker.load(oe.GetLoadRequest())
            assert load.attributes["kv_event_published_blocks"] == 7
            assert load.attributes["kv_event_gaps"] == 0
            call.cancel()

    anyio.run(main)


def test_salts_are_refused_as_what_is_streamed_does_not_say_them() -> None:
    async def main() -> None:
        async with (
            publisher() as engine_side,
            streaming_worker({"endpoint": engine_side.at}) as (worker, _),
        ):
            leg = request("r", [1, 2, 3], 1)
            leg.kv.cache_salt = "tenant"
            assert (await ask(worker, leg)).code is grpc.StatusCode.UNIMPLEMENTED
            info = await worker.model_info(MODEL)
            assert not info.generation.supports_cache_salt
            sources = await worker.kv_event_sources(oe.GetKvEventSourcesRequest())
            assert [source.transport for source in sources.sources] == ["grpc"]

    anyio.run(main)
