"""A worker process: one engine, the adapter, the server, until a signal or the engine's end."""

import logging
import os
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import version

import anyio

from slagate.proto import openengine_pb2 as oe
from slagate.workers import sim_llm
from slagate.workers.errors import UsageError
from slagate.workers.kv_transfer import KvTransport, SharedMemoryTransport
from slagate.workers.listen import Address, ready_line, stopped
from slagate.workers.profile import TpProfile, load_profile
from slagate.workers.server import serve_worker
from slagate.workers.trtllm import TrtllmWorker
from slagate.workers.trtllm_info import WorkerIdentity

log = logging.getLogger(__name__)

ROLES = {
    "prefill": oe.ENGINE_ROLE_PREFILL,
    "decode": oe.ENGINE_ROLE_DECODE,
    "agg": oe.ENGINE_ROLE_AGGREGATED,
}

SIM_END_ID = 128_001
"""The end-of-text id of the Llama 3 vocabulary, which the double's default vocabulary is."""


@dataclass(frozen=True, slots=True)
class SimOptions:
    """How to run the simulated engine."""

    role: str
    profile: str
    tp: int
    model: str | None = None  # None: the profile's
    time_scale: float = 1.0
    kv_blocks: int | None = None  # None: the profile's capacity
    kv_block_bytes: int = 4096
    max_batch_size: int = 256
    max_seq_len: int = 131_072


def _sim_llm(
    options: SimOptions, profile: TpProfile, transport: KvTransport | None
) -> sim_llm.SimLLM:
    try:
        return sim_llm.SimLLM(
            options.model or profile.model,
            profile=profile,
            transport=transport,
            max_batch_size=options.max_batch_size,
            max_seq_len=options.max_seq_len,
            kv_cache_blocks=options.kv_blocks,
            kv_block_bytes=options.kv_block_bytes,
            time_scale=options.time_scale,
        )
    except ValueError as error:
        raise UsageError(str(error)) from error


@asynccontextmanager
async def sim_worker(
    options: SimOptions,
    *,
    instance_id: str,
    transport: KvTransport | None = None,
    drain_s: float = 0.0,
) -> AsyncIterator[TrtllmWorker]:
    """A `TrtllmWorker` over a `SimLLM`, for the time of the block.

    After the block, decode workers get `drain_s` to collect the handoffs that are parked here.
    `transport` None lets the worker open its own where the role needs one. Raises `ProfileError` or
    `UsageError` naming a wrong option.
    """
    profile = load_profile(options.profile).tp(options.tp)
    role = ROLES[options.role]
    if transport is None and role != oe.ENGINE_ROLE_AGGREGATED:
        transport = SharedMemoryTransport()
    try:
        llm = _sim_llm(options, profile, transport)
        identity = WorkerIdentity(
            role=role,
            model=options.model or profile.model,
            instance_id=instance_id,
            engine_version=f"simulated by slagate {version('slagate')}",
            transfer_backend="" if transport is None else transport.name,
            tensor_parallel_size=options.tp,
            end_id=SIM_END_ID,
        )
        async with anyio.create_task_group() as tasks:
            yield TrtllmWorker(
                llm,
                api=sim_llm,
                identity=identity,
                tasks=tasks,
                release_session=None if transport is None else llm.release_session,
            )
            with anyio.move_on_after(drain_s):
                await llm.handoffs_collected()
            tasks.cancel_scope.cancel()
        llm.shutdown()
    finally:
        if transport is not None:
            transport.close()


async def run_sim_worker(options: SimOptions, listen: Address, *, drain_s: float) -> int:
    """Serve a simulated worker until SIGTERM, SIGINT or the engine's end; the exit status.

    Raises as `sim_worker`, and `OSError` when the address cannot be bound.
    """
    instance_id = uuid.uuid4().hex
    async with (
        sim_worker(options, instance_id=instance_id, drain_s=drain_s) as worker,
        serve_worker(worker, listen, grace_s=drain_s) as address,
        stopped() as signals,
        anyio.create_task_group() as tasks,
    ):
        info = await worker.server_info()
        ready_line(
            listen=str(address),
            role=options.role,
            model=info.supported_models[0],
            kv_transport=info.kv_connector.transfer_backend or "none",
            instance_id=instance_id,
            pid=os.getpid(),
        )

        async def watch_engine() -> None:
            await worker.fatal.wait()
            signals.set()

        tasks.start_soon(watch_engine)
        await signals.wait()
        tasks.cancel_scope.cancel()
    return 1 if worker.fatal.is_set() else 0
