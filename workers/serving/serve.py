"""What both kinds of worker processes do besides serving: ready line, metrics, signals."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import anyio

from slagate.proto.rpc.address import Address
from slagate.workers.runtime.listen import given_by, ready_line
from slagate.workers.runtime.probes import serve_probes
from slagate.workers.trtllm.metrics import WorkerMetrics
from slagate.workers.trtllm.worker import TrtllmWorker

FLUSH_S = 2.0
"""For the output of streams to be written out, once they have all ended."""


@contextmanager
def metrics_served(
    metrics: WorkerMetrics, listen: Address | None, *, not_ready: Callable[[], str]
) -> Iterator[str]:
    """Serve metrics and probes over HTTP and yield their address; "" without an address to listen on."""
    if listen is None:
        yield ""
        return
    with ExitStack() as stack:
        with given_by("--metrics-listen"):
            port = stack.enter_context(
                serve_probes(*listen, registry=metrics.registry, not_ready=not_ready)
            )
        yield str(Address(listen.host, port))


async def tell_ready(
    worker: TrtllmWorker, *, role: str, address: Address, metrics_at: str, **more: str
) -> None:
    """Print the ready line of a worker, with `more` fields."""
    info = await worker.server_info()
    if metrics_at:
        more["metrics"] = metrics_at
    ready_line(
        listen=str(address),
        role=role,
        model=info.supported_models[0],
        kv_transport=info.kv_connector.transfer_backend or "none",
        instance_id=info.instance_id,
        pid=os.getpid(),
        **more,
    )


async def until_stopped(worker: TrtllmWorker, signals: anyio.Event, *, drain_s: float) -> None:
    """Wait for a signal and drain the worker for up to `drain_s`, or wait for the engine's end."""
    async with anyio.create_task_group() as tasks:

        async def watch_engine() -> None:
            await worker.fatal.wait()
            signals.set()

        tasks.start_soon(watch_engine)
        await signals.wait()
        await worker.drain(0.0 if worker.fatal.is_set() else drain_s)
        tasks.cancel_scope.cancel()
