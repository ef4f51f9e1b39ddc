"""The KV events of one engine: polled while it works, and fed to whoever subscribes."""

import grpc

from slagate.proto import openengine_pb2 as oe
from slagate.workers.clock import unix_nanos
from slagate.workers.errors import Refused
from slagate.workers.kv_event_fields import work_of
from slagate.workers.kv_feed import KvFeed
from slagate.workers.trtllm_engine import Engine
from slagate.workers.trtllm_observer import Observer
from slagate.workers.trtllm_poll import EVENT_PACE, Activity, Poller
from slagate.workers.worker import Call, Metadata, Sink

SCHEMA_VERSION = 1


class EngineEvents:
    """The feed and its poller, or the reason why an engine has neither."""

    def __init__(
        self,
        engine: Engine,
        activity: Activity,
        *,
        instance_id: str,
        history_batches: int,
        observer: Observer,
    ) -> None:
        """`history_batches` of each rank are kept for subscribers that come back."""
        self._why_not = engine.events_off()
        self._n_ranks = engine.n_ranks
        self._history_batches = history_batches
        self._feed = KvFeed(
            ranks=engine.n_ranks,
            block_tokens=engine.block_tokens,
            instance_id=instance_id,
            unix_nanos=unix_nanos,
            history_batches=history_batches,
        )
        self._poller = Poller(
            "kv events",
            lambda: engine.llm.get_kv_cache_events_async(timeout=0),
            self._feed.take,
            pace=EVENT_PACE,
            work=work_of,
            activity=activity,
            on_read=observer.drained,
        )

    async def run(self) -> None:
        """Poll until cancelled; every stream ends with it."""
        try:
            if not self._why_not:
                await self._poller.run()
        finally:
            self._feed.close()

    def close(self) -> None:
        """End every stream and take no subscriber any more; the events go on being read."""
        self._feed.close()

    def subscribe(self, request: bytes, metadata: Metadata, sink: Sink) -> Call:
        """As `KvFeed.subscribe`. Raises `Refused`, FAILED_PRECONDITION where there are no events."""
        if self._why_not:
            raise Refused(grpc.StatusCode.FAILED_PRECONDITION, f"kv events: {self._why_not}")
        return self._feed.subscribe(request, metadata, sink)

    def sources(self, ranks: list[int]) -> list[oe.KvEventSource]:
        """One a rank asked for, none where events are off. Raises `Refused` for a rank there is not."""
        for rank in ranks:
            if rank >= self._n_ranks:
                raise Refused(
                    grpc.StatusCode.INVALID_ARGUMENT,
                    f"data_parallel_ranks: {rank} is not one of 0..{self._n_ranks - 1}",
                )
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
        """What was lost on the way and where the streams stand, by name; none where there are no events."""
        if self._why_not:
            return {}
        counts = {f"kv_event_{name}": count for name, count in self._feed.counters().items()}
        return {**counts, "kv_event_poll_errors": self._poller.n_errors}
