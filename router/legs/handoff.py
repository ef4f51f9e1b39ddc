"""The handoff between prefill and decode: taken from the prefill leg, guarded, and never left behind."""

import logging
from collections.abc import Callable

import anyio
import grpc
from anyio.abc import TaskGroup
from typing_extensions import override

from slagate.pools.fleet.member import Member
from slagate.pools.grid.grid import Stage
from slagate.proto import openengine_pb2 as oe
from slagate.proto.rpc.status import Status
from slagate.router.legs.leg import LegSink
from slagate.router.metrics import Metrics
from slagate.router.request.errors import LegFailed
from slagate.workers.errors import WorkerError
from slagate.workers.handoff.codec import MAX_OPAQUE_STATE_BYTES

log = logging.getLogger(__name__)

RELEASE_TIMEOUT_S = 5.0

UNCERTAIN = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
    }
)
"""Ends of a call that say nothing of how far the worker had come."""


class PrefillSink(LegSink):
    """The sink of a prefill leg, whose good end is the event `prefill_ready` with a handoff.

    The handoff's session goes to `on_session` as soon as it arrives, so that not even a request that is
    cancelled right then loses it. A leg may also end well without a handoff: its first token was a stop, or
    all that the client wanted (`only_token`). Then `answer` has the whole response. Token events ahead of a
    handoff are dropped, as decode sends them again. It does not repeat the prompt's own event: `preface`
    has it, serialised.
    """

    def __init__(
        self, leg_id: str, on_session: Callable[[oe.KvSessionRef], None], *, only_token: bool
    ) -> None:
        super().__init__(Stage.PREFILL, leg_id)
        self._whole = {oe.FINISH_REASON_STOP}
        if only_token:
            self._whole.add(oe.FINISH_REASON_LENGTH)
        self.answer: list[bytes] = []
        self.preface = b""
        self.cached_tokens: int | None = None
        self._on_session = on_session

    @property
    @override
    def may_have_parked(self) -> bool:
        """Whether the leg did not end by itself, so that the worker's last event may have been lost."""
        failure = self._failure
        return not self._terminal and (failure is None or failure.code in UNCERTAIN)

    @override
    def take_response(self, response: oe.GenerateResponse, data: bytes) -> None:
        """Take one response of the leg."""
        event = response.WhichOneof("event")
        if event == "error":
            self._fail_by(response.error)
        elif event == "prefill_ready":
            self.answer.clear()
            self._on_session(response.prefill_ready.kv_session)
            self._finish()
        elif event == "prompt":
            self.preface = data
        elif event == "token":
            self.answer.append(data)
        elif event == "finished" and response.finished.reason in self._whole:
            self.answer.append(data)
            self._finish()
        elif event == "finished":
            self._fail(Status(grpc.StatusCode.UNAVAILABLE, "ended without a handoff"))
        if response.HasField("usage") and response.usage.HasField("cached_prompt_tokens"):
            self.cached_tokens = response.usage.cached_prompt_tokens


def check_handoff(session: oe.KvSessionRef, decode: Member) -> None:
    """Check a handoff against the decode worker that is to get it. Raises `LegFailed`, not to be retried.

    A generation-only request with a bad handoff can stall an engine's executor, so it is checked here
    although the worker checks it too.
    """
    if reason := _unusable(session, decode):
        status = Status(grpc.StatusCode.UNAVAILABLE, f"gave an unusable handoff: {reason}")
        raise LegFailed(Stage.PREFILL, status, retryable=False)


def _unusable(session: oe.KvSessionRef, decode: Member) -> str:
    if not session.session_id and "disagg_request_id" not in session.attributes_struct.fields:
        return "it has no id"
    if not session.endpoints and not session.attributes_struct.fields:
        return "it has neither an endpoint nor transfer state"
    if session.ByteSize() > 2 * MAX_OPAQUE_STATE_BYTES:
        return f"it has {session.ByteSize()} bytes"
    if not decode.takes(session.transfer_backend):
        return (
            f"it is for {session.transfer_backend}, the decode worker uses {decode.pair.transport}"
        )
    return ""


class Handoff:
    """KV that a prefill worker keeps parked for a decode worker, until `used` or `release` is called."""

    def __init__(self, session: oe.KvSessionRef, holder: Member, releaser: "Releaser") -> None:
        self.session = session
        self._holder = holder
        self._releaser = releaser
        self._open = True
        releaser.n_open += 1
        holder.add_hold()

    def used(self) -> None:
        """Note that a decode worker has fetched the KV. Idempotent; no effect after `release`."""
        if self._open:
            self._open = False
            self._releaser.n_open -= 1
            self._holder.remove_hold()

    def release(self) -> None:
        """Free the KV on its prefill worker, in the background. Idempotent; no effect after `used`."""
        if self._open:
            self._open = False
            self._releaser.start(self.session, self._holder)


class Releaser:
    """Frees parked KV that nobody will fetch, in the background; `tasks` has to outlive the requests."""

    def __init__(self, tasks: TaskGroup, metrics: Metrics) -> None:
        self.n_open = 0  # handoffs that are neither used nor freed yet
        self._tasks = tasks
        self._metrics = metrics

    def start(self, session: oe.KvSessionRef, holder: Member) -> None:
        """Begin to release one handoff; never waits."""
        self._tasks.start_soon(self._release, session, holder)

    def abort(self, leg_id: str, worker: Member) -> None:
        """Begin to abort a prefill leg whose last event may be lost; never waits.

        To cancel its stream is enough while it runs; this also frees a handoff that was on its way already.
        """
        worker.add_hold()
        self._tasks.start_soon(self._abort, oe.AbortRequest(request_id=leg_id), worker)

    async def _release(self, session: oe.KvSessionRef, holder: Member) -> None:
        try:
            result = await self._abort(oe.AbortRequest(kv_session=session), holder)
        finally:
            self.n_open -= 1
        self._metrics.handoffs_released.labels(result=result).inc()
        if result == "failed":
            log.warning("handoff.stranded", extra={"worker": holder.address})

    async def _abort(self, request: oe.AbortRequest, member: Member) -> str:
        assert member.worker is not None, member
        try:
            with anyio.fail_after(RELEASE_TIMEOUT_S):
                await member.worker.abort(request)
        except WorkerError as error:
            # NOT_FOUND: a decode worker had begun to pull it after all, or it had expired.
            return "gone" if error.status.code is grpc.StatusCode.NOT_FOUND else "failed"
        except TimeoutError:
            return "failed"
        except Exception:
            # A task of its own: what it raised would take the gateway down.
            log.exception("handoff.abort", extra={"worker": member.address})
            return "failed"
        finally:
            member.remove_hold()
        return "released"
