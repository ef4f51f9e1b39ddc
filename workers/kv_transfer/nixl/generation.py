"""One NIXL agent with its pool, its offered sessions and its pulls, which are replaced together."""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty

from slagate.workers.kv_transfer.nixl.agent import NixlAgent, ReadOrder
from slagate.workers.kv_transfer.nixl.descriptor import NixlDescriptor, tags_digest
from slagate.workers.kv_transfer.nixl.slots import Offer, Offers, SlotPool, checksum
from slagate.workers.kv_transfer.transport import Blocks, Done, KvTimeout, KvTransferError

STUCK_AFTER_S = 1.0
"""Extra time for the agent's thread after a pull's limit, as the whole process may have been stopped."""


@dataclass(slots=True, eq=False)
class _NixlPull:
    done: Done
    order: ReadOrder
    timer: asyncio.TimerHandle
    answered: bool = False

    def answer(self, result: Blocks | KvTransferError) -> None:
        """Call `done`, unless it was called before."""
        if not self.answered:
            self.answered = True
            self.timer.cancel()
            self.done(result)


class Generation:
    """An agent, its pool, sessions and pulls, all replaced together; used on the loop's thread.

    `changed` is called with the result of a pull that has ended or run out of time.
    """

    def __init__(
        self,
        name: str,
        pool: SlotPool,
        *,
        loopback: bool,
        changed: Callable[["Generation", Blocks | KvTransferError], None],
    ) -> None:
        self.pool = pool
        self.agent = NixlAgent(name, pool, loopback=loopback)
        self._changed = changed
        self._offers = Offers(pool)
        self._sessions: dict[int, Offer] = {}
        self._pulls: set[_NixlPull] = set()
        self.stuck = False
        """Whether the agent's thread does not even start pulls."""

    @property
    def n_quarantined(self) -> int:
        """The number of slots of pulls that ran out of time, into which NIXL may still write."""
        return sum(len(pull.order.slots) for pull in self._pulls if pull.answered)

    @property
    def needed(self) -> bool:
        """Whether the agent lives, and peers may still read from the pool or NIXL write to it."""
        return bool(self._sessions or self._pulls) and self.agent.alive

    def __contains__(self, session_id: int) -> bool:
        return session_id in self._sessions

    def offer(self, session_id: int, blocks: Blocks) -> bytes:
        """Offer blocks for a peer to read. Returns their descriptor. Raises `KvTransferError`."""
        self._check_size(blocks.shape[1])
        offer = self._offers.offer_blocks(blocks)
        try:
            descriptor = NixlDescriptor(
                session_id=session_id,
                tag=offer.tag,
                tags_digest=tags_digest(self.pool.tags(offer.slots[1:])),
                base=self.pool.start_address,
                block_bytes=blocks.shape[1],
                stride_bytes=self.pool.stride_bytes,
                crc=checksum(blocks),
                agent=self.agent.name,
                metadata=self.agent.metadata,
                slots=offer.slots,
            ).pack()
        except KvTransferError:
            self._offers.withdraw(offer)
            raise
        self._sessions[session_id] = offer
        self.agent.expect_acks(len(self._sessions))
        return descriptor

    def withdraw(self, session_id: int) -> None:
        """Make a session unreadable; no-op if it is not offered here."""
        offer = self._sessions.pop(session_id, None)
        if offer is not None:
            self._offers.withdraw(offer)
            self.agent.expect_acks(len(self._sessions))

    def acknowledged(self) -> list[int]:
        """Withdraw the sessions that peers have read since the last call, and return their ids."""
        sessions = []
        with contextlib.suppress(Empty):
            while True:
                ack = self.agent.acks.get_nowait()
                offer = self._sessions.get(ack.session_id)
                if offer is not None and offer.tag == ack.tag:
                    self.withdraw(ack.session_id)
                    sessions.append(ack.session_id)
        return sessions

    def check_fits(self, wanted: NixlDescriptor) -> None:
        """Raises `KvTransferError` for blocks that do not fit into this pool even if it is empty."""
        self._check_size(wanted.block_bytes)
        n_slots = len(wanted.slots)
        if n_slots > self.pool.n_slots:
            raise KvTransferError(
                f"session {wanted.session_id}: {n_slots} slots wanted, the whole pool has "
                f"{self.pool.n_slots}"
            )

    def pull(self, wanted: NixlDescriptor, done: Done, *, due_s: float) -> None:
        """Read blocks into the pool. `done` gets a copy, or an error, by `due_s`, in loop time.

        Raises `KvTransferError`, without calling `done`, if the pool has no room.
        """
        loop = asyncio.get_running_loop()
        limit_s = due_s - loop.time()
        slots = self.pool.take_slots(len(wanted.slots))

        def settled(result: Blocks | KvTransferError) -> None:
            # The loop may be closed, and then nobody waits for the blocks.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._settle, pull, result)

        order = ReadOrder(wanted, slots, settled)
        timer = loop.call_at(due_s, lambda: self._time_out(pull, limit_s))
        pull: _NixlPull = _NixlPull(done, order, timer)
        self._pulls.add(pull)
        self.agent.read(order)

    def end_all(self) -> None:
        """End every pull and offer; the agent must have been closed already."""
        for pull in list(self._pulls):
            pull.timer.cancel()
            pull.answer(KvTransferError("transport is closed"))
        self._sessions.clear()

    def _check_size(self, block_bytes: int) -> None:
        if block_bytes > self.pool.block_bytes:
            raise KvTransferError(
                f"blocks of {block_bytes} bytes do not fit into slots of {self.pool.block_bytes}"
            )

    def _settle(self, pull: _NixlPull, result: Blocks | KvTransferError) -> None:
        self._pulls.remove(pull)
        pull.timer.cancel()
        self.stuck = False
        self.pool.free_slots(pull.order.slots)
        self._changed(self, result)
        pull.answer(result)

    def _time_out(self, pull: _NixlPull, limit_s: float) -> None:
        wanted = pull.order.wanted
        late = KvTimeout(
            f"session {wanted.session_id}: nothing came from {wanted.agent} in {limit_s:.3g} s"
        )
        pull.order.abandoned = True
        pull.answer(late)
        self._changed(self, late)
        if not pull.order.started:
            loop = asyncio.get_running_loop()
            pull.timer = loop.call_at(loop.time() + STUCK_AFTER_S, self._check_started, pull, late)

    def _check_started(self, pull: _NixlPull, late: KvTimeout) -> None:
        if not pull.order.started:
            self.stuck = True
            self._changed(self, late)
