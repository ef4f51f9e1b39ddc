"""The port through which KV blocks move between worker processes, and how it fails."""

from collections.abc import Callable
from hashlib import blake2b
from typing import Protocol

import numpy as np
import numpy.typing as npt

Blocks = npt.NDArray[np.uint8]


class KvTransferError(RuntimeError):
    """KV blocks could not be moved; the text says which check failed or what is gone."""


class KvUnavailable(KvTransferError):
    """This worker cannot move blocks at all: a library, a device or a directory is missing."""


class KvPeerGone(KvTransferError):
    """The worker that holds the blocks has died or dropped the connection."""


class KvTimeout(KvTransferError):
    """The blocks did not arrive in time; the other worker hangs or the network does."""


class KvBadDescriptor(KvTransferError):
    """The descriptor is altered, truncated or of another transport; its blocks were not asked for."""


class KvIntegrity(KvTransferError):
    """Bytes arrived that are not the ones that were exported; they are thrown away."""


Done = Callable[[Blocks | KvTransferError], None]


class KvConnector(Protocol):
    """What a worker reports of how KV blocks reach it and leave it."""

    def problem(self) -> str:
        """Why new transfers cannot work at this moment, or ""."""

    def counters(self) -> dict[str, int]:
        """Figures for operators, by name; each transport has its own."""


class KvTransport(KvConnector, Protocol):
    """One worker's way to hand KV blocks to another worker and to fetch blocks from one.

    Session ids are the exporting worker's own, never used twice. The owner makes every call from its
    event loop's thread, and none of them waits for another process.
    """

    @property
    def name(self) -> str:
        """Short upper-case name, shown in server info: "NIXL", "SHM", "MEMORY"."""

    def export(self, session_id: int, blocks: Blocks) -> bytes:
        """Offer blocks u8[n_blocks, block_bytes] to one consumer; the opaque descriptor for `pull`.

        The caller does not change the blocks afterwards. Sessions may have blocks in common: NIXL's pool,
        which is of fixed size, holds equal ones once; the others hold what each session has, as far as the
        machine's memory goes. Raises `KvTransferError`.
        """

    def pull(self, descriptor: bytes, done: Done) -> None:
        """Fetch what a descriptor offers, once; never raises.

        `done` is called exactly once, on the loop's thread, with the blocks or the reason: maybe before
        `pull` returns, at the latest after the transport's own time limit or when it is closed.
        """

    def acks(self) -> list[int]:
        """Sessions, ascending, whose consumer has finished pulling since the last call."""

    def release(self, session_id: int) -> None:
        """Withdraw an offer; no-op when it is unknown, pulled or withdrawn already."""

    def close(self) -> None:
        """Withdraw everything and end every pull; no-op the second time."""


def block_shape(blocks: Blocks) -> tuple[int, int]:
    """(n_blocks, block_bytes) of an export. Raises `KvTransferError` when there are no blocks in it."""
    if blocks.ndim != 2 or blocks.dtype != np.uint8 or 0 in blocks.shape:
        raise KvTransferError(
            f"blocks must be u8[n > 0, bytes > 0], not {blocks.dtype}{blocks.shape}"
        )
    n_blocks, block_bytes = blocks.shape
    return n_blocks, block_bytes


_SEAL_BYTES = 16


def sealed(body: bytes) -> bytes:
    """A descriptor's bytes with their checksum behind them, against damage and not against forgery."""
    return body + blake2b(body, digest_size=_SEAL_BYTES).digest()


def unsealed(raw: bytes) -> bytes:
    """What was given to `sealed`. Raises `KvBadDescriptor` when it was altered, cut or never sealed."""
    body, seal = raw[:-_SEAL_BYTES], raw[-_SEAL_BYTES:]
    if not body or blake2b(body, digest_size=_SEAL_BYTES).digest() != seal:
        raise KvBadDescriptor(
            f"descriptor checksum does not match: {len(raw)} bytes, altered, truncated or not ours"
        )
    return body


def used_up(session_id: int) -> KvTransferError:
    """What a pull of a session ends with that somebody has pulled before, or that was withdrawn."""
    return KvTransferError(f"session {session_id}: already consumed or released")
