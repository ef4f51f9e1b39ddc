"""Parked handoffs of the simulated engine: prefilled blocks held until decode has pulled them."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from slagate.workers.kv_transfer import KvTransport
from slagate.workers.sim_handoff import DisaggIds, export_prompt
from slagate.workers.sim_request import DisaggregatedParams12
from slagate.workers.sim_sequence import EngineLimits, SimSequence

ACK_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class _Session:
    free: Callable[[], None]
    expires_s: float


class ParkedSessions:
    """Sessions by id; each ends once, by acknowledgement, release or expiry, and frees its blocks.

    While any is parked, one timer asks the transport for acknowledgements every `ACK_POLL_S`; otherwise
    no timer is pending. The clock of a session starts when it is parked, not when it was admitted.
    `freed` is called after blocks came back.
    """

    def __init__(
        self,
        transport: KvTransport,
        *,
        limits: EngineLimits,
        disagg_ids: DisaggIds,
        timeout_s: float,
        freed: Callable[[], None],
    ) -> None:
        self._transport = transport
        self._limits = limits
        self._disagg_ids = disagg_ids
        self._timeout_s = timeout_s
        self._freed = freed
        self._sessions: dict[int, _Session] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._empty = asyncio.Event()
        self._empty.set()
        self.n_expired = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def park(
        self,
        sequence: SimSequence,
        first_token: int,
        *,
        ctx_dp_rank: int | None,
        free: Callable[[], None],
    ) -> DisaggregatedParams12:
        """Offer a prefilled sequence's blocks and hold them; returns the params that decode needs.

        The session has the id of the request; `free` gives the blocks back, and is called once.
        Raises `KvTransferError`, holding nothing, when the transport cannot take the blocks.
        """
        loop = asyncio.get_running_loop()
        # The oldest version has no such field.
        disagg_request_id = getattr(sequence.params, "disagg_request_id", None)
        if disagg_request_id is None:
            disagg_request_id = self._disagg_ids.next(loop.time())
        params = export_prompt(
            sequence,
            first_token,
            transport=self._transport,
            limits=self._limits,
            disagg_request_id=disagg_request_id,
            ctx_dp_rank=ctx_dp_rank,
        )
        self._sessions[sequence.request_id] = _Session(free, loop.time() + self._timeout_s)
        self._empty.clear()
        self._arm(loop)
        return params

    def release(self, session_id: int) -> bool:
        """Withdraw a session and free its blocks; False when it is not parked."""
        session = self._sessions.pop(session_id, None)
        if session is None:
            return False
        self._transport.release(session_id)
        session.free()
        if not self._sessions:
            self._empty.set()
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        self._freed()
        return True

    async def none_left(self) -> None:
        """Wait until no session is parked."""
        await self._empty.wait()

    def clear(self) -> None:
        """Withdraw every session."""
        for session_id in list(self._sessions):
            self.release(session_id)

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is None and self._sessions:
            first_s = next(iter(self._sessions.values())).expires_s
            self._timer = loop.call_at(min(loop.time() + ACK_POLL_S, first_s), self._poll)

    def _poll(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        for session_id in self._transport.acks():
            self.release(session_id)
        now_s = loop.time()
        while self._sessions:
            # All get the same time, so the one parked first expires first.
            session_id, session = next(iter(self._sessions.items()))
            if session.expires_s > now_s:
                break
            self.n_expired += 1
            self.release(session_id)
        self._arm(loop)
