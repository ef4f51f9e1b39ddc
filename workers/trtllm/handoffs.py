"""The sessions that a worker parks for decode workers, and the sessions of others that it resumes.

A prefill worker may end only when its sessions have been fetched, as decode workers read them from its GPU
memory. TensorRT-LLM does not report that: a request that has answered with a handoff leaves its list of
active requests, whose length its statistics give (py_executor.py id 4553249729 `_handle_responses`). The
time limit of a handoff is all that there is to go by.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import anyio

from slagate.proto import openengine_pb2 as oe
from slagate.workers.handoff.codec import FirstLogprob, params_of_session, session_of_params
from slagate.workers.handoff.seal import check_key, check_seal, fingerprint, seal


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
    def key_fingerprint(self) -> str:
        """What tells whether two workers seal with the same key, and not the key; "none" without one."""
        return "none" if self._key is None else fingerprint(self._key)

    @property
    def n_parked(self) -> int:
        """Sessions that the engine may still hold."""
        self._forget(until_s=asyncio.get_running_loop().time())
        return len(self._expires_s)

    async def none_left(self) -> None:
        """Return when each session was released or is past its time limit."""
        while self.n_parked:
            first_s = next(iter(self._expires_s.values()))
            await anyio.sleep(first_s - asyncio.get_running_loop().time())

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

    def params(self, session: oe.KvSessionRef, logprob: Any) -> dict[str, Any]:
        """Arguments for a decode leg's `DisaggregatedParams`. Raises `RequestRefused` naming the field.

        `logprob` is the engine's class for a log probability; None: one of slagate's own.
        """
        if self._key is not None:
            check_seal(session, self._key)
        return params_of_session(session, logprob or FirstLogprob)

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
