"""What the contract suite of the `Worker` port starts from: one way to have a worker, and to ask it."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Literal, NamedTuple

from slagate.proto import openengine_pb2 as oe
from slagate.proto.rpc.sinks import Call
from slagate.proto.rpc.status import Metadata
from slagate.workers.client.client import connect_worker
from slagate.workers.legs import decode_leg, prefill_leg
from slagate.workers.sim.api import VERSIONS
from slagate.workers.worker import Worker
from support.engine.process import SharedWorkers
from support.engine.workers import SimWorker, engine_worker
from support.seeds import is_long_run
from support.worker.sinks import KeepingSink


class Setup(NamedTuple):
    """One way to have a worker, over one engine version.

    `direct`: the adapter; `served`: with a real server and channel before it; `process`: a real worker
    process with a package of that version installed, shared by tests.
    """

    way: Literal["direct", "served", "process"]
    version: str
    shared: SharedWorkers | None = None

    def __str__(self) -> str:
        return f"{self.way}-{self.version}"

    @property
    def transfer_backend(self) -> str:
        """What a worker of a pair calls its KV transport."""
        return "DEFAULT" if self.way == "process" else "SHM"

    def engine(self, role: str, **options: Any) -> AbstractAsyncContextManager[SimWorker]:
        """A worker, with its engine to look into; not of a process."""
        assert self.way != "process", "ask for the fixture `inside`"
        if self.way == "served":
            # Real time is waited for.
            settings = REAL_TIME | options.pop("sim_settings", {})
            options["sim_settings"] = settings
        served = self.way == "served"
        return engine_worker(role, served=served, version=self.version, **options)

    @asynccontextmanager
    async def worker(self, role: str, **options: Any) -> AsyncIterator[Worker]:
        if self.way != "process":
            async with self.engine(role, **options) as made:
                yield made.worker
            return
        async with connect_worker(self._address(role, **options)) as worker:
            yield worker

    def _address(
        self,
        role: str,
        *,
        ranks: int = 1,
        worker_options: Mapping[str, Any] | None = None,
        sim_settings: Mapping[str, Any] | None = None,
        **engine: Any,
    ) -> str:
        assert self.shared is not None
        options: list[str] = []
        if ranks > 1:
            options += ["--tp", str(ranks), "--attention-dp"]
        for name, value in (worker_options or {}).items():
            if name == "logits":
                for wanted in value.every:
                    options += ["--logits-processor", f"{wanted.name}={json.dumps(wanted.params)}"]
                for allowed in value.allowed:
                    options += ["--allow-logits-processor", allowed]
                continue
            assert name == "handoff_key", f"a process has no option for {name}"
            options += ["--handoff-key-file", self.shared.key_file(value)]
        settings = REAL_TIME | dict(sim_settings or {})
        return self.shared.at(role, *options, version=self.version, settings=settings, **engine)


REAL_TIME = {"time_scale": 0.25}

DIRECT = tuple(Setup("direct", version) for version in VERSIONS)
# What differs by version is the adapter's, and the way to it is the same for all of them.
_THROUGH_WIRE = VERSIONS if is_long_run() else VERSIONS[-1:]
SERVED = tuple(Setup("served", version) for version in _THROUGH_WIRE)
PROCESS = tuple(Setup("process", version) for version in _THROUGH_WIRE)

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
