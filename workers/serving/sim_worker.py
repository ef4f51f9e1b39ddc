"""A `TrtllmWorker` over the simulated engine, from the options of a worker process."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path

import anyio

from slagate.workers.engine_args.build import KV_EVENTS
from slagate.workers.handoff.seal import read_key
from slagate.workers.kv_transfer.transport import KvTransport
from slagate.workers.logits.processors import LogitsProcessors
from slagate.workers.profiles.profile import TpProfile, load_profile
from slagate.workers.runtime.usage import UsageError
from slagate.workers.sim.api import SimApi, sim_api
from slagate.workers.sim.args import END_ID, VOCAB_SIZE, SimSettings
from slagate.workers.sim.llm import SimLLM
from slagate.workers.trtllm.metrics import SILENT, Observer
from slagate.workers.trtllm.server_info import ROLES, WorkerIdentity
from slagate.workers.trtllm.worker import TrtllmWorker

BLOCK_TOKENS = 32

HANDOFF_TIMEOUT_S = 60.0
"""How long a prefill worker keeps a handoff that is not fetched; TensorRT-LLM's default is for ever."""

KV_TRANSFER_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class SimOptions:
    """How to run the simulated engine."""

    role: str
    profile: str
    tp: int
    model: str | None = None  # None: the profile's
    time_scale: float = 1.0
    kv_blocks: int | None = None  # of each rank; None: the profile's capacity
    kv_block_bytes: int = 4096
    max_batch_size: int = 256
    max_seq_len: int = 131_072
    attention_dp: bool = False
    kv_host_blocks: int = 0
    kv_events: int = KV_EVENTS
    stream_interval: int = 1
    transport: str = "auto"
    kv_transfer_timeout_s: float = KV_TRANSFER_TIMEOUT_S
    handoff_timeout_s: float = HANDOFF_TIMEOUT_S
    handoff_key_file: Path | None = None
    api: str = "main"
    logits: LogitsProcessors = field(default_factory=LogitsProcessors)


def check_options(options: SimOptions) -> None:
    """Check the options without starting anything. Raises `ProfileError` or `UsageError`."""
    if options.role not in ROLES:
        raise UsageError(f"--role must be one of {', '.join(ROLES)} (got {options.role!r})")
    load_profile(options.profile).tp(options.tp)
    _api(options.api)
    read_key(options.handoff_key_file)
    options.logits.check(end_id=END_ID, vocab_size=VOCAB_SIZE)


@asynccontextmanager
async def sim_worker(
    options: SimOptions,
    *,
    instance_id: str,
    transport: KvTransport | None,
    observer: Observer = SILENT,
) -> AsyncIterator[TrtllmWorker]:
    """Run the worker for the time of the block; the caller closes `transport`.

    Raises `ProfileError` or `UsageError` naming a wrong option.
    """
    profile = load_profile(options.profile).tp(options.tp)
    if options.kv_blocks is not None:
        # Not by `max_tokens`, with which an engine can only have fewer blocks than fit its memory.
        profile = replace(profile, kv_capacity_tokens=options.kv_blocks * BLOCK_TOKENS)
    api = _api(options.api)
    llm = _sim_llm(options, profile, api, transport=transport, instance_id=instance_id)
    identity = WorkerIdentity(
        role=ROLES[options.role],
        model=options.model or profile.model,
        instance_id=instance_id,
        engine_version=f"simulated by slagate {version('slagate')}, API {options.api}",
        transfer_backend="" if transport is None else transport.name,
        tensor_parallel_size=options.tp,
        end_id=END_ID,
        vocab_size=VOCAB_SIZE,
    )
    try:
        async with anyio.create_task_group() as tasks:
            yield TrtllmWorker(
                llm,
                api=api,
                identity=identity,
                tasks=tasks,
                release_session=None if transport is None else llm.release_session,
                connector=transport,
                handoff_key=read_key(options.handoff_key_file),
                observer=observer,
                logits=options.logits,
            )
            tasks.cancel_scope.cancel()
    finally:
        llm.shutdown()


def _api(name: str) -> SimApi:
    try:
        return sim_api(name)
    except ValueError as error:
        raise UsageError(f"--api: {error}") from error


def _sim_llm(
    options: SimOptions,
    profile: TpProfile,
    api: SimApi,
    *,
    transport: KvTransport | None,
    instance_id: str,
) -> SimLLM:
    transceiver = None
    if transport is not None:
        timeout_ms = max(1, round(options.handoff_timeout_s * 1000))
        transceiver = {"backend": "DEFAULT", "kv_transfer_timeout_ms": timeout_ms}
    host_bytes = options.kv_host_blocks * BLOCK_TOKENS * profile.kv_bytes_per_token
    kv_cache: dict[str, object] = {
        "tokens_per_block": BLOCK_TOKENS,
        "event_buffer_max_size": options.kv_events,
        "host_cache_size": host_bytes or None,
    }
    place = blake2b(instance_id.encode(), digest_size=2).digest()
    try:
        llm: SimLLM = api.LLM(
            options.model or profile.model,
            skip_tokenizer_init=True,
            tensor_parallel_size=options.tp,
            enable_attention_dp=options.attention_dp,
            max_batch_size=options.max_batch_size,
            max_seq_len=options.max_seq_len,
            enable_chunked_prefill=True,
            enable_iter_perf_stats=True,
            stream_interval=options.stream_interval,
            kv_cache_config=kv_cache,
            cache_transceiver_config=transceiver,
            sim=SimSettings(
                profile=profile,
                transport=transport,
                kv_block_bytes=options.kv_block_bytes,
                time_scale=options.time_scale,
                # Handoff ids should not repeat over workers, and block hashes must differ between them.
                node_id=place[0],
                process_id=place[1] % 64,
                instance_salt=instance_id.encode(),
            ),
        )
    except ValueError as error:
        raise UsageError(str(error)) from error
    return llm
