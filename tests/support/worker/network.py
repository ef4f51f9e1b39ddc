"""A worker whose calls go wrong, as those of a dying one or over a broken line do."""

from collections.abc import Callable
from typing import Any, NamedTuple

from slagate.proto.rpc.sinks import Call, EndedCall, Sink
from slagate.proto.rpc.status import Metadata, Status
from slagate.workers.worker import Worker


class Fault(NamedTuple):
    """What goes wrong with a call: after so many messages it ends with a status, or (None) goes silent."""

    after: int
    status: Status | None


class FaultyWorker:
    """A worker; `fault` is asked for each Generate call what will go wrong with it."""

    def __init__(self, worker: Worker, fault: Callable[[], Fault | None]) -> None:
        self._worker = worker
        self._fault = fault

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)

    def generate(
        self, request: bytes, metadata: Metadata, sink: Sink, *, timeout_s: float | None
    ) -> Call:
        fault = self._fault()
        if fault is None:
            return self._worker.generate(request, metadata, sink, timeout_s=timeout_s)
        if fault.after == 0 and fault.status is not None:
            sink.finish(fault.status)
            return EndedCall()
        faulty = _FaultySink(sink, fault)
        faulty.call = self._worker.generate(request, metadata, faulty, timeout_s=timeout_s)
        return faulty.call


class _FaultySink:
    def __init__(self, sink: Sink, fault: Fault) -> None:
        self.call: Call | None = None
        self._sink = sink
        self._fault = fault
        self._n_messages = 0

    def message(self, data: bytes, /) -> None:
        self._n_messages += 1
        if self._n_messages <= self._fault.after:
            self._sink.message(data)
        elif self._n_messages == self._fault.after + 1 and self._fault.status is not None:
            self._sink.finish(self._fault.status)
            if self.call is not None:
                self.call.cancel()

    def finish(self, status: Status, /) -> None:
        if self._n_messages <= self._fault.after:
            self._sink.finish(status)
