"""Workers over the simulated engine, in process: directly, or through a real server and channel."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from slagate.proto import openengine_pb2 as oe
from slagate.workers.client import connect_worker
from slagate.workers.kv_transfer import SharedMemoryTransport
from slagate.workers.listen import Address
from slagate.workers.run import SimOptions, sim_worker
from slagate.workers.server import serve_worker
from slagate.workers.sim_kv_cache import continuation
from slagate.workers.worker import Worker

PROFILE = "llama-3.1-8b-h100"
MODEL = "meta-llama/Meta-Llama-3.1-8B"


@asynccontextmanager
async def sim(role: str, *, served: bool, **options: float) -> AsyncIterator[Worker]:
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


def request(request_id: str, prompt: list[int], max_tokens: int = 8) -> oe.GenerateRequest:
    """A plain request, as a client of the gateway would send it."""
    return oe.GenerateRequest(
        request_id=request_id,
        model=MODEL,
        token_ids=oe.TokenIds(ids=prompt),
        stopping=oe.StoppingOptions(max_tokens=max_tokens, ignore_eos=True),
    )


def expected(prompt: list[int], n_tokens: int) -> list[int]:
    """What every correct stream of this prompt has."""
    return continuation(prompt, n_tokens, model=MODEL, block_tokens=32, vocab_size=128_256)
