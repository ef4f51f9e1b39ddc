"""KV blocks inside one process: for many simulated workers on one loop, in virtual time."""

import struct
from typing import NamedTuple

from slagate.workers.kv_transfer.transport import (
    Blocks,
    Done,
    KvBadDescriptor,
    KvTransferError,
    block_shape,
    sealed,
    unsealed,
    used_up,
)

_DESCRIPTOR = struct.Struct("<4sQQ")
_MAGIC = b"SMD1"


class _Key(NamedTuple):
    owner: int
    session_id: int


class MemoryExchange:
    """What the transports of one process offer each other."""

    def __init__(self) -> None:
        self._n_owners = 0
        self._offers: dict[_Key, Blocks] = {}

    def transport(self) -> "MemoryTransport":
        """A new transport, which reaches every other one of this exchange."""
        self._n_owners += 1
        return MemoryTransport(self._n_owners, self._offers)

    @property
    def n_offers(self) -> int:
        """Sessions that are offered and not pulled yet."""
        return len(self._offers)


class MemoryTransport:
    """Hands over the arrays themselves. Made by `MemoryExchange.transport`."""

    name = "MEMORY"

    def __init__(self, owner: int, offers: dict[_Key, Blocks]) -> None:
        self._owner = owner
        self._offers = offers
        self._exported: set[int] = set()
        self._closed = False

    def export(self, session_id: int, blocks: Blocks) -> bytes:
        """Offer the array to one consumer. Raises `KvTransferError` when closed or offered already."""
        if self._closed:
            raise KvTransferError("transport is closed")
        if session_id in self._exported:
            raise KvTransferError(f"session {session_id} is already exported")
        block_shape(blocks)
        self._exported.add(session_id)
        self._offers[_Key(self._owner, session_id)] = blocks
        return _pack(_Key(self._owner, session_id))

    def pull(self, descriptor: bytes, done: Done) -> None:
        """Take the array of a descriptor; it is gone afterwards."""
        try:
            if self._closed:
                raise KvTransferError("transport is closed")
            key = _unpack(descriptor)
            blocks = self._offers.pop(key, None)
            if blocks is None:
                raise used_up(key.session_id)
        except KvTransferError as error:
            done(error)
        else:
            done(blocks)

    def acks(self) -> list[int]:
        """Sessions pulled since the last call, ascending."""
        taken = sorted(i for i in self._exported if _Key(self._owner, i) not in self._offers)
        self._exported.difference_update(taken)
        return taken

    def release(self, session_id: int) -> None:
        """Withdraw an offer."""
        if session_id in self._exported:
            self._exported.discard(session_id)
            self._offers.pop(_Key(self._owner, session_id), None)

    def close(self) -> None:
        """Withdraw everything."""
        for session_id in list(self._exported):
            self.release(session_id)
        self._closed = True

    def problem(self) -> str:
        """Whether it is closed."""
        return "transport is closed" if self._closed else ""

    def counters(self) -> dict[str, int]:
        """Sessions that are offered here."""
        return {"kv_sessions_offered": len(self._exported)}


def _pack(key: _Key) -> bytes:
    return sealed(_DESCRIPTOR.pack(_MAGIC, *key))


def _unpack(raw: bytes) -> _Key:
    body = unsealed(raw)
    if len(body) != _DESCRIPTOR.size or not body.startswith(_MAGIC):
        raise KvBadDescriptor("descriptor magic or length is not ours")
    _, owner, session_id = _DESCRIPTOR.unpack(body)
    return _Key(owner, session_id)
