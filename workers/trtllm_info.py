"""What a TensorRT-LLM worker says of itself: server, model, load, health."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from slagate.proto import openengine_pb2 as oe

SCHEMA_RELEASE = "768a93c7b44e40f28c692ad0b471a8f2"
"""Immutable release of the OpenEngine v0.1.0 schema: the only field that tells its copies apart."""


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """What a worker is, fixed for the life of its process."""

    role: oe.EngineRole.ValueType
    model: str
    instance_id: str
    engine_version: str
    transfer_backend: str  # "" without a KV transceiver
    tensor_parallel_size: int
    end_id: int

    @property
    def role_name(self) -> str:
        """`prefill`, `decode` or `aggregated`."""
        return oe.EngineRole.Name(self.role).removeprefix("ENGINE_ROLE_").lower()


def server_info(llm: Any, identity: WorkerIdentity, *, frees_handoffs: bool) -> oe.ServerInfo:
    """`ServerInfo` with what the engine was configured to."""
    info = oe.ServerInfo(
        engine_name="tensorrt_llm",
        engine_version=identity.engine_version,
        engine_role=identity.role,
        instance_id=identity.instance_id,
        supported_models=[identity.model],
        parallelism=oe.ParallelismInfo(tensor_parallel_size=identity.tensor_parallel_size),
        schema_revision=1,
        minimum_client_revision=1,
        schema_release=SCHEMA_RELEASE,
        capacity=oe.DeploymentCapacity(
            kv_block_size=llm.args.kv_cache_config.tokens_per_block,
            max_running_requests=llm.args.max_batch_size,
            max_batched_tokens=llm.args.max_num_tokens,
        ),
    )
    # Older engines cannot say how many blocks they have; absent then, not zero.
    capacity = getattr(llm, "get_kv_cache_capacity", None)
    if capacity is not None:
        info.capacity.total_kv_blocks = capacity()["maxNumBlocks"]
    if identity.transfer_backend:
        info.kv_connector.CopyFrom(
            oe.KvConnectorInfo(
                enabled=True,
                transfer_backend=identity.transfer_backend,
                supports_remote_prefill=True,
                supports_decode_pull=True,
                supports_abort_cleanup=frees_handoffs,
                schema_version=1,
            )
        )
    return info


def window_tokens(llm: Any) -> int:
    """Prompt and output together: the engine's sequence length, or its KV cache where that is smaller."""
    capacity = getattr(llm, "get_kv_cache_capacity", None)
    limit = llm.args.max_seq_len
    return int(limit if capacity is None else min(limit, capacity()["maxNumTokens"]))


def model_info(llm: Any, identity: WorkerIdentity) -> oe.ModelInfo:
    """`ModelInfo`: only what this worker really does is claimed."""
    return oe.ModelInfo(
        model_id=identity.model,
        served_model_name=identity.model,
        max_context_length=window_tokens(llm),
        supports_text_input=False,
        supports_token_ids_input=True,
        supports_lora=False,
        supports_multimodal=False,
        generation=oe.GenerationCapabilities(
            prompt_logprobs=oe.LogprobCapabilities(supported=False),
            output_logprobs=oe.LogprobCapabilities(supported=False),
            guided_decoding=oe.GuidedDecodingCapabilities(supported=False),
            max_num_sequences=1,
            supports_priority=False,
            supports_stop_in_output=True,
            supports_cache_salt=True,
            supports_prefix_cache_bypass=False,
        ),
    )


def load(
    llm: Any, identity: WorkerIdentity, *, n_live: int, row: dict[str, Any] | None
) -> oe.LoadInfo:
    """`LoadInfo` from the engine's newest iteration stats; before the first there is only `n_live`."""
    info = oe.LoadInfo(instance_id=identity.instance_id, running_requests=n_live)
    if row is not None:
        info.queued_requests = row["numQueuedRequests"]
        cache = row["kvCacheStats"]
        info.used_kv_blocks, info.total_kv_blocks = cache["usedNumBlocks"], cache["maxNumBlocks"]
    # Where the engine can say what it holds now, that beats the last iteration.
    used = getattr(llm, "used_blocks", None)
    if used is not None:
        info.used_kv_blocks = used
    parked = getattr(llm, "n_parked", None)
    if parked is not None:
        info.active_kv_sessions = parked
    for name in ("kv_verify_failures", "kv_transfer_failures"):
        count = getattr(llm, name, None)
        if count is not None:
            info.attributes[name] = count
    return info


async def health(
    llm: Any,
    identity: WorkerIdentity,
    request: oe.HealthRequest,
    *,
    probe: Callable[[], Awaitable[None]] | None,
) -> oe.HealthResponse:
    """The first part that is not READY decides the state; `probe` is run when it is given."""
    checks = [
        oe.HealthCheck(name="grpc", state=oe.HEALTH_STATE_READY),
        oe.HealthCheck(name="model", state=_engine_state(llm)),
    ]
    if request.role not in (oe.ENGINE_ROLE_UNSPECIFIED, identity.role):
        message = f"this is a {identity.role_name} worker"
        checks.append(oe.HealthCheck(name="role", state=oe.HEALTH_STATE_NOT_READY, message=message))
    if probe is not None:
        checks.append(await _probed(probe))
    states = [check.state for check in checks if check.state != oe.HEALTH_STATE_READY]
    return oe.HealthResponse(state=states[0] if states else oe.HEALTH_STATE_READY, checks=checks)


def _engine_state(llm: Any) -> oe.HealthState.ValueType:
    # Old engines have no such method; what is known of them is that they were built.
    check = getattr(llm, "_check_health", None)
    alive = check is None or check()
    return oe.HEALTH_STATE_READY if alive else oe.HEALTH_STATE_NOT_READY


async def _probed(probe: Callable[[], Awaitable[None]]) -> oe.HealthCheck:
    try:
        await probe()
    except (RuntimeError, TimeoutError) as error:
        return oe.HealthCheck(
            name="inference_probe", state=oe.HEALTH_STATE_DEGRADED, message=str(error)
        )
    return oe.HealthCheck(name="inference_probe", state=oe.HEALTH_STATE_READY)
