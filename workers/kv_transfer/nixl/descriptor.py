"""The descriptor of a session that is offered over NIXL: integers, a name and NIXL's own metadata.

    magic 4s | session u64 | tag 8s | tags_digest 8s | base u64 | block_bytes u32 | stride_bytes u32
    | crc u32 | n_name u16 | n_metadata u32 | n_slots u32 | name | metadata | slots u32[] | checksum 16s

A slot is at `base + slot * stride_bytes` in the owner's memory, and has a tag and then a block. The first
slot is the session's ticket, which has only the session's tag; the others may be part of several sessions.
"""

import struct
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from slagate.workers.kv_transfer.transport import KvBadDescriptor, KvTransferError, sealed, unsealed

Slots = npt.NDArray[np.uint32]  # u32[n]
Tags = npt.NDArray[np.uint8]
"""Shape u8[n, TAG_BYTES]."""

TAG_BYTES = 8
MAX_DESCRIPTOR_BYTES = 256 * 1024
"""Enough for 60,000 blocks, a prompt of two million tokens; the gateway passes on at most 1 MiB."""

_HEAD = struct.Struct("<4sQ8s8sQIIIHII")
_MAGIC = b"SND2"
_ACK = struct.Struct("<Q8s")


class NixlDescriptor(NamedTuple):
    """Where a session's blocks are, and how to check them."""

    session_id: int
    tag: bytes  # of the ticket
    tags_digest: bytes  # of the blocks' tags
    base: int  # address of slot 0
    block_bytes: int
    stride_bytes: int  # from slot to slot
    crc: int  # `checksum` of all blocks
    agent: str  # the owner's name for NIXL
    metadata: bytes  # NIXL's, to connect to that agent
    slots: Slots  # the ticket's, then the blocks'

    def pack(self) -> bytes:
        """The descriptor as bytes. Raises `KvTransferError` beyond `MAX_DESCRIPTOR_BYTES`."""
        name = self.agent.encode()
        head = _HEAD.pack(
            *(_MAGIC, self.session_id, self.tag, self.tags_digest),
            *(self.base, self.block_bytes, self.stride_bytes, self.crc),
            *(len(name), len(self.metadata), len(self.slots)),
        )
        body = head + name + self.metadata + self.slots.astype("<u4").tobytes()
        raw = sealed(body)
        if len(raw) > MAX_DESCRIPTOR_BYTES:
            raise KvTransferError(f"session {self.session_id}: too many blocks for a descriptor")
        return raw

    def ack(self) -> bytes:
        """The reader's notice to the owner that it has read the session."""
        return _ACK.pack(self.session_id, self.tag)


def unpack_descriptor(raw: bytes) -> NixlDescriptor:
    """Decode a descriptor. Raises `KvBadDescriptor` for bytes that `pack` did not make."""
    if len(raw) > MAX_DESCRIPTOR_BYTES:
        raise KvBadDescriptor(f"descriptor has {len(raw)} bytes: too long or not ours")
    body = unsealed(raw)
    if len(body) < _HEAD.size:
        raise KvBadDescriptor("descriptor magic or lengths are not ours")
    magic, *numbers, n_name, n_metadata, n_slots = _HEAD.unpack_from(body)
    if magic != _MAGIC or len(body) != _HEAD.size + n_name + n_metadata + 4 * n_slots:
        raise KvBadDescriptor("descriptor magic or lengths are not ours")
    session_id, tag, digest, base, block_bytes, stride_bytes, crc = numbers
    at_metadata = _HEAD.size + n_name
    at_slots = at_metadata + n_metadata
    if n_slots < 2 or not block_bytes or stride_bytes < block_bytes + TAG_BYTES:
        raise KvBadDescriptor("descriptor has no blocks, or blocks that overlap")
    return NixlDescriptor(
        session_id=session_id,
        tag=tag,
        tags_digest=digest,
        base=base,
        block_bytes=block_bytes,
        stride_bytes=stride_bytes,
        crc=crc,
        agent=body[_HEAD.size : at_metadata].decode(errors="replace"),
        metadata=body[at_metadata:at_slots],
        slots=np.frombuffer(body, dtype="<u4", offset=at_slots).astype(np.uint32),
    )


def tags_digest(tags: Tags) -> bytes:
    """The digest of the tags of a session's blocks, in their order."""
    return blake2b(tags.tobytes(), digest_size=TAG_BYTES).digest()


class Ack(NamedTuple):
    """A reader's notice that it has the blocks of a session."""

    session_id: int
    tag: bytes


def unpack_ack(raw: bytes) -> Ack | None:
    """Decode an acknowledgement; None for other notices."""
    return Ack(*_ACK.unpack(raw)) if len(raw) == _ACK.size else None
