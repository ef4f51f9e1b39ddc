"""Workers over the simulated engine, in process: directly, or through a real server and channel."""

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, NamedTuple

import anyio

from slagate.proto import openengine_pb2 as oe
from slagate.proto.rpc.address import Address
from slagate.workers.client.client import connect_worker
from slagate.workers.kv_transfer.shm import SharedMemoryTransport
from slagate.workers.kv_transfer.transport import KvTransport
from slagate.workers.profiles.profile import load_profile
from slagate.workers.server import serve_worker
from slagate.workers.serving.sim import SimOptions, sim_worker
from slagate.workers.sim.api import NEWEST, sim_api
from slagate.workers.sim.args import END_ID, VOCAB_SIZE, SimSettings
from slagate.workers.sim.kv_cache.blocks import continuation
from slagate.workers.sim.llm import SimLLM
from slagate.workers.trtllm.engine import ask_kv_capacity
from slagate.workers.trtllm.server_info import ROLES, WorkerIdentity
from slagate.workers.trtllm.worker import TrtllmWorker
from slagate.workers.worker import Worker

PROFILE = "llama-3.1-8b-h100"
MODEL = "meta-llama/Meta-Llama-3.1-8B"


@asynccontextmanager
async def sim(role: str, *, served: bool, **options: float | str) -> AsyncIterator[Worker]:
    """A worker of this role; `served` puts a real gRPC server and channel in between."""
    sim_options = SimOptions(role=role, profile=PROFILE, tp=1, **options)  # type: ignore[arg-type]
    transport = None if role == "agg" else SharedMemoryTransport()
    async with AsyncExitStack() as stack:
        worker: Worker = await stack.enter_async_context(
            sim_worker(sim_options, instance_id=f"test-{role}", transport=transport)
        )
        if served:
            listen = Address("127.0.0.1", 0)
            at = await stack.enter_async_context(serve_worker(worker, listen, grace_s=0))
            worker = await stack.enter_async_context(connect_worker(str(at)))
        yield worker


class SimWorker(NamedTuple):
    """A worker as its client sees it, and what is behind it."""

    worker: Worker
    inner: TrtllmWorker
    llm: SimLLM


@asynccontextmanager
async def engine_worker(
    role: str,
    *,
    served: bool = False,
    version: str = NEWEST,
    ranks: int = 1,
    transport: KvTransport | None = None,
    end_id: int = END_ID,
    engine_knows_end: bool = False,
    worker_options: Mapping[str, Any] | None = None,
    sim_settings: Mapping[str, Any] | None = None,
    **args: Any,
) -> AsyncIterator[SimWorker]:
    """A worker over an engine of this TensorRT-LLM version, with KV events on.

    `ranks` over 1 is attention DP; without a `transport` it is shared memory, where there is need of one.
    `end_id` is the operator's, unless the engine is left to know the end itself. `args` are the engine's,
    nested ones as dicts; `worker_options` are `TrtllmWorker`'s.
    """
    api = sim_api(version)
    if role != "agg":
        transport = transport or SharedMemoryTransport()
    transceiver = {"backend": "DEFAULT", "kv_transfer_timeout_ms": 60_000}
    given: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "tensor_parallel_size": ranks,
        "enable_attention_dp": ranks > 1,
        "max_batch_size": 256,
        "enable_chunked_prefill": True,
        "enable_iter_perf_stats": True,
        "disable_overlap_scheduler": role == "prefill",
        **args,
        "kv_cache_config": {"event_buffer_max_size": 10_000} | args.get("kv_cache_config", {}),
    }
    if transport is not None:
        given["cache_transceiver_config"] = transceiver | args.get("cache_transceiver_config", {})
    llm = api.LLM(
        MODEL,
        sim=SimSettings(
            profile=load_profile(PROFILE).tp(1), transport=transport, **(sim_settings or {})
        ),
        **given,
    )
    named = (given.get("cache_transceiver_config") or {}).get("backend", "DEFAULT")
    # The transport stands for what the engine takes by itself.
    backend = "" if transport is None else transport.name if named == "DEFAULT" else named
    identity = WorkerIdentity(
        role=ROLES[role],
        model=MODEL,
        instance_id=f"test-{role}",
        engine_version=version,
        transfer_backend=backend,
        kv_transport=backend,
        tensor_parallel_size=ranks,
        end_id=end_id,
        engine_knows_end=engine_knows_end,
        vocab_size=VOCAB_SIZE,
    )
    async with AsyncExitStack() as stack:
        if transport is not None:
            stack.callback(transport.close)
        stack.callback(llm.shutdown)
        tasks = await stack.enter_async_context(anyio.create_task_group())
        stack.callback(tasks.cancel_scope.cancel)
        inner = TrtllmWorker(
            llm,
            api=api,
            identity=identity,
            tasks=tasks,
            release_session=None if transport is None else llm.release_session,
            capacity=ask_kv_capacity(llm),
            **(worker_options or {}),
        )
        worker: Worker = inner
        if served:
            listen = Address("127.0.0.1", 0)
            at = await stack.enter_async_context(serve_worker(inner, listen, grace_s=0))
            worker = await stack.enter_async_context(connect_worker(str(at)))
        yield SimWorker(worker, inner, llm)


def request(request_id: str, prompt: list[int], max_tokens: int = 8) -> oe.GenerateRequest:
    """A plain request, as a client of the gateway would send it."""
    return oe.GenerateRequest(
        request_id=request_id,
        model=MODEL,
        token_ids=oe.TokenIds(ids=prompt),
        stopping=oe.StoppingOptions(max_tokens=max_tokens, ignore_eos=True),
    )


def expected(prompt: list[int], n_tokens: int, *, branch: int = 0) -> list[int]:
    """What every correct stream of this prompt has; `branch` counts parallel sequences."""
    return continuation(
        prompt, n_tokens, model=MODEL, block_tokens=32, vocab_size=VOCAB_SIZE, branch=branch
    )
