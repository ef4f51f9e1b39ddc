"""The port by which KV blocks move between worker processes, and its errors."""

from collections.abc import Callable
from hashlib import blake2b
from typing import Protocol

import numpy as np
import numpy.typing as npt

Blocks = npt.NDArray[np.uint8]  # u8[n_blocks, block_bytes]


class KvTransferError(RuntimeError):
    """KV blocks could not be moved; the message says which check failed or what is missing."""


class KvUnavailable(KvTransferError):
    """This worker cannot move blocks at all: a library, a device or a directory is missing."""


class KvPeerGone(KvTransferError):
    """The worker that holds the blocks has died or dropped the connection."""


class KvTimeout(KvTransferError):
    """The blocks did not arrive in time: the other worker or the network hangs."""


class KvBadDescriptor(KvTransferError):
    """The descriptor is altered, truncated or of another transport; no blocks were requested."""


class KvIntegrity(KvTransferError):
    """The bytes that arrived are not those that were exported; they are discarded."""


Done = Callable[[Blocks | KvTransferError], None]
"""Called with pulled blocks, or with the reason why there are none."""


class KvTransport(Protocol):
    """How one worker hands KV blocks to another worker, and fetches blocks from one.

    Session ids are the exporting worker's own, and are never used twice. All calls are made on the owner's
    event-loop thread, and none of them waits for another process.
    """

    name: str
    """The short upper-case name for server info: "NIXL", "SHM" or "MEMORY"."""

    def export(self, session_id: int, blocks: Blocks) -> bytes:
        """Offer blocks u8[n_blocks, block_bytes] to one consumer. Returns the descriptor for `pull`.

        The caller must not change the blocks afterwards. Sessions may have equal blocks: NIXL's
        pool, which has a fixed size, holds them once; the other transports hold the blocks of each
        session, as long as the machine has memory. Raises `KvTransferError`.
        """

    def pull(self, descriptor: bytes, done: Done) -> None:
        """Fetch the blocks of a descriptor, which works only once; never raises.

        `done` is called exactly once, on the loop's thread, with the blocks or the reason: perhaps before
        `pull` returns, and at the latest after the transport's time limit or when it is closed.
        """

    def acks(self) -> list[int]:
        """Sessions, ascending, whose consumer has finished pulling since the last call."""

    def release(self, session_id: int) -> None:
        """Withdraw an offer; no-op when it is unknown, pulled or withdrawn already."""

    def close(self) -> None:
        """Withdraw all offers and end all pulls; no-op the second time."""

    def problem(self) -> str:
        """Why new transfers cannot work at this moment, or ""."""

    def counters(self) -> dict[str, int]:
        """Gauges for operators, by name; each transport has its own."""


def block_shape(blocks: Blocks) -> tuple[int, int]:
    """(n_blocks, block_bytes) of an export. Raises `KvTransferError` but for u8[n > 0, bytes > 0]."""
    if blocks.ndim != 2 or blocks.dtype != np.uint8 or 0 in blocks.shape:
        raise KvTransferError(
            f"blocks must be u8[n > 0, bytes > 0], not {blocks.dtype}{blocks.shape}"
        )
    n_blocks, block_bytes = blocks.shape
    return n_blocks, block_bytes


_SEAL_BYTES = 16


def sealed(body: bytes) -> bytes:
    """A descriptor's bytes and their checksum, which protects from damage, not from forgery."""
    return body + blake2b(body, digest_size=_SEAL_BYTES).digest()


def unsealed(raw: bytes) -> bytes:
    """The bytes that were given to `sealed`. Raises `KvBadDescriptor` if they were altered or cut."""
    body, seal = raw[:-_SEAL_BYTES], raw[-_SEAL_BYTES:]
    if not body or blake2b(body, digest_size=_SEAL_BYTES).digest() != seal:
        raise KvBadDescriptor(
            f"descriptor checksum does not match: {len(raw)} bytes, altered, truncated or not ours"
        )
    return body


def used_up(session_id: int) -> KvTransferError:
    """The error to raise for a session that was already pulled, or withdrawn."""
    return KvTransferError(f"session {session_id}: already consumed or released")
