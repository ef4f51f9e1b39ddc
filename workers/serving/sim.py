"""A worker process with a simulated engine, until a signal or the engine's end."""

import ipaddress
import logging
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import anyio

from slagate.proto import openengine_pb2 as oe
from slagate.proto.rpc.address import Address
from slagate.workers.engine_args.build import KV_EVENTS
from slagate.workers.handoff.seal import read_key
from slagate.workers.kv_transfer.nixl.nixl import NixlTransport, self_check
from slagate.workers.kv_transfer.shm import SharedMemoryTransport
from slagate.workers.kv_transfer.transport import KvTransferError, KvTransport, KvUnavailable
from slagate.workers.logits.processors import LogitsProcessors
from slagate.workers.profiles.profile import TpProfile, load_profile
from slagate.workers.runtime.listen import on_sighup, stopped
from slagate.workers.runtime.usage import UsageError
from slagate.workers.server import serve_worker
from slagate.workers.serving.serve import FLUSH_S, metrics_served, tell_ready, until_stopped
from slagate.workers.sim.api import NEWEST, SimApi, sim_api
from slagate.workers.sim.args import END_ID, LACKS, VOCAB_SIZE, SimSettings
from slagate.workers.sim.llm import SimLLM
from slagate.workers.sim.timing import Conditions
from slagate.workers.tls.files import TlsFiles
from slagate.workers.tls.reloading import ServerTls, following
from slagate.workers.trtllm.engine import ask_kv_capacity
from slagate.workers.trtllm.metrics import SILENT, Observer, WorkerMetrics
from slagate.workers.trtllm.poll import STATS_PACE, Pace
from slagate.workers.trtllm.server_info import ROLES, WorkerIdentity
from slagate.workers.trtllm.worker import TrtllmWorker

log = logging.getLogger(__name__)

TRANSPORTS = ("auto", "nixl", "shm")

N_SLOTS = 16_384
"""Enough for a hundred parked prompts of 5,000 tokens in blocks of 32; 64 MiB where a block has 4 KiB.
Slots that are never used cost no memory."""

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
    ranks: int | None = (
        None  # of attention DP, each with the profile's times; None: no attention DP
    )
    kv_host_blocks: int = 0
    kv_events: int = KV_EVENTS
    stream_interval: int = 1
    transport: str = "auto"
    kv_transfer_timeout_s: float = KV_TRANSFER_TIMEOUT_S
    handoff_timeout_s: float = HANDOFF_TIMEOUT_S
    handoff_key_file: Path | None = None
    api: str = NEWEST
    logits: LogitsProcessors = field(default_factory=LogitsProcessors)
    conditions: Conditions = field(default_factory=Conditions)
    stats_every_s: float | None = None  # so often the newest iteration's only; None: all of them

    @property
    def engine_tp(self) -> int:
        """The engine's tensor-parallel size: with attention DP its number of ranks, whatever each has."""
        return self.tp if self.ranks is None else self.ranks

    def load_tp_profile(self) -> TpProfile:
        """The model's timings and capacity, with `kv_blocks`. Raises `ProfileError`."""
        profile = load_profile(self.profile).tp(self.tp)
        if self.kv_blocks is None:
            return profile
        # Not by `max_tokens`, with which an engine can only have fewer blocks than fit its memory.
        return replace(profile, kv_capacity_tokens=self.kv_blocks * BLOCK_TOKENS)


def _check_options(options: SimOptions) -> None:
    """Check the options without starting anything. Raises `ProfileError` or `UsageError`."""
    if options.role not in ROLES:
        raise UsageError(f"--role must be one of {', '.join(ROLES)} (got {options.role!r})")
    options.load_tp_profile()
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
    profile, api, every_s = options.load_tp_profile(), _api(options.api), options.stats_every_s
    llm = _sim_llm(options, profile, api, transport, instance_id)
    identity = WorkerIdentity(
        role=ROLES[options.role],
        model=options.model or profile.model,
        instance_id=instance_id,
        engine_version=f"simulated by slagate {version('slagate')}, API {options.api}",
        transfer_backend="" if transport is None else transport.name,
        kv_transport="" if transport is None else transport.name,
        transfer_library="UCX" if isinstance(transport, NixlTransport) else "",
        tensor_parallel_size=options.engine_tp,
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
                capacity=ask_kv_capacity(llm),
                stats_pace=STATS_PACE if every_s is None else Pace(every_s, 1.0, every_s),
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
    if "kv_cache_config.use_kv_cache_manager_v2" not in LACKS[api.version]:
        # The other manager's events do not say a request's salt, so a worker would refuse it.
        kv_cache["use_kv_cache_manager_v2"] = False
    stats: dict[str, Any] = {} if options.stats_every_s is None else {"max_stats_len": 1}
    place = blake2b(instance_id.encode(), digest_size=2).digest()
    try:
        llm: SimLLM = api.LLM(
            options.model or profile.model,
            skip_tokenizer_init=True,
            tensor_parallel_size=options.engine_tp,
            enable_attention_dp=options.ranks is not None,
            max_batch_size=options.max_batch_size,
            max_seq_len=options.max_seq_len,
            enable_chunked_prefill=True,
            enable_iter_perf_stats=True,
            # Early versions do not survive a context-only request otherwise.
            disable_overlap_scheduler=options.role == "prefill",
            stream_interval=options.stream_interval,
            **stats,
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
                conditions=options.conditions,
            ),
        )
    except ValueError as error:
        raise UsageError(str(error)) from error
    return llm


class OpenedTransport(NamedTuple):
    """A transport, if the worker needs one, and why it is not NIXL, or ""."""

    transport: KvTransport | None
    why_not_nixl: str


async def run_sim_worker(
    options: SimOptions,
    listen: Address,
    *,
    drain_s: float,
    tls: TlsFiles | None,
    metrics_listen: Address | None = None,
) -> int:
    """Serve a simulated worker until SIGTERM, SIGINT or the engine's end; the exit status.

    A SIGHUP has the files of TLS read again; without `tls` it serves plaintext. After the signal, running
    requests and parked handoffs together get `drain_s`. Raises `ProfileError` or `UsageError` naming a
    wrong option, and `OSError` when the address cannot be bound.
    """
    started_s = anyio.current_time()
    instance_id = uuid.uuid4().hex
    side = None if tls is None else ServerTls("clients", tls)
    _check_options(options)
    model = options.model or options.load_tp_profile().model
    metrics = WorkerMetrics(model=model, role=options.role, engine="sim")
    async with (
        _transport(options, listen, instance_id) as opened,
        sim_worker(
            options,
            instance_id=instance_id,
            transport=opened.transport,
            observer=SILENT if metrics_listen is None else metrics,
        ) as worker,
        serve_worker(worker, listen, grace_s=FLUSH_S, tls=side) as address,
        following(side) as reread,
        on_sighup(reread),
        stopped() as signals,
    ):
        metrics.loaded(
            anyio.current_time() - started_s,
            event_capacity=options.kv_events,
            counters=worker.counters,
        )
        with metrics_served(metrics, metrics_listen, not_ready=lambda: "") as metrics_at:
            await tell_ready(
                worker,
                role=options.role,
                address=address,
                metrics_at=metrics_at,
                why_not_nixl=opened.why_not_nixl,
            )
            await until_stopped(worker, signals, drain_s=drain_s)
    return 1 if worker.fatal.is_set() else 0


@asynccontextmanager
async def _transport(
    options: SimOptions, listen: Address, instance_id: str
) -> AsyncIterator[OpenedTransport]:
    """Open the transport that the role needs for the time of the block; an aggregated worker has none."""
    if ROLES[options.role] == oe.ENGINE_ROLE_AGGREGATED:
        yield OpenedTransport(None, "")
        return
    n_blocks = options.load_tp_profile().kv_capacity_tokens // BLOCK_TOKENS
    try:
        opened = open_transport(
            options.transport,
            worker_name=f"{options.role}-{instance_id[:8]}",
            loopback=_is_loopback(listen.host),
            block_bytes=options.kv_block_bytes,
            # As many as the cache has blocks, which parked prompts share in it and here, and their tickets.
            n_slots=max(N_SLOTS, 2 * n_blocks * (options.ranks or 1)),
            pull_limit_s=options.kv_transfer_timeout_s,
        )
    except KvUnavailable as error:
        raise UsageError(f"--transport {options.transport}: {error}") from error
    assert opened.transport is not None
    try:
        yield opened
    finally:
        opened.transport.close()


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def open_transport(
    wanted: str,
    *,
    worker_name: str,
    loopback: bool,
    block_bytes: int,
    pull_limit_s: float,
    n_slots: int = N_SLOTS,
) -> OpenedTransport:
    """Open one of `TRANSPORTS`; "auto" is NIXL where it works, else shared memory.

    `loopback` keeps NIXL off every other network device. `block_bytes` is the largest block to move.
    Raises `KvUnavailable`: for "nixl" when NIXL does not work, and when nothing does.
    """
    if wanted == "shm":
        return OpenedTransport(SharedMemoryTransport(), "shared memory was asked for")
    try:
        nixl = NixlTransport(
            worker_name,
            n_slots=n_slots,
            block_bytes=block_bytes,
            loopback=loopback,
            pull_limit_s=pull_limit_s,
        )
        try:
            self_check(nixl, loopback=loopback)
        except KvTransferError as error:
            nixl.close()
            raise KvUnavailable(str(error)) from error
    except KvUnavailable as error:
        if wanted == "nixl":
            raise
        log.warning("kv_transfer.not_nixl %s", error)
        return OpenedTransport(SharedMemoryTransport(), str(error))
    return OpenedTransport(nixl, "")
