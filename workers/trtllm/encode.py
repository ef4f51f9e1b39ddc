"""A worker that only encodes images: the engine of it, and what OpenEngine v0.1.0 lets it serve.

That is its health, and what it is. The protocol has no role and no call for an encoder, and its results
are handles to GPU memory of this host, so Generate says UNIMPLEMENTED and names what is missing.
"""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc

from slagate.proto import openengine_pb2 as oe
from slagate.proto.rpc.sinks import Call, EndedCall, Sink
from slagate.proto.rpc.status import Metadata
from slagate.workers.errors import RequestRefused
from slagate.workers.runtime.usage import UsageError
from slagate.workers.runtime.waiting import run_in_daemon_thread
from slagate.workers.trtllm.package import EnginePackage, as_usage, load_package, shut_down
from slagate.workers.worker import SCHEMA_RELEASE

log = logging.getLogger(__name__)

NOT_SERVED = "this worker encodes images only, and the protocol has no call for that yet"

WITHOUT_ENCODER = ("Llama4ForConditionalGeneration",)
"""Architectures whose encoder TensorRT-LLM does not run by itself."""


class Encoder:
    """An engine that encodes, or the reason why there is none."""

    def __init__(self, package: EnginePackage, engine: Any | None) -> None:
        self.version = package.version
        self.engine = engine


async def start_encoder(values: Mapping[str, Any]) -> Encoder:
    """Import the package and construct `MultimodalEncoder`, on threads. Raises as `start_engine`."""
    package = await run_in_daemon_thread(load_package)
    make = package.MultimodalEncoder
    if make is None:
        raise UsageError(f"--role encode: tensorrt_llm {package.version} has no MultimodalEncoder")
    if (architecture := _architecture(str(values["model"]))) in WITHOUT_ENCODER:
        log.warning("encoder.none", extra={"architecture": architecture})
        return Encoder(package, None)
    taken = {name: value for name, value in values.items() if value is not None}
    engine = await run_in_daemon_thread(as_usage(lambda: make(**taken)))
    return Encoder(package, engine)


def _architecture(model: str) -> str:
    """The first that the model's own configuration names; "" where the model is not a folder here."""
    try:
        config = json.loads((Path(model) / "config.json").read_text())
        return str(config["architectures"][0])
    except (OSError, ValueError, LookupError, TypeError):
        return ""


class EncodeWorker:
    """The `Worker` port of an encoder."""

    def __init__(self, encoder: Encoder, *, model: str, instance_id: str) -> None:
        self._encoder = encoder
        self._model = model
        self._instance_id = instance_id

    async def shut_down(self, limit_s: float) -> bool:
        """End the encoder; whether it did in time."""
        engine = self._encoder.engine
        return engine is None or await shut_down(engine, limit_s=limit_s)

    def generate(
        self, request: bytes, metadata: Metadata, sink: Sink, *, timeout_s: float | None
    ) -> Call:
        """Refuses."""
        sink.finish(_not_served().status)
        return EndedCall()

    def kv_events(self, request: bytes, metadata: Metadata, sink: Sink) -> Call:
        """Refuses."""
        sink.finish(_not_served().status)
        return EndedCall()

    async def kv_event_sources(
        self, request: oe.GetKvEventSourcesRequest
    ) -> oe.GetKvEventSourcesResponse:
        """There is no KV cache."""
        return oe.GetKvEventSourcesResponse()

    async def abort(self, request: oe.AbortRequest) -> oe.AbortResponse:
        """Refuses: nothing runs."""
        raise _not_served()

    async def load(self, request: oe.GetLoadRequest) -> oe.LoadInfo:
        """Nothing runs."""
        return oe.LoadInfo(instance_id=self._instance_id)

    async def health(self, request: oe.HealthRequest) -> oe.HealthResponse:
        """Ready where there is an encoder; DEGRADED, with the reason, where the model has none."""
        checks = [oe.HealthCheck(name="grpc", state=oe.HEALTH_STATE_READY)]
        state = oe.HEALTH_STATE_READY
        message = ""
        if self._encoder.engine is None:
            state, message = oe.HEALTH_STATE_DEGRADED, "this model has no encoder of its own"
        checks.append(oe.HealthCheck(name="model", state=state, message=message))
        return oe.HealthResponse(state=state, checks=checks)

    async def server_info(self) -> oe.ServerInfo:
        """Without a role: OpenEngine v0.1.0 names none that encodes."""
        info = oe.ServerInfo(
            engine_name="tensorrt_llm",
            engine_version=self._encoder.version,
            instance_id=self._instance_id,
            supported_models=[self._model],
            schema_revision=1,
            minimum_client_revision=1,
            schema_release=SCHEMA_RELEASE,
        )
        info.extra["slagate_role"] = "encode"
        return info

    async def model_info(self, model: str) -> oe.ModelInfo:
        """Takes neither text nor tokens."""
        if model != self._model:
            raise RequestRefused(grpc.StatusCode.NOT_FOUND, f"model: {model!r} is not served here")
        return oe.ModelInfo(model_id=model, served_model_name=model, supports_multimodal=False)


def _not_served() -> RequestRefused:
    return RequestRefused(grpc.StatusCode.UNIMPLEMENTED, NOT_SERVED)
