"""A worker that only encodes images.

OpenEngine v0.1.0 has no role and no call for an encoder, and its results are handles to GPU memory of this
host. So such a worker serves its health and its description, and refuses Generate with UNIMPLEMENTED.
"""

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import grpc
from typing_extensions import override

from slagate.proto import openengine_pb2 as oe
from slagate.proto.rpc.sinks import Call, EndedCall, Sink
from slagate.proto.rpc.status import Metadata
from slagate.workers.errors import RequestRefused, not_found
from slagate.workers.runtime.usage import UsageError
from slagate.workers.runtime.waiting import run_in_daemon_thread
from slagate.workers.trtllm.package import as_usage, load_package, shut_down, with_telemetry_choice
from slagate.workers.worker import SCHEMA_RELEASE, Worker

log = logging.getLogger(__name__)

NOT_SERVED = "this worker encodes images only, and the protocol has no call for that yet"

WITHOUT_ENCODER = ("Llama4ForConditionalGeneration",)
"""Architectures whose encoder TensorRT-LLM cannot run alone."""


class Encoder(NamedTuple):
    """An engine that encodes; `engine` is None for a model without an encoder of its own."""

    version: str
    engine: Any | None


async def start_encoder(values: Mapping[str, Any]) -> Encoder:
    """Import the package and construct `MultimodalEncoder`, on threads. Raises what `start_engine` does."""
    package = await run_in_daemon_thread(load_package)
    make = package.MultimodalEncoder
    if make is None:
        raise UsageError(f"--role encode: tensorrt_llm {package.version} has no MultimodalEncoder")
    if (architecture := _architecture(str(values["model"]))) in WITHOUT_ENCODER:
        log.warning("encoder.none", extra={"architecture": architecture})
        return Encoder(package.version, None)
    values = with_telemetry_choice(values, package, os.environ)
    taken = {name: value for name, value in values.items() if value is not None}
    engine = await run_in_daemon_thread(as_usage(lambda: make(**taken)))
    return Encoder(package.version, engine)


def _architecture(model: str) -> str:
    """The first architecture in the model's configuration; "" where the model is not a local folder."""
    try:
        config = json.loads((Path(model) / "config.json").read_text())
        return str(config["architectures"][0])
    except (OSError, ValueError, LookupError, TypeError):
        return ""


class EncodeWorker(Worker):
    """The `Worker` port of an encoder."""

    def __init__(self, encoder: Encoder, *, model: str, instance_id: str) -> None:
        self._encoder = encoder
        self._model = model
        self._instance_id = instance_id

    async def shut_down(self, limit_s: float) -> str:
        """End the encoder within `limit_s`. Why it may not have ended, or ""."""
        engine = self._encoder.engine
        return "" if engine is None else await shut_down(engine, limit_s=limit_s)

    @override
    def generate(
        self, request: bytes, metadata: Metadata, sink: Sink, *, timeout_s: float | None
    ) -> Call:
        sink.finish(_not_served().status)
        return EndedCall()

    @override
    def kv_events(self, request: bytes, metadata: Metadata, sink: Sink) -> Call:
        sink.finish(_not_served().status)
        return EndedCall()

    @override
    async def kv_event_sources(
        self, request: oe.GetKvEventSourcesRequest
    ) -> oe.GetKvEventSourcesResponse:
        return oe.GetKvEventSourcesResponse()

    @override
    async def abort(self, request: oe.AbortRequest) -> oe.AbortResponse:
        raise _not_served()

    @override
    async def load(self, request: oe.GetLoadRequest) -> oe.LoadInfo:
        return oe.LoadInfo(instance_id=self._instance_id)

    @override
    async def health(self, request: oe.HealthRequest) -> oe.HealthResponse:
        checks = [oe.HealthCheck(name="grpc", state=oe.HEALTH_STATE_READY)]
        state = oe.HEALTH_STATE_READY
        message = ""
        if self._encoder.engine is None:
            state, message = oe.HEALTH_STATE_DEGRADED, "this model has no encoder of its own"
        checks.append(oe.HealthCheck(name="model", state=state, message=message))
        return oe.HealthResponse(state=state, checks=checks)

    @override
    async def server_info(self) -> oe.ServerInfo:
        # Without a role: OpenEngine v0.1.0 has none for encoders.
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

    @override
    async def model_info(self, model: str) -> oe.ModelInfo:
        if model != self._model:
            raise not_found("model", f"{model!r} is not served here")
        return oe.ModelInfo(model_id=model, served_model_name=model, supports_multimodal=False)


def _not_served() -> RequestRefused:
    return RequestRefused(grpc.StatusCode.UNIMPLEMENTED, NOT_SERVED)
