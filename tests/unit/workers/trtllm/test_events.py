"""The KV events of one engine: what an event costs, and how its streams end."""

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import anyio
import grpc
import pytest

from slagate.proto import openengine_pb2 as oe
from slagate.proto.rpc.status import Status
from slagate.workers.errors import RequestRefused
from slagate.workers.kv_events.fields import work_of
from slagate.workers.runtime import virtual_loop
from slagate.workers.sim import request as sim_request
from slagate.workers.trtllm.engine import Engine
from slagate.workers.trtllm.events import EngineEvents
from slagate.workers.trtllm.metrics import SILENT
from slagate.workers.trtllm.poll import Activity
from support.engine import kv_dicts
from support.engine.kv_dicts import BLOCK_TOKENS, moved, removed, stored
from support.engine.sim_llm import until

GONE = Status(grpc.StatusCode.UNAVAILABLE, "kv events: the worker is shutting down")
SNAPSHOT = oe.SubscribeKvEventsRequest(include_snapshot=True).SerializeToString()


class Sink:
    def __init__(self) -> None:
        self.n_messages = 0
        self.ends: list[Status] = []

    def message(self, data: bytes, /) -> None:
        assert not self.ends
        self.n_messages += 1

    def finish(self, status: Status, /) -> None:
        self.ends.append(status)


def test_close_ends_every_stream_at_once_and_events_go_on_being_read() -> None:
    """Paused ones too; else the end of a worker would wait for its subscribers."""
    event = kv_dicts.EngineEvents()
    waiting: list[Any] = [event(stored(1))]

    async def poll() -> AsyncIterator[Any]:
        while waiting:
            yield waiting.pop(0)

    async def main() -> None:
        cache = SimpleNamespace(tokens_per_block=BLOCK_TOKENS, event_buffer_max_size=10)
        llm = SimpleNamespace(
            args=SimpleNamespace(tensor_parallel_size=1, kv_cache_config=cache),
            tokenizer=None,
            generate_async=lambda tokens: None,
            get_kv_cache_events_async=lambda timeout: poll(),
        )
        activity = Activity()
        events = EngineEvents(
            Engine(llm, sim_request),
            activity,
            instance_id="i",
            history_batches=10,
            observer=SILENT,
        )
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(events.run)
            activity.request_started()
            activity.result_came()
            sinks = [Sink(), Sink()]
            calls = [events.subscribe(SNAPSHOT, (), sink) for sink in sinks]
            await until(1.0)
            calls[1].pause()
            assert [sink.n_messages > 0 for sink in sinks] == [True, True]
            events.end_streams()
            assert [sink.ends for sink in sinks] == [[GONE], [GONE]]
            events.end_streams()
            with pytest.raises(RequestRefused) as refused:
                events.subscribe(SNAPSHOT, (), Sink())
            assert refused.value.status == GONE
            waiting.append(event(stored(2)))
            await until(2.0)
            assert events.counters()["kv_event_published_blocks"] == 2
            tasks.cancel_scope.cancel()
        assert [sink.ends for sink in sinks] == [[GONE], [GONE]]

    virtual_loop.run(main)


def test_a_chain_costs_more_than_its_tokens_and_a_removal_less() -> None:
    one, ten = (work_of({"data": stored(*range(n))}) for n in (1, 10))
    assert one > BLOCK_TOKENS
    assert ten > 10 * BLOCK_TOKENS + 9
    assert 0 < work_of({"data": removed(1)}) < one
    assert work_of({"data": removed(*range(1000))}) > 1000
    assert work_of({"data": moved(1, 0, 1)}) > 0


@pytest.mark.parametrize(
    "odd",
    [
        None,
        7,
        [],
        {},
        {"data": None},
        {"data": {"blocks": 3, "block_hashes": "x"}},
        {"data": {"blocks": [None, {}, {"tokens": 7}]}},
    ],
)
def test_kv_04_whatever_comes_costs_something(odd: object) -> None:
    assert work_of(odd) > 0
