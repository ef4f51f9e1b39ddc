"""What the contract suite of the `Worker` port starts from: one way to have a worker, and to ask it."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, NamedTuple

from slagate.proto import openengine_pb2 as oe
from slagate.workers.legs import decode_leg, prefill_leg
from slagate.workers.sim_api import VERSIONS
from slagate.workers.worker import Call, Metadata, Worker
from support.engines import SimWorker, engine_worker
from support.sinks import KeepingSink


class Setup(NamedTuple):
    """One way to have a worker: behind a real server and channel or not, over one engine version."""

    served: bool
    version: str

    def __str__(self) -> str:
        return f"{'served' if self.served else 'direct'}-{self.version}"

    def engine(self, role: str, **options: Any) -> AbstractAsyncContextManager[SimWorker]:
        """A worker, with its engine to look into."""
        if self.served:
            # Real time is waited for.
            settings = {"time_scale": 0.25, **options.pop("sim_settings", {})}
            options["sim_settings"] = settings
        return engine_worker(role, served=self.served, version=self.version, **options)

    @asynccontextmanager
    async def worker(self, role: str, **options: Any) -> AsyncIterator[Worker]:
        async with self.engine(role, **options) as made:
            yield made.worker


DIRECT = tuple(Setup(served=False, version=version) for version in VERSIONS)
SERVED = tuple(Setup(served=True, version=version) for version in VERSIONS)

Scenario = Callable[[Setup], Awaitable[None]]
Play = Callable[[Scenario], None]


def start(
    worker: Worker,
    data: bytes,
    sink: KeepingSink,
    *,
    metadata: Metadata = (),
    timeout_s: float | None = None,
) -> Call:
    return worker.generate(data, metadata, sink, timeout_s=timeout_s)


async def ask(
    worker: Worker, request: oe.GenerateRequest | bytes, metadata: Metadata = ()
) -> KeepingSink:
    """The whole answer to one request."""
    data = request if isinstance(request, bytes) else request.SerializeToString()
    sink = KeepingSink()
    start(worker, data, sink, metadata=metadata)
    return await sink.done()


async def hand_off(
    prefill: Worker, request: oe.GenerateRequest, metadata: Metadata = (), *, leg_id: str = "p"
) -> oe.KvSessionRef:
    """Prefill a request; the session that its decode leg needs."""
    sink = await ask(prefill, prefill_leg(request.SerializeToString(), leg_id), metadata)
    assert sink.events[-1:] == ["prefill_ready"], (sink.status, sink.messages)
    return sink.messages[-1].prefill_ready.kv_session


async def resume(
    decode: Worker,
    request: oe.GenerateRequest,
    session: oe.KvSessionRef,
    metadata: Metadata = (),
    *,
    leg_id: str = "d",
) -> KeepingSink:
    """The whole answer of a decode leg."""
    leg = decode_leg(request.SerializeToString(), leg_id, session=session, max_tokens=None)
    return await ask(decode, leg, metadata)
