"""An engine's own stream of KV events, over real sockets, from its publisher to a subscriber."""

import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from slagate.proto import openengine_pb2 as oe
from slagate.proto.rpc.status import Status
from slagate.workers.kv_events import engine_sockets as kv_stream_source
from slagate.workers.kv_events.engine_sockets import Endpoints, stream_settings
from slagate.workers.sim import request as sim_request
from slagate.workers.trtllm.engine import Engine
from slagate.workers.trtllm.events import EngineEvents
from slagate.workers.trtllm.metrics import SILENT
from slagate.workers.trtllm.poll import Activity
from support.kv.publisher import BLOCK_TOKENS, publisher, removed, stored
from support.limits import HANG_S


class Held:
    """What a subscriber that reads everything takes to be cached, by rank."""

    def __init__(self) -> None:
        self.blocks: dict[int, set[int]] = {}
        self.n_cleared = 0
        self._changed = anyio.Event()

    def message(self, data: bytes, /) -> None:
        response = oe.SubscribeKvEventsResponse.FromString(data)
        blocks = self.blocks.setdefault(response.batch.data_parallel_rank, set())
        for event in response.batch.events:
            if event.HasField("block_stored"):
                blocks.update(
                    int.from_bytes(one.value, "big") for one in event.block_stored.block_hashes
                )
            elif event.HasField("block_removed"):
                blocks.difference_update(
                    int.from_bytes(one.value, "big") for one in event.block_removed.block_hashes
                )
            else:
                self.n_cleared += 1
                blocks.clear()
        self._changed.set()

    def finish(self, status: Status, /) -> None:
        pass

    async def until(self, is_so: Callable[["Held"], bool]) -> None:
        """Wait for a state to be told."""
        while not is_so(self):
            self._changed = anyio.Event()
            await self._changed.wait()


def engine(config: dict[str, Any], *, ranks: int = 1, **cache: Any) -> Engine:
    given = {"enable_kv_cache_events": True, **config}
    args = SimpleNamespace(
        tensor_parallel_size=ranks,
        enable_attention_dp=ranks > 1,
        kv_cache_config=SimpleNamespace(
            tokens_per_block=BLOCK_TOKENS, kv_events_config=given, **cache
        ),
    )
    return Engine(
        SimpleNamespace(args=args, tokenizer=None, generate_async=lambda tokens: None), sim_request
    )


def events_of(made: Engine) -> EngineEvents:
    return EngineEvents(made, Activity(), instance_id="i", history_batches=100, observer=SILENT)


@asynccontextmanager
async def followed(
    config: dict[str, Any], *, ranks: int = 1
) -> AsyncIterator[tuple[EngineEvents, Held]]:
    """The events of an engine with this configuration, and a subscriber to them."""
    events = events_of(engine(config, ranks=ranks))
    async with anyio.create_task_group() as tasks:
        with anyio.fail_after(HANG_S):
            tasks.start_soon(events.run)
            held = Held()
            wanted = oe.SubscribeKvEventsRequest(include_snapshot=True)
            events.subscribe(wanted.SerializeToString(), (), held)
            await held.until(lambda held: held.n_cleared == ranks)
            held.n_cleared = 0
            yield events, held
        tasks.cancel_scope.cancel()


def of_rank_0(*hashes: int) -> Callable[[Held], bool]:
    return lambda held: held.blocks[0] == set(hashes)


def run(main: Callable[[], Any], backend_options: dict[str, Any] | None = None) -> None:
    anyio.run(main, backend_options=backend_options or {})


@pytest.mark.parametrize("use_uvloop", [False, True])
def test_what_an_engine_publishes_reaches_a_subscriber(use_uvloop: bool) -> None:  # noqa: FBT001
    """From the first request on, and before: nothing is polled."""

    async def main() -> None:
        async with (
            publisher(topic="kv") as engine_side,
            followed({"endpoint": engine_side.at, "topic": "kv"}) as (events, held),
        ):
            await engine_side.subscribed()
            await engine_side.publish(stored(1, 2), stored(3, parent=2))
            await held.until(of_rank_0(1, 2, 3))
            await engine_side.publish(removed(3))
            await held.until(of_rank_0(1, 2))
            await engine_side.publish({"type": "AllBlocksCleared"}, stored(9))
            await held.until(of_rank_0(9))
            counts = events.counters()
            assert counts["kv_event_published_blocks"] == 1
            assert not any(counts[f"kv_event_{name}"] for name in ("gaps", "malformed_messages"))
            assert [source.transport for source in events.sources([])] == ["grpc"]

    run(main, {"use_uvloop": use_uvloop})


def test_each_rank_has_a_socket(tmp_path: Path) -> None:
    base, replays = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replays"

    async def main() -> None:
        async with (
            publisher(at=base, replay_at=replays) as first,
            publisher(rank=1, at=f"{base}_dp1", replay_at=f"{replays}_dp1") as second,
            followed({"endpoint": base, "replay_endpoint": replays}, ranks=2) as (events, held),
        ):
            await first.subscribed()
            await second.subscribed()
            await second.publish(stored(5))
            await first.publish(stored(1))
            await held.until(lambda held: held.blocks == {0: {1}, 1: {5}})
            second.lose(stored(6))
            await second.publish(stored(7))
            await held.until(lambda held: held.blocks == {0: {1}, 1: {5, 6, 7}})
            assert (first.asked, second.asked) == ([], [1])
            assert events.counters()["kv_event_replays"] == 1

    run(main)


def test_kv_05_without_a_replay_a_gap_starts_the_rank_over() -> None:
    async def main() -> None:
        async with (
            publisher() as engine_side,
            followed({"endpoint": engine_side.at}) as (events, held),
        ):
            await engine_side.subscribed()
            await engine_side.publish(stored(1))
            await held.until(of_rank_0(1))
            engine_side.lose(removed(1))
            await engine_side.publish(stored(2))
            await held.until(of_rank_0(2))
            assert held.n_cleared == 1
            counts = events.counters()
            assert (counts["kv_event_gaps"], counts["kv_event_missed_batches"]) == (1, 1)

    run(main)


def test_kv_05_what_was_missed_is_replayed() -> None:
    """Also what was published before anybody could subscribe."""

    async def main() -> None:
        async with publisher() as engine_side:
            engine_side.lose(stored(1))
            config = {"endpoint": engine_side.at, "replay_endpoint": engine_side.replay_at}
            async with followed(config) as (events, held):
                await engine_side.subscribed()
                await engine_side.publish(stored(2, parent=1))
                await held.until(of_rank_0(1, 2))
                engine_side.lose(removed(2))
                engine_side.lose(stored(3))
                await engine_side.publish(stored(4))
                await held.until(of_rank_0(1, 3, 4))
                assert engine_side.asked == [0, 2]
                assert held.n_cleared == 0
                assert events.counters()["kv_event_gaps"] == 0

    run(main)


def test_kv_05_a_replay_that_begins_too_late_starts_the_rank_over() -> None:
    """The engine keeps `buffer_steps` batches."""

    async def main() -> None:
        async with publisher() as engine_side:
            config = {"endpoint": engine_side.at, "replay_endpoint": engine_side.replay_at}
            async with followed(config) as (events, held):
                await engine_side.subscribed()
                await engine_side.publish(stored(1))
                await held.until(of_rank_0(1))
                engine_side.lose(removed(1))
                del engine_side.kept[1]
                engine_side.lose(stored(2))
                await engine_side.publish(stored(3))
                await held.until(of_rank_0(2, 3))
                assert held.n_cleared == 1
                assert events.counters()["kv_event_missed_batches"] == 1

    run(main)


def test_an_engine_that_answers_no_replay_holds_nothing_up_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_stream_source, "REPLAY_LIMIT_S", 0.05)

    async def main() -> None:
        async with publisher(replays=False) as engine_side:
            config = {"endpoint": engine_side.at, "replay_endpoint": engine_side.replay_at}
            async with followed(config) as (events, held):
                await engine_side.subscribed()
                engine_side.lose()
                await engine_side.publish(stored(1))
                await held.until(of_rank_0(1))
                counts = events.counters()
                assert (counts["kv_event_gaps"], counts["kv_event_replays"]) == (1, 1)

    run(main)


def test_kv_04_malformed_messages_are_counted_and_the_stream_goes_on() -> None:
    async def main() -> None:
        async with (
            publisher() as engine_side,
            followed({"endpoint": engine_side.at}) as (events, held),
        ):
            await engine_side.subscribed()
            await engine_side.publish(stored(1))
            for frames in ([b""], [b"", b"12345678"], [b"", b"1", b""], [b""] * 4):
                await engine_side.send(*frames)
            await engine_side.publish(stored(2))
            await held.until(of_rank_0(1, 2))
            await engine_side.send(b"", engine_side.number.to_bytes(8, "big"), b"\xc1")
            engine_side.number += 1
            await engine_side.publish(stored(3), {"type": "?"}, removed(None))  # type: ignore[arg-type]
            await engine_side.publish(stored(4))
            await held.until(of_rank_0(4))
            counts = events.counters()
            assert counts["kv_event_decode_errors"] == 3
            assert counts["kv_event_malformed_messages"] == 4
            assert counts["kv_event_socket_errors"] == 0

    run(main)


def test_a_socket_that_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_stream_source, "ERROR_DELAY_S", 0.0)
    listen = kv_stream_source.StreamSource._listen
    failures = [OSError("no descriptors"), RuntimeError("a bug")]

    async def failing(self: Any, context: Any, rank: int) -> None:
        if failures:
            raise failures.pop()
        await listen(self, context, rank)

    monkeypatch.setattr(kv_stream_source.StreamSource, "_listen", failing)

    async def main() -> None:
        async with (
            publisher() as engine_side,
            followed({"endpoint": engine_side.at}) as (events, held),
        ):
            await engine_side.subscribed()
            await engine_side.publish(stored(1))
            await held.until(of_rank_0(1))
            assert events.counters()["kv_event_socket_errors"] == 2

    run(main)


# --- which source, and where -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "ranks", "addresses"),
    [
        ({"endpoint": "tcp://*:5557"}, 1, ["tcp://127.0.0.1:5557"]),
        ({"endpoint": "tcp://0.0.0.0:7"}, 2, ["tcp://127.0.0.1:7", "tcp://127.0.0.1:8"]),
        ({"endpoint": "tcp://[::]:7"}, 1, ["tcp://[::1]:7"]),
        ({"endpoint": "tcp://10.0.0.1:7"}, 1, ["tcp://10.0.0.1:7"]),
        ({"endpoint": "ipc:///run/kv"}, 2, ["ipc:///run/kv", "ipc:///run/kv_dp1"]),
    ],
)
def test_a_rank_has_a_port_or_a_path_of_its_own(
    config: dict[str, Any], ranks: int, addresses: list[str]
) -> None:
    given = {"replay_endpoint": None, "topic": "", "hwm": 9, **config}
    settings = stream_settings(**given, n_ranks=ranks)
    assert settings.endpoints == tuple(Endpoints(address, None) for address in addresses)
    given["replay_endpoint"] = given["endpoint"]
    both = stream_settings(**given, n_ranks=ranks)
    assert both.endpoints == tuple(Endpoints(address, address) for address in addresses)


@pytest.mark.parametrize(
    ("config", "ranks", "why"),
    [
        ({"publisher": "null"}, 1, "kv_cache_config.kv_events_config.publisher is null"),
        ({"endpoint": "inproc://kv"}, 1, "kv_events_config.endpoint 'inproc://kv' is no tcp:// or"),
        ({"endpoint": "tcp://*"}, 1, "kv_events_config.endpoint 'tcp://*' is no"),
        ({"endpoint": "tcp://*:65535"}, 2, "'tcp://*:65535' has no port for rank 1"),
        ({"endpoint": "tcp://*:0"}, 2, "'tcp://*:0' has no port for rank 0"),
        ({"endpoint": 5557}, 1, "endpoint 5557 is no tcp://"),
        ({"replay_endpoint": "x"}, 1, "replay_endpoint 'x' is no tcp://"),
        ({"topic": 7}, 1, "topic 7 is no text"),
        ({"hwm": -1}, 1, "hwm -1 is no number"),
    ],
)
def test_engine_10_a_stream_that_nobody_can_follow_says_why(
    config: dict[str, Any], ranks: int, why: str
) -> None:
    """ENGINE-10."""
    events = events_of(engine(config, ranks=ranks))
    assert events.sources([]) == []
    with pytest.raises(Exception, match="kv events: kv_cache_config") as refused:
        events.subscribe(b"", (), Held())
    assert why in str(refused.value)


def test_without_pyzmq_the_reason_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In the log too: somebody asked for events."""
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(Exception, match=r"pip install 'slagate\[zmq\]'"):
        events_of(engine({})).subscribe(b"", (), Held())
    (record,) = caplog.records
    assert (record.message, record.levelname) == ("kv_events.off", "WARNING")
    assert "slagate[zmq]" in record.__dict__["reason"]


def test_ranks_of_another_machine_cannot_be_followed() -> None:
    made = engine({}, ranks=16)
    made.llm.args.gpus_per_node = 8
    with pytest.raises(Exception, match="16 ranks are on more than this machine"):
        events_of(made).subscribe(b"", (), Held())


def test_a_stream_needs_no_buffer_to_poll_and_blocks_to_tell_of() -> None:
    assert engine({}).events_off() == ""
    assert engine({}, event_buffer_max_size=0).events_off() == ""
    assert "enable_block_reuse" in engine({}, enable_block_reuse=False).events_off()
    assert "event_buffer_max_size" in engine({"enable_kv_cache_events": False}).events_off()


def test_streamed_events_do_not_say_salts() -> None:
    def says_salts(
        inputs: Any, *, cache_salt: Any = None, conversation_params: Any = None
    ) -> None: ...

    made = engine({})
    made.llm.generate_async = says_salts
    assert "do not say it" in Engine(made.llm, sim_request).salts_off()
