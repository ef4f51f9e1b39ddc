"""The `Worker` port: how anything in slagate talks to one TensorRT-LLM worker.

`generate` takes a serialised `openengine.v1.GenerateRequest` and hands each serialised `GenerateResponse`
to a sink, so that a relay need not decode what it only passes on. `WorkerClient` is the gateway's end of
the wire, `TrtllmWorker` the engine's; `serve_worker` puts any worker behind gRPC.

`kv_events` is the other stream, of serialised `SubscribeKvEventsResponse`s. Both keep this contract, which
`tests/contract/test_worker.py` checks:

    generate ──▶ message* ──▶ finish       nothing after finish, which comes exactly once, also after cancel
         refusal before acceptance ──▶ finish(non-OK) with no message before it
         failure after acceptance ──▶ message(EngineError) ──▶ finish(OK)
         pause() ──▶ no message until resume(); what was produced meanwhile is not lost
         timeout_s passes ──▶ no message, finish(DEADLINE_EXCEEDED) unless finished before; paused or not
         cancel() ──▶ no message, finish(CANCELLED) unless finished before; paused or not

All callbacks run on the event loop's thread. `finish` may be called before `generate` returns.
"""

from typing import Protocol

from slagate.proto import openengine_pb2 as oe
from slagate.proto.rpc.sinks import Call, Sink
from slagate.proto.rpc.status import Metadata

GENERATE = "/openengine.v1.Inference/Generate"
SUBSCRIBE_KV_EVENTS = "/openengine.v1.Control/SubscribeKvEvents"
SCHEMA_RELEASE = "768a93c7b44e40f28c692ad0b471a8f2"
"""The immutable release of the OpenEngine v0.1.0 schema; nothing else tells its copies apart."""


class Worker(Protocol):
    """One worker of a pool, local or at the other end of a channel."""

    def generate(
        self, request: bytes, metadata: Metadata, sink: Sink, *, timeout_s: float | None
    ) -> Call:
        """Start one leg, which answers to `sink`. `timeout_s` limits all of it; None: no limit."""

    def kv_events(self, request: bytes, metadata: Metadata, sink: Sink) -> Call:
        """Subscribe to KV-cache events with a serialised `SubscribeKvEventsRequest`, until cancelled.

        The metadata key `x-slagate-instance-id` names the incarnation that a start number belongs to.
        """

    async def kv_event_sources(
        self, request: oe.GetKvEventSourcesRequest
    ) -> oe.GetKvEventSourcesResponse:
        """Where to subscribe to each rank's events; none where they are off. Raises `WorkerError`."""

    async def abort(self, request: oe.AbortRequest) -> oe.AbortResponse:
        """Abort one request or free one parked handoff. Raises `WorkerError`."""

    async def load(self, request: oe.GetLoadRequest) -> oe.LoadInfo:
        """Requests that run and wait now, and KV blocks in use. Raises `WorkerError`."""

    async def health(self, request: oe.HealthRequest) -> oe.HealthResponse:
        """The state of the worker and of its parts. Raises `WorkerError`."""

    async def server_info(self) -> oe.ServerInfo:
        """Role, topology, capacity, KV transfer. Raises `WorkerError`."""

    async def model_info(self, model: str) -> oe.ModelInfo:
        """What a served model can do. Raises `WorkerError`: NOT_FOUND for a model that is not served."""
