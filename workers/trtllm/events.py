"""The KV events of one engine: polled, or streamed by the engine, and fed to subscribers."""

import logging
from collections.abc import Callable
from typing import Any

import grpc

from slagate.proto import openengine_pb2 as oe
from slagate.proto.rpc.sinks import Call, Sink
from slagate.proto.rpc.status import Metadata
from slagate.workers.errors import RequestRefused, invalid
from slagate.workers.kv_events.engine_sockets import StreamSource, pyzmq_missing, stream_settings
from slagate.workers.kv_events.engine_stream import KvStreamNormaliser
from slagate.workers.kv_events.feed import KvFeed
from slagate.workers.kv_events.fields import work_of
from slagate.workers.kv_events.normalise import KvEventNormaliser
from slagate.workers.runtime.clock import unix_nanos
from slagate.workers.trtllm.engine import Engine, setting
from slagate.workers.trtllm.metrics import Observer
from slagate.workers.trtllm.poll import EVENT_PACE, Activity, Poller, is_polled_by_call, poll_of

log = logging.getLogger(__name__)

SCHEMA_VERSION = 1


class EngineEvents:
    """The feed of events and its source, or the reason why the engine has no events."""

    def __init__(
        self,
        engine: Engine,
        activity: Activity,
        *,
        instance_id: str,
        history_batches: int,
        observer: Observer,
        on_error: Callable[[Exception], None] = lambda _: None,
    ) -> None:
        """`history_batches` of each rank are kept for subscribers that come back.

        `on_error` gets the error of a poll that raised.
        """
        self._on_error = on_error
        self._why_not = engine.events_off()
        self._n_ranks = engine.n_ranks
        self._history_batches = history_batches
        of_engine = {"ranks": engine.n_ranks, "block_tokens": engine.block_tokens}
        streamed = None if engine.event_stream is None else KvStreamNormaliser(**of_engine)
        self._feed = KvFeed(
            **of_engine,
            instance_id=instance_id,
            unix_nanos=unix_nanos,
            normaliser=streamed or KvEventNormaliser(**of_engine, levels=engine.cache_levels),
            history_batches=history_batches,
        )
        self._stream: StreamSource | None = None
        if streamed is not None and not self._why_not:
            self._why_not = self._follow(engine, streamed, observer)
            if self._why_not:
                # Whoever configured events is told that there are none.
                log.warning("kv_events.off", extra={"reason": self._why_not})
        self._poller = self._make_poller(engine, activity, observer)
        if self._stream is None and self._poller is None and not self._why_not:
            self._why_not = "this engine has no method to be polled for them"
        if engine.loses_events():
            _warn_of_host(ends=not is_polled_by_call(engine.llm))

    def _make_poller(self, engine: Engine, activity: Activity, observer: Observer) -> Poller | None:
        poll = poll_of(engine.llm, "get_kv_cache_events")
        if poll is None:
            return None
        return Poller(
            "kv events",
            poll,
            self._feed.publish_polled,
            pace=EVENT_PACE,
            work=work_of,
            activity=activity,
            on_read=observer.events_polled,
            on_error=self._on_error,
        )

    def _follow(self, engine: Engine, normaliser: KvStreamNormaliser, observer: Observer) -> str:
        """Use the engine's own stream as the source. Why that is impossible, or ""."""
        config: Any = engine.event_stream
        given = {
            name: setting(config, name) for name in ("endpoint", "replay_endpoint", "topic", "hwm")
        }
        defaults = {"endpoint": "tcp://*:5557", "topic": "", "hwm": 100_000}
        given |= {name: one for name, one in defaults.items() if given[name] is None}
        try:
            settings = stream_settings(**given, n_ranks=engine.n_ranks)
        except ValueError as error:
            return f"kv_cache_config.kv_events_config.{error}"
        if why_not := engine.ranks_elsewhere() or pyzmq_missing():
            return f"kv_cache_config.kv_events_config: {why_not}"
        self._stream = StreamSource(
            settings, normaliser, take=self._feed.publish_polled, on_read=observer.events_polled
        )
        return ""

    async def run(self) -> None:
        """Read events until cancelled; every stream ends then."""
        try:
            if self._stream is not None:
                await self._stream.run()
            elif self._poller is not None and not self._why_not:
                await self._poller.run()
        finally:
            self._feed.end_streams()

    def end_streams(self) -> None:
        """End every stream and accept no subscriber any more; events are still read."""
        self._feed.end_streams()

    def subscribe(self, request: bytes, metadata: Metadata, sink: Sink) -> Call:
        """`KvFeed.subscribe`. Raises `RequestRefused` as that does, and where the engine has no events."""
        if self._why_not:
            raise RequestRefused(grpc.StatusCode.FAILED_PRECONDITION, f"kv events: {self._why_not}")
        return self._feed.subscribe(request, metadata, sink)

    def sources(self, ranks: list[int]) -> list[oe.KvEventSource]:
        """A source for each of these ranks, or all; none if events are off. Raises `RequestRefused`."""
        for rank in ranks:
            if rank >= self._n_ranks:
                reason = f"{rank} is not one of 0..{self._n_ranks - 1}"
                raise invalid("data_parallel_ranks", reason)
        if self._why_not:
            return []
        return [
            oe.KvEventSource(
                transport="grpc",
                data_parallel_rank=rank,
                encoding="protobuf",
                schema_version=SCHEMA_VERSION,
                buffer_steps=self._history_batches,
            )
            for rank in sorted(set(ranks)) or range(self._n_ranks)
        ]

    def counters(self) -> dict[str, int]:
        """Counts of events, of those that were lost, and of reads that failed, by name."""
        if self._why_not:
            return {}
        counts = {f"kv_event_{name}": count for name, count in self._feed.counters().items()}
        if self._stream is None:
            assert self._poller is not None
            return {**counts, "kv_event_poll_errors": self._poller.n_errors}
        more = {f"kv_event_{name}": count for name, count in self._stream.counters().items()}
        return {**counts, **more, "kv_event_socket_errors": self._stream.n_errors}


def _warn_of_host(*, ends: bool) -> None:
    """Say what a cache on the host does to the events of early versions."""
    does = (
        "the first block that moves there ends the events, and then the engine"
        if ends
        else "a block that moves there loses the events around it, and what is published starts over"
    )
    reason = (
        f"with this version of TensorRT-LLM {does}: take kv_cache_config.host_cache_size out, or set "
        "event_buffer_max_size: 0"
    )
    log.warning("kv_events.host_cache", extra={"reason": reason})
