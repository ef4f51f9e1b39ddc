"""Sessions that a worker parks for others, those of others that it resumes, and when all were fetched.

A prefill worker ends only when others have fetched what it parked. A decode worker reads the prefill
worker's GPU memory while it fetches, and TensorRT-LLM has no word for "fetched". Its iteration statistics
count a request as active until then, as Dynamo's worker relies on too.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import anyio

from slagate.proto import openengine_pb2 as oe
from slagate.workers.handoff.codec import params_of_session, session_of_params
from slagate.workers.handoff.seal import check_key, check_seal, seal
from slagate.workers.trtllm.poll import NewestRows


class Handoffs:
    """What one worker handed out, by context request id, and how it can be had back.

    An engine tells nobody that a session was collected, so those of an engine that cannot say how many it
    holds count as parked until they are released or its own time limit is over.
    """

    def __init__(
        self,
        *,
        backend: str,
        limit_s: float,
        key: bytes | None = None,
        release: Callable[[int], bool] | None = None,
    ) -> None:
        """`release` frees a session in the engine; None where none can be. `key` seals the sessions.

        Raises `ValueError` for a key that is too short.
        """
        if key is not None:
            check_key(key)
        self._backend = backend
        self._limit_s = limit_s
        self._key = key
        self._release = release
        self._expires_s: dict[int, float] = {}  # in order of parking, and so of expiry

    @property
    def can_release(self) -> bool:
        """Whether a parked session can be freed."""
        return self._release is not None

    @property
    def n_parked(self) -> int:
        """Sessions handed out that may still be held."""
        self._forget(until_s=asyncio.get_running_loop().time())
        return len(self._expires_s)

    def park(self, params: Any, *, rank: int | None) -> oe.KvSessionRef:
        """The reference for the engine's `params`; `rank` is where the leg was sent to, if anywhere."""
        now_s = asyncio.get_running_loop().time()
        # Here too, or a worker that nobody asks for its load would never forget.
        self._forget(until_s=now_s)
        self._expires_s[params.ctx_request_id] = now_s + self._limit_s
        session = session_of_params(params, transfer_backend=self._backend, rank=rank)
        if self._key is not None:
            seal(session, self._key)
        return session

    def params(self, session: oe.KvSessionRef) -> dict[str, Any]:
        """Arguments of a generation-only `DisaggregatedParams`. Raises `Refused` naming the field."""
        if self._key is not None:
            check_seal(session, self._key)
        return params_of_session(session)

    def release(self, session_id: int) -> bool:
        """Free a parked session; False when there is none, or none can be freed."""
        if self._release is None:
            return False
        was_parked = self._release(session_id)
        # Either way the engine does not hold it any more; where it cannot be asked, it may.
        self._expires_s.pop(session_id, None)
        return was_parked

    def _forget(self, *, until_s: float) -> None:
        while self._expires_s:
            first = next(iter(self._expires_s))
            if self._expires_s[first] > until_s:
                return
            del self._expires_s[first]


POLL_S = 0.5
"""Between looks at the time limits of handoffs, where no statistics come."""


async def fetched(rows: NewestRows, handoffs: Handoffs) -> None:
    """Return when the engine counts nothing any more, or every handoff is past its time limit.

    Only statistics that came since the call count; an engine that gives none leaves the limit.
    """
    rows.of_rank.clear()
    while handoffs.n_parked and not rows.say_idle():
        with anyio.move_on_after(POLL_S):
            await rows.changed()
