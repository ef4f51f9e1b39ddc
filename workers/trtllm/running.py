"""The requests that one engine works on, each in a task of its own until the engine's last result."""

import logging
from collections import OrderedDict
from collections.abc import Callable

import grpc
from anyio.abc import TaskGroup

from slagate.proto import openengine_pb2 as oe
from slagate.workers.errors import RequestRefused
from slagate.workers.runtime.waiting import UntilEmpty
from slagate.workers.trtllm.handoffs import Handoffs
from slagate.workers.trtllm.metrics import Observer
from slagate.workers.trtllm.poll import Activity
from slagate.workers.trtllm.stream import EngineStream

log = logging.getLogger(__name__)

REMEMBERED_IDS = 1024
"""Finished request ids kept so that a late Abort is ALREADY_FINISHED rather than NOT_FOUND."""

SHUTTING_DOWN = "the worker is shutting down"


class EngineRequests:
    """By request id. The task group is the worker's."""

    def __init__(
        self,
        activity: Activity,
        handoffs: Handoffs,
        *,
        tasks: TaskGroup,
        request_error: type[Exception],
        on_fatal: Callable[[Exception], None],
        observer: Observer,
    ) -> None:
        """A `request_error` is its request's; `on_fatal` gets any other that comes out of a result."""
        self._activity = activity
        self._handoffs = handoffs
        self._tasks = tasks
        self._request_error = request_error
        self._on_fatal = on_fatal
        self._observer = observer
        self._live: dict[str, EngineStream] = {}
        self._finished: OrderedDict[str, int | None] = OrderedDict()  # id -> handoff it parked
        self._all_ended = UntilEmpty(self._live)

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._live

    def start(self, request_id: str, stream: EngineStream) -> None:
        """Take a stream that was started; its id must not be running."""
        self._live[request_id] = stream
        self._activity.started()
        self._tasks.start_soon(self._run, request_id, stream)

    async def _run(self, request_id: str, stream: EngineStream) -> None:
        try:
            await stream.pump(on_result=self._activity.answered)
        except self._request_error as error:
            stream.fail(error)
        except Exception as error:
            # Whatever is not the request's own error means that the engine is gone.
            log.exception("engine.fatal")
            self._on_fatal(error)
        finally:
            stream.fail_engine_gone(RuntimeError(SHUTTING_DOWN))
            self._activity.ended()
            self._observer.leg_ended(stream.outcome, stream.result)
            del self._live[request_id]
            if not self._live:
                self._all_ended.set()
            self._finished[request_id] = stream.parked_id
            self._finished.move_to_end(request_id)
            if len(self._finished) > REMEMBERED_IDS:
                self._finished.popitem(last=False)

    async def all_ended(self) -> None:
        """Return when nothing runs."""
        await self._all_ended.wait()

    def cancel_all(self) -> None:
        """Cancel every one; each ends with the engine's last result."""
        for stream in list(self._live.values()):
            stream.cancel()

    def fail_all(self, error: Exception) -> None:
        """End every stream with an error, at once, as no result will come any more."""
        for stream in list(self._live.values()):
            stream.fail_engine_gone(error)

    def abort(self, request_id: str) -> oe.AbortStatus.ValueType:
        """Cancel one, or release what it left parked. Raises `Refused` for an unknown id."""
        if request_id in self._live:
            self._live[request_id].cancel()
            return oe.ABORT_STATUS_ABORTED
        if request_id in self._finished:
            # The answer may not have reached a caller that gave up meanwhile: its handoff goes too.
            parked_id = self._finished[request_id]
            if parked_id is not None and self._handoffs.release(parked_id):
                return oe.ABORT_STATUS_ABORTED
            return oe.ABORT_STATUS_ALREADY_FINISHED
        raise RequestRefused(grpc.StatusCode.NOT_FOUND, f"request_id: no request {request_id!r}")
