"""A TensorRT-LLM worker's answers to GetServerInfo, GetModelInfo and Health."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from slagate.proto import openengine_pb2 as oe
from slagate.workers.trtllm.engine import Engine, setting
from slagate.workers.trtllm.handoffs import Handoffs
from slagate.workers.trtllm.sampling import MAX_TOP_N, UINT32_MAX, capabilities, max_sequences
from slagate.workers.worker import SCHEMA_RELEASE

ROLES = {
    "prefill": oe.ENGINE_ROLE_PREFILL,
    "decode": oe.ENGINE_ROLE_DECODE,
    "agg": oe.ENGINE_ROLE_AGGREGATED,
}
"""Roles by their names on the command line. OpenEngine has none for workers that only encode."""


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
    kv_transport: str = ""  # what `transfer_backend` stands for, such as NIXL; "": not known
    transfer_library: str = ""  # what that stands on, such as UCX below NIXL; "": not known
    engine_knows_end: bool = False  # then it is not told: a model may have several end tokens
    vocab_size: int | None = None  # None: not known, so the engine checks token ids
    takes_any_leg: bool = False  # also those of other roles: while nobody but a check can call

    @property
    def role_name(self) -> str:
        """`prefill`, `decode` or `aggregated`."""
        return oe.EngineRole.Name(self.role).removeprefix("ENGINE_ROLE_").lower()


def server_info(engine: Engine, identity: WorkerIdentity, handoffs: Handoffs) -> oe.ServerInfo:
    """The answer to GetServerInfo, from the engine's configuration."""
    info = oe.ServerInfo(
        engine_name="tensorrt_llm",
        engine_version=identity.engine_version,
        engine_role=identity.role,
        instance_id=identity.instance_id,
        supported_models=[identity.model],
        parallelism=oe.ParallelismInfo(
            tensor_parallel_size=identity.tensor_parallel_size, data_parallel_size=engine.n_ranks
        ),
        schema_revision=1,
        minimum_client_revision=1,
        schema_release=SCHEMA_RELEASE,
        capacity=oe.DeploymentCapacity(
            kv_block_size=engine.block_tokens,
            max_running_requests=engine.max_batch_size,
            max_batched_tokens=engine.max_num_tokens,
        ),
    )
    # Older engines cannot say how many blocks they have; the field is absent then, not 0.
    if engine.blocks_per_rank is not None:
        info.capacity.total_kv_blocks = engine.blocks_per_rank * engine.n_ranks
    takes_rank = engine.n_ranks == 1 or engine.takes("scheduling_params")
    decodes = identity.role == oe.ENGINE_ROLE_DECODE
    info.extra["trtllm_supports_dp_rank_targeting"] = takes_rank and not decodes
    info.extra["slagate_supports_decode_dp_rank"] = takes_rank and decodes
    info.extra.update(_pair_fields(engine, identity, handoffs))
    if identity.transfer_backend:
        info.kv_connector.CopyFrom(
            oe.KvConnectorInfo(
                enabled=True,
                transfer_backend=identity.transfer_backend,
                supports_remote_prefill=True,
                supports_decode_pull=True,
                supports_abort_cleanup=handoffs.can_release,
                schema_version=1,
            )
        )
    return info


def _pair_fields(engine: Engine, identity: WorkerIdentity, handoffs: Handoffs) -> dict[str, Any]:
    """What the two workers of a handoff must agree on, or know of each other: keys of `ServerInfo.extra`.

    A key that is missing is not known; stock servers have none of them. docs/worker.md has the table.
    """
    cache = setting(engine.llm.args, "kv_cache_config")
    manager = setting(cache, "use_kv_cache_manager_v2")
    known: dict[str, Any] = {
        "slagate_kv_dtype": kv_dtype(engine.llm.args),
        # A version without the argument has the V1 manager only.
        "slagate_kv_cache_manager": "auto" if manager == "auto" else "v2" if manager else "v1",
    }
    if identity.transfer_backend:
        transceiver = setting(engine.llm.args, "cache_transceiver_config")
        runtime = setting(transceiver, "transceiver_runtime")
        limit_ms = setting(transceiver, "kv_transfer_timeout_ms")
        known |= {
            "slagate_kv_transport": identity.kv_transport or None,
            "slagate_kv_transport_library": identity.transfer_library or None,
            "slagate_transceiver_runtime": (runtime or "CPP").lower(),
            "slagate_handoff_key": handoffs.key_fingerprint,
            "slagate_handoff_limit_s": None if limit_ms is None else limit_ms / 1000,
        }
    if identity.role == oe.ENGINE_ROLE_DECODE:
        known |= {
            "slagate_repeats_first_token": True,
            "slagate_takes_whole_requests": _takes_any_prompt(engine),
        }
    return {name: value for name, value in known.items() if value is not None}


def _takes_any_prompt(engine: Engine) -> bool:
    """Whether the engine computes each prompt that fits its context window.

    A decode engine may be built for steps of few tokens, and without chunks refuses any longer prompt.
    While the window is not known the answer is no.
    """
    most, window = engine.max_prompt_tokens, engine.window_tokens
    return most is None or (window is not None and window <= most)


def kv_dtype(args: Any) -> str | None:
    """The type of an engine's KV cache, of its arguments; `auto` is the model's own, None not known.

    What the checkpoint says of its quantisation the engine has put into its arguments, where `auto` leaves
    the type to it (test_llm_api_pytorch.py id 4431849827, model_loader.py id 3418473958
    `validate_and_set_kv_cache_quant`).
    """
    dtype = setting(setting(args, "kv_cache_config"), "dtype")
    of_checkpoint = setting(setting(args, "quant_config"), "kv_cache_quant_algo")
    if dtype == "auto" and isinstance(of_checkpoint, str):
        return str(getattr(of_checkpoint, "value", of_checkpoint)).lower()
    return dtype if isinstance(dtype, str) else None


def model_info(engine: Engine, identity: WorkerIdentity) -> oe.ModelInfo:
    """The answer to GetModelInfo, which claims only what this worker can really do."""
    hands_off = identity.role != oe.ENGINE_ROLE_AGGREGATED
    window = engine.window_tokens
    no_logprobs = oe.LogprobCapabilities(supported=False)
    logprobs = oe.LogprobCapabilities(
        supported=True,
        candidate_selection_modes=[oe.CANDIDATE_TOKEN_SELECTION_MODE_TOP_N],
        max_top_n=MAX_TOP_N,
    )
    return oe.ModelInfo(
        model_id=identity.model,
        served_model_name=identity.model,
        max_context_length=None if window is None or window > UINT32_MAX else window,
        supports_text_input=False,
        supports_token_ids_input=True,
        supports_lora=False,
        supports_multimodal=False,
        generation=oe.GenerationCapabilities(
            # The prompt of a decode leg was processed by another engine.
            prompt_logprobs=no_logprobs if identity.role == oe.ENGINE_ROLE_DECODE else logprobs,
            output_logprobs=no_logprobs
            if hands_off and not engine.hands_off_logprobs
            else logprobs,
            guided_decoding=capabilities(engine),
            max_num_sequences=max_sequences(engine, hands_off=hands_off),
            supports_priority=False,
            supports_stop_in_output=True,
            supports_cache_salt=not engine.salts_off(),
            supports_prefix_cache_bypass=False,
        ),
    )


async def health(
    identity: WorkerIdentity,
    request: oe.HealthRequest,
    *,
    fatal: str,
    kv_problem: str,
    probe: Callable[[], Awaitable[str]] | None,
) -> oe.HealthResponse:
    """The answer to Health: the state is that of the first part that is not READY.

    `fatal` is what the engine died of, `kv_problem` why KV transfers cannot work, and `probe`, if given, is
    called for why the engine generates no token; "" where all is well.
    """
    checks = [oe.HealthCheck(name="grpc", state=oe.HEALTH_STATE_READY)]
    if fatal:
        checks.append(_health_check("model", oe.HEALTH_STATE_NOT_READY, fatal))
    else:
        checks.append(_health_check("model"))
    if identity.transfer_backend:
        state = oe.HEALTH_STATE_NOT_READY if kv_problem else oe.HEALTH_STATE_READY
        checks.append(_health_check("kv_connector", state, kv_problem))
    if request.role not in (oe.ENGINE_ROLE_UNSPECIFIED, identity.role):
        message = f"this is a {identity.role_name} worker"
        checks.append(_health_check("role", oe.HEALTH_STATE_NOT_READY, message))
    if probe is not None:
        failure = await probe()
        state = oe.HEALTH_STATE_DEGRADED if failure else oe.HEALTH_STATE_READY
        checks.append(_health_check("inference_probe", state, failure))
    states = [check.state for check in checks if check.state != oe.HEALTH_STATE_READY]
    return oe.HealthResponse(state=states[0] if states else oe.HEALTH_STATE_READY, checks=checks)


def _health_check(
    name: str, state: oe.HealthState.ValueType = oe.HEALTH_STATE_READY, message: str = ""
) -> oe.HealthCheck:
    return oe.HealthCheck(name=name, state=state, message=message)
