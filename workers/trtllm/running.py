"""The requests that an engine works on, each with a task until the engine's last result."""

import logging
from collections import OrderedDict
from collections.abc import Callable

from anyio.abc import TaskGroup

from slagate.proto import openengine_pb2 as oe
from slagate.workers.errors import not_found
from slagate.workers.runtime.waiting import UntilEmpty
from slagate.workers.trtllm.handoffs import Handoffs
from slagate.workers.trtllm.metrics import Observer
from slagate.workers.trtllm.poll import Activity
from slagate.workers.trtllm.stream import EngineStream

log = logging.getLogger(__name__)

REMEMBERED_IDS = 1024
"""Finished request ids that are kept, so that a late Abort gets ALREADY_FINISHED, not NOT_FOUND."""

SHUTTING_DOWN = "the worker is shutting down"


class EngineRequests:
    """The running requests of an engine by their ids, and the ids of the last finished ones."""

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
        """A `request_error` out of a result ends its request, and so does an assertion about its contents.

        `on_fatal` gets any other error.

        `tasks` is the worker's task group.
        """
        self._activity = activity
        self._handoffs = handoffs
        self._tasks = tasks
        self._request_error = request_error
        self._on_fatal = on_fatal
        self._observer = observer
        self._live: dict[str, EngineStream] = {}  # by request id
        self._finished: OrderedDict[str, int | None] = OrderedDict()  # id -> handoff it parked
        self._all_ended = UntilEmpty(self._live)

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._live

    def start(self, request_id: str, stream: EngineStream) -> None:
        """Run a stream that was started; no request with its id may be running."""
        self._live[request_id] = stream
        self._activity.request_started()
        self._tasks.start_soon(self._run, request_id, stream)

    async def _run(self, request_id: str, stream: EngineStream) -> None:
        try:
            await stream.pump(on_result=self._activity.result_came)
        except (self._request_error, AssertionError) as error:
            stream.fail_request(error)
        except Exception as error:
            # An error that is not the request's own means that the engine is dead.
            log.exception("engine.fatal")
            self._on_fatal(error)
        finally:
            stream.fail_engine_gone(RuntimeError(SHUTTING_DOWN))
            self._activity.request_ended()
            self._observer.leg_ended(stream.outcome, stream.result)
            del self._live[request_id]
            if not self._live:
                self._all_ended.set()
            self._finished[request_id] = stream.parked_id
            self._finished.move_to_end(request_id)
            if len(self._finished) > REMEMBERED_IDS:
                self._finished.popitem(last=False)

    async def all_ended(self) -> None:
        """Return when no request runs."""
        await self._all_ended.wait()

    def cancel_all(self) -> None:
        """Cancel every request; each goes on until the engine's last result."""
        for stream in list(self._live.values()):
            stream.cancel()

    def fail_all(self, error: Exception) -> None:
        """End every stream with an error at once, as no result will come any more."""
        for stream in list(self._live.values()):
            stream.fail_engine_gone(error)

    def abort(self, request_id: str) -> oe.AbortStatus.ValueType:
        """Cancel a request, or release what it parked. Raises `RequestRefused` for an unknown id."""
        if request_id in self._live:
            self._live[request_id].cancel()
            return oe.ABORT_STATUS_ABORTED
        if request_id in self._finished:
            # A caller that gave up may not have got the answer, so the handoff in it is released.
            parked_id = self._finished[request_id]
            if parked_id is not None and self._handoffs.release(parked_id):
                return oe.ABORT_STATUS_ABORTED
            return oe.ABORT_STATUS_ALREADY_FINISHED
        raise not_found("request_id", f"no request {request_id!r}")
