"""The sessions that a worker parks for decode workers, and the sessions of others that it resumes.

A prefill worker may end only when its sessions have been fetched, as decode workers read them from its GPU
memory. TensorRT-LLM does not report that, but its iteration statistics count a request as active until
then; Dynamo's worker relies on that too.
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
    """The sessions that one worker has parked, by context request id.

    An engine does not report that a session was fetched. So a session counts as parked until it is released
    or the engine's time limit has passed.
    """

    def __init__(
        self,
        *,
        backend: str,
        limit_s: float,
        key: bytes | None = None,
        release: Callable[[int], bool] | None = None,
    ) -> None:
        """`release` frees a session in the engine; None where that is impossible. `key` seals sessions.

        The engine keeps a session for `limit_s`. Raises `ValueError` for a key that is too short.
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
        """Whether parked sessions can be freed."""
        return self._release is not None

    @property
    def n_parked(self) -> int:
        """Sessions that the engine may still hold."""
        self._forget(until_s=asyncio.get_running_loop().time())
        return len(self._expires_s)

    def park(self, params: Any, *, rank: int | None) -> oe.KvSessionRef:
        """The reference to a session of the engine; `rank` is where the leg was sent, if anywhere."""
        now_s = asyncio.get_running_loop().time()
        # Here too, or a worker that is not asked for its load would keep all of them.
        self._forget(until_s=now_s)
        self._expires_s[params.ctx_request_id] = now_s + self._limit_s
        session = session_of_params(params, transfer_backend=self._backend, rank=rank)
        if self._key is not None:
            seal(session, self._key)
        return session

    def params(self, session: oe.KvSessionRef) -> dict[str, Any]:
        """Arguments for a decode leg's `DisaggregatedParams`. Raises `RequestRefused` naming the field."""
        if self._key is not None:
            check_seal(session, self._key)
        return params_of_session(session)

    def release(self, session_id: int) -> bool:
        """Free a parked session. False when it is not parked, or cannot be freed."""
        if self._release is None:
            return False
        was_parked = self._release(session_id)
        # Parked or not, the engine does not hold it any more.
        self._expires_s.pop(session_id, None)
        return was_parked

    def _forget(self, *, until_s: float) -> None:
        while self._expires_s:
            first = next(iter(self._expires_s))
            if self._expires_s[first] > until_s:
                return
            del self._expires_s[first]


POLL_S = 0.5
"""How often the time limits of handoffs are checked while no statistics come."""


async def until_fetched(rows: NewestRows, handoffs: Handoffs) -> None:
    """Return when new statistics have no request, or every handoff is past its time limit.

    Without statistics, only the limit counts.
    """
    rows.of_rank.clear()
    while handoffs.n_parked and not rows.say_idle():
        with anyio.move_on_after(POLL_S):
            await rows.changed()
