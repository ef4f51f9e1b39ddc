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
    """The sink of a prefill leg: waits for `prefill_ready`.

    A session goes to `on_session` in the very step in which it arrives, so that a request cancelled in
    the next one knows of it. Without failure and without session, `answer` has the whole response: the
    very first token ended the request, and there is nothing to hand off. Only a stop can do that, or a
    budget of one token (`only_token`); an engine that ends otherwise has lost its handoff. Token events
    ahead of `prefill_ready` are TensorRT-LLM's and mean nothing: decode sends them again. It does not
    repeat the prompt's own event, which only prefill can give: `preface` has it.
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
        """Whether the answer may be lost: where the leg did not end by itself."""
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


def guard(session: oe.KvSessionRef, decode: Member) -> None:
    """Raises `LegFailed` for a handoff that must not be sent to that decode worker.

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
    backend = (
        decode.server_info.kv_connector.transfer_backend if decode.server_info is not None else ""
    )
    if backend and session.transfer_backend and backend != session.transfer_backend:
        return f"it is for {session.transfer_backend}, the decode worker uses {backend}"
    return ""


class Handoff:
    """KV parked on a prefill worker until a decode worker has it: used or released, exactly once."""

    def __init__(self, session: oe.KvSessionRef, holder: Member, releaser: "Releaser") -> None:
        self.session = session
        self._holder = holder
        self._releaser = releaser
        self._open = True
        releaser.n_open += 1
        holder.add_hold()

    def used(self) -> None:
        """Note that a decode worker has pulled it. Idempotent."""
        if self._open:
            self._open = False
            self._releaser.n_open -= 1
            self._holder.remove_hold()

    def release(self) -> None:
        """Free it on its prefill worker, in the background: nobody will pull it. Idempotent."""
        if self._open:
            self._open = False
            self._releaser.start(self.session, self._holder)


class Releaser:
    """Frees what cancelled requests left on workers. Its task group outlives the requests."""

    def __init__(self, tasks: TaskGroup, metrics: Metrics) -> None:
        self.n_open = 0
        self._tasks = tasks
        self._metrics = metrics

    def start(self, session: oe.KvSessionRef, holder: Member) -> None:
        """Begin to release one handoff; never waits."""
        self._tasks.start_soon(self._release, session, holder)

    def abort(self, leg_id: str, worker: Member) -> None:
        """Begin to abort a prefill leg that may be answering at this moment; never waits.

        Cancelling its stream is enough while it runs. This frees the handoff of one that had finished
        with its answer still under way.
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
