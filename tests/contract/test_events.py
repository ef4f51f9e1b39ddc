"""The contract of the `Worker` port: KV events, held against what the engine really has."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import grpc
import pytest

from slagate.proto import openengine_pb2 as oe
from slagate.proto.rpc.status import Metadata, Status
from slagate.workers.errors import WorkerError
from slagate.workers.legs import prefill_leg
from slagate.workers.profiles.profile import load_profile
from slagate.workers.sim.api import NEWEST
from slagate.workers.worker import Worker
from support.engine.workers import MODEL, PROFILE, expected, request
from support.kv.mirror import RankMirror
from support.worker.contract import DIRECT, SERVED, Play, Setup, ask

Code = grpc.StatusCode
NEWEST_WAYS = [setup for setup in (*DIRECT, *SERVED) if setup.version == NEWEST]
SNAPSHOT = oe.SubscribeKvEventsRequest(include_snapshot=True)


class Subscriber:
    """Mirrors what it is told of each rank; fails on a hole, or when the port's contract is broken."""

    def __init__(
        self,
        worker: Worker,
        wanted: oe.SubscribeKvEventsRequest,
        *,
        mirrors: dict[int, RankMirror] | None = None,
        metadata: Metadata = (),
    ) -> None:
        self.mirrors = {} if mirrors is None else mirrors
        self.n_messages = 0
        self.n_events = 0
        self.error: oe.EngineError | None = None
        self.status: Status | None = None
        self._changed = anyio.Event()
        self.call = worker.kv_events(wanted.SerializeToString(), metadata, self)

    def message(self, data: bytes, /) -> None:
        assert self.status is None, "a message after the end"
        assert self.error is None, "a message after the error"
        response = oe.SubscribeKvEventsResponse.FromString(data)
        self.n_messages += 1
        if response.HasField("error"):
            self.error = response.error
        else:
            self.n_events += len(response.batch.events)
            rank = response.batch.data_parallel_rank
            self.mirrors.setdefault(rank, RankMirror()).apply(response.batch)
        self._changed.set()

    def finish(self, status: Status, /) -> None:
        assert self.status is None, "a second end"
        self.status = status
        self._changed.set()

    async def until(self, wanted: Callable[[], bool]) -> None:
        """Wait until what has come makes it true."""
        while not wanted():
            assert self.status is None, self.status
            self._changed = anyio.Event()
            await self._changed.wait()

    async def agrees_with(self, resident: Callable[[], list[dict[int, int]]]) -> None:
        await self.until(
            lambda: (
                [self.mirrors.get(r, RankMirror()).resident() for r in range(len(resident()))]
                == resident()
            )
        )

    async def ended(self) -> Status:
        await self.until(lambda: self.status is not None)
        assert self.status is not None
        return self.status


async def run(worker: Worker, *prompts: list[int], n_tokens: int = 4) -> None:
    for i, prompt in enumerate(prompts):
        sink = await ask(worker, request(f"r{i}", prompt, n_tokens))
        assert sink.tokens == expected(prompt, n_tokens)


def prompts(n: int, *, first: int, n_tokens: int = 300) -> list[list[int]]:
    """Prompts without a common prefix."""
    return [[first + i] * n_tokens for i in range(n)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_subscriber_has_what_the_engine_has(inside: Play, ranks: int) -> None:
    """From the first event on, with evictions, over a snapshot, and over a resumption."""

    async def scenario(setup: Setup) -> None:
        cache = {"max_tokens": 1600}
        async with setup.engine("agg", ranks=ranks, kv_cache_config=cache) as at:
            early = Subscriber(at.worker, oe.SubscribeKvEventsRequest())
            await run(at.worker, *prompts(8, first=1))
            await early.agrees_with(at.llm.resident)
            late = Subscriber(at.worker, SNAPSHOT)
            await late.agrees_with(at.llm.resident)
            early.call.cancel()
            assert (await early.ended()).code is Code.CANCELLED
            await run(at.worker, *prompts(8, first=20))
            await late.agrees_with(at.llm.resident)
            instance = (await at.worker.server_info()).instance_id
            for rank, mirror in early.mirrors.items():
                assert mirror.next_number
                again = Subscriber(
                    at.worker,
                    oe.SubscribeKvEventsRequest(
                        data_parallel_ranks=[rank], start_sequence_number=mirror.next_number
                    ),
                    mirrors=early.mirrors,
                    metadata=[("x-slagate-instance-id", instance)],
                )
                await again.until(
                    lambda mirror=mirror, rank=rank: mirror.resident() == at.llm.resident()[rank]  # type: ignore[misc]
                )
                again.call.cancel()
            late.call.cancel()

    inside(scenario)


@pytest.mark.parametrize("inside", NEWEST_WAYS, indirect=True, ids=str)
@pytest.mark.parametrize("algorithm", ["auto", "v2_sha256", "v2_sha256_64"])
@pytest.mark.parametrize("levels", [(), ("host",), ("host", "disk"), ("disk",)], ids="-".join)
def test_w11_t2_6_a_subscriber_has_what_the_second_cache_manager_has_on_every_level(
    inside: Play, tmp_path: Path, algorithm: str, levels: tuple[str, ...]
) -> None:
    n_bytes = 20 * 32 * load_profile(PROFILE).tp(1).kv_bytes_per_token
    cache = {
        "max_tokens": 1600,
        "use_kv_cache_manager_v2": True,
        "kv_cache_event_hash_algo": algorithm,
        "host_cache_size": n_bytes if "host" in levels else 0,
        "disk_cache_size": 2 * n_bytes if "disk" in levels else None,
        "disk_cache_path": str(tmp_path),
    }

    async def scenario(setup: Setup) -> None:
        async with setup.engine("agg", kv_cache_config=cache) as at:

            def on_media() -> list[dict[int, int]]:
                media = {1: 2} if levels == ("disk",) else {}
                return [
                    {hash_: media.get(level, level) for hash_, level in blocks.items()}
                    for blocks in at.llm.resident()
                ]

            early = Subscriber(at.worker, oe.SubscribeKvEventsRequest())
            for first in (1, 5, 1):
                await run(at.worker, *prompts(12, first=first))
                await early.agrees_with(on_media)
            late = Subscriber(at.worker, SNAPSHOT)
            await late.agrees_with(on_media)
            assert len(set(on_media()[0].values())) == 1 + len(levels)
            load = await at.worker.load(oe.GetLoadRequest())
            for name in ("decode_errors", "dropped_events", "unknown_removed", "orphan_blocks"):
                assert load.attributes[f"kv_event_{name}"] == 0
            late.call.cancel()
            early.call.cancel()

    inside(scenario)


@pytest.mark.parametrize("inside", DIRECT, indirect=True, ids=str)
def test_t2_6_where_a_move_breaks_events_nobody_is_told_of_blocks_that_are_gone(
    inside: Play, caplog: pytest.LogCaptureFixture
) -> None:
    """In 1.2 the published cache starts over; in 1.1 the engine ends, and the log has said so before."""
    n_bytes = 500 * 32 * load_profile(PROFILE).tp(1).kv_bytes_per_token
    cache = {"max_tokens": 1600, "host_cache_size": n_bytes}

    async def scenario(setup: Setup) -> None:
        breaks = setup.version in ("1.1", "1.2")
        async with setup.engine("agg", kv_cache_config=cache) as at:
            warnings = [one.__dict__["reason"] for one in caplog.records if "host_cache" in one.msg]
            assert [("host_cache_size out" in one) for one in warnings] == [True] * breaks
            follower = Subscriber(at.worker, SNAPSHOT)
            # Six of them fill the cache.
            await run(at.worker, *prompts(5, first=1))
            await follower.agrees_with(at.llm.resident)
            moving = request("moving", [90] * 300, 64)
            assert (await ask(at.worker, moving)).status is not None
            await run(at.worker, *prompts(1, first=50)) if setup.version != "1.1" else None
            sink = await ask(at.worker, request("last", [99] * 300, 64))
            assert sink.status is not None
            assert (sink.status.code is Code.OK) == (setup.version != "1.1")
            if setup.version == "1.1":
                assert at.inner.fatal.is_set()
                return
            told, real = follower.mirrors[0], at.llm.resident()[0]
            await follower.until(
                lambda: (
                    told.resident().items() <= real.items() if breaks else told.resident() == real
                )
            )
            load = await at.worker.load(oe.GetLoadRequest())
            assert (load.attributes["kv_event_gaps"] > 0) == breaks
            follower.call.cancel()

    inside(scenario)


def test_a_paused_subscriber_is_told_nothing_and_misses_nothing(inside: Play) -> None:
    async def scenario(setup: Setup) -> None:
        async with setup.engine("agg") as at:
            one, other = Subscriber(at.worker, SNAPSHOT), Subscriber(at.worker, SNAPSHOT)
            await one.until(lambda: one.n_messages > 0)
            one.call.pause()
            n_messages = one.n_messages
            await run(at.worker, *prompts(3, first=1))
            await other.agrees_with(at.llm.resident)
            assert one.n_messages == n_messages
            one.call.resume()
            await one.agrees_with(at.llm.resident)
            one.call.cancel()
            other.call.cancel()

    inside(scenario)


@pytest.mark.parametrize("inside", DIRECT, indirect=True, ids=str)
def test_a_subscriber_that_is_too_slow_is_told_to_start_over(inside: Play) -> None:
    # (Behind a server the windows of the connection hold megabytes; see the server's own tests.)
    async def scenario(setup: Setup) -> None:
        short = {"kv_history_batches": 4}
        async with setup.engine("agg", worker_options=short) as at:
            slow, other = Subscriber(at.worker, SNAPSHOT), Subscriber(at.worker, SNAPSHOT)
            await slow.until(lambda: slow.n_messages > 0)
            slow.call.pause()
            await run(at.worker, *prompts(20, first=1))
            await other.agrees_with(at.llm.resident)
            slow.call.resume()
            assert (await slow.ended()).code is Code.OK
            assert slow.error is not None
            assert (slow.error.code, slow.error.retryable) == (oe.ERROR_CODE_OVERLOADED, True)
            again = Subscriber(at.worker, SNAPSHOT)
            await again.agrees_with(at.llm.resident)
            load = await at.worker.load(oe.GetLoadRequest())
            assert load.attributes["kv_event_slow_subscribers"] == 1
            again.call.cancel()
            other.call.cancel()

    inside(scenario)


@pytest.mark.parametrize(
    ("wanted", "instance", "code"),
    [
        (oe.SubscribeKvEventsRequest(start_sequence_number=10**6), None, Code.OUT_OF_RANGE),
        (oe.SubscribeKvEventsRequest(), "another life", Code.OUT_OF_RANGE),
        (oe.SubscribeKvEventsRequest(data_parallel_ranks=[1]), None, Code.INVALID_ARGUMENT),
    ],
)
def test_what_cannot_be_given_is_refused_before_any_message(
    play: Play, wanted: oe.SubscribeKvEventsRequest, instance: str | None, code: grpc.StatusCode
) -> None:
    async def scenario(setup: Setup) -> None:
        async with setup.worker("agg") as worker:
            metadata = [] if instance is None else [("x-slagate-instance-id", instance)]
            refused = Subscriber(worker, wanted, metadata=metadata)
            assert (await refused.ended()).code is code
            assert refused.n_messages == 0
            refused.call.cancel()
            refused.call.pause()
            refused.call.resume()

    play(scenario)


@pytest.mark.parametrize(
    ("setting", "value"), [("event_buffer_max_size", 0), ("enable_block_reuse", False)]
)
def test_engine_10_an_engine_without_events_says_which_setting_it_is(
    inside: Play, setting: str, value: object
) -> None:
    """ENGINE-10: nobody waits for events that are switched off."""

    async def scenario(setup: Setup) -> None:
        async with setup.worker("agg", kv_cache_config={setting: value}) as worker:
            await run(worker, [1, 2, 3])
            status = await Subscriber(worker, SNAPSHOT).ended()
            assert status.code is Code.FAILED_PRECONDITION
            assert f"kv_cache_config.{setting}" in status.message
            answer = await worker.kv_event_sources(oe.GetKvEventSourcesRequest())
            assert list(answer.sources) == []

    inside(scenario)


def salted(request_id: str, prompt: list[int]) -> oe.GenerateRequest:
    leg = request(request_id, prompt, 4)
    leg.kv.cache_salt = "tenant"
    return leg


def of_first_manager(version: str) -> dict[str, Any]:
    """The cache manager whose events say the salt, where it can be chosen."""
    return {"use_kv_cache_manager_v2": False} if version == NEWEST else {}


@pytest.mark.parametrize("role", ["prefill", "agg"])
def test_no_salted_block_is_published_as_one_without(inside: Play, role: str) -> None:
    """An engine whose events do not say the salt takes none while they are on."""
    says_salts = {"1.1": False, "1.2": False, "1.3rc": False, "1.4rc": True}

    async def scenario(setup: Setup) -> None:
        cache = of_first_manager(setup.version)
        async with setup.engine(role, kv_cache_config=cache) as at:
            model = await at.worker.model_info(MODEL)
            assert model.generation.supports_cache_salt == says_salts[setup.version]
            leg = salted("s", [7] * 100)
            data = prefill_leg(leg.SerializeToString(), "s") if role == "prefill" else leg
            sink = await ask(at.worker, data)
            assert sink.status is not None
            if not says_salts[setup.version]:
                assert sink.status.code is Code.UNIMPLEMENTED
                assert sink.status.message.startswith("kv.cache_salt: ")
                assert f"engine version {setup.version}" in sink.status.message
                assert at.llm.resident() == [{}]
                return
            assert sink.status.code is Code.OK
            follower = Subscriber(at.worker, SNAPSHOT)
            await follower.agrees_with(at.llm.resident)
            blocks = follower.mirrors[0].tiers[0]
            assert len(blocks) == 3
            assert {content.keys for content in blocks.values()} == {("cache_salt=tenant",)}
            follower.call.cancel()

    inside(scenario)


@pytest.mark.parametrize("inside", NEWEST_WAYS, indirect=True, ids=str)
def test_w11_an_engine_that_may_have_the_second_cache_manager_takes_no_salt_and_says_what_to_set(
    inside: Play,
) -> None:
    """The model chooses, and `llm.args` does not say what."""

    async def scenario(setup: Setup) -> None:
        async with setup.engine("agg") as at:
            assert not (await at.worker.model_info(MODEL)).generation.supports_cache_salt
            sink = await ask(at.worker, salted("s", [7] * 100))
            assert sink.status is not None
            assert sink.status.code is Code.UNIMPLEMENTED
            assert "set kv_cache_config.use_kv_cache_manager_v2: false" in sink.status.message

    inside(scenario)


def test_without_events_every_engine_takes_a_salt(inside: Play) -> None:
    async def scenario(setup: Setup) -> None:
        async with setup.worker("agg", kv_cache_config={"event_buffer_max_size": 0}) as worker:
            assert (await worker.model_info(MODEL)).generation.supports_cache_salt
            sink = await ask(worker, salted("s", [7] * 100))
            assert sink.status is not None
            assert sink.status.code is Code.OK

    inside(scenario)


def test_the_sources_are_one_a_rank(play: Play) -> None:
    async def scenario(setup: Setup) -> None:
        async with setup.worker("agg", ranks=2) as worker:
            answer = await worker.kv_event_sources(oe.GetKvEventSourcesRequest())
            assert [source.data_parallel_rank for source in answer.sources] == [0, 1]
            one = oe.GetKvEventSourcesRequest(data_parallel_ranks=[1])
            (source,) = (await worker.kv_event_sources(one)).sources
            assert (source.transport, source.encoding) == ("grpc", "protobuf")
            assert source.buffer_steps > 0
            assert source.HasField("endpoint_addr") == (setup.way != "direct")
            if setup.way != "direct":
                assert source.endpoint_addr.host == "127.0.0.1"
                assert source.endpoint_addr.port > 0
            with pytest.raises(WorkerError) as raised:
                await worker.kv_event_sources(oe.GetKvEventSourcesRequest(data_parallel_ranks=[3]))
            assert raised.value.status.code is Code.INVALID_ARGUMENT

    play(scenario)
