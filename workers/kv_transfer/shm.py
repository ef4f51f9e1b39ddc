"""Moves KV blocks through shared memory: plain files in /dev/shm, for workers of one host and user.

`multiprocessing.shared_memory` is not used: before Python 3.13 its resource tracker unlinks a segment when
a process that has only attached to it exits. Plain files in /dev/shm are the same memory without a tracker,
and a rename makes "consumed exactly once" atomic.
"""

import contextlib
import fcntl
import os
import re
import shutil
import stat
import struct
import tempfile
import zlib
from collections.abc import Generator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from typing_extensions import override

from slagate.workers.kv_transfer.transport import (
    Blocks,
    Done,
    KvBadDescriptor,
    KvIntegrity,
    KvTransferError,
    KvTransport,
    KvUnavailable,
    block_shape,
    sealed,
    unsealed,
    used_up,
)
from slagate.workers.runtime.cooperative import SLICE_BYTES, Slices, Steps


class _Descriptor(NamedTuple):
    instance_id: str
    session_id: int
    n_blocks: int
    block_bytes: int


_DESCRIPTOR = struct.Struct("<4s32sQII")
_DESCRIPTOR_MAGIC = b"SKD1"
# The id becomes a path component, so nothing but hex may pass.
_INSTANCE_ID = re.compile(r"[0-9a-f]{32}")

_HEADER = struct.Struct("<4sQIII")
_HEADER_MAGIC = b"SKB1"


def _pack_descriptor(descriptor: _Descriptor) -> bytes:
    instance = descriptor.instance_id.encode("ascii")
    return sealed(_DESCRIPTOR.pack(_DESCRIPTOR_MAGIC, instance, *descriptor[1:]))


def _unpack_descriptor(raw: bytes) -> _Descriptor:
    body = unsealed(raw)
    if len(body) != _DESCRIPTOR.size:
        raise KvBadDescriptor(f"descriptor has {len(raw)} bytes: not ours")
    magic, instance, session_id, n_blocks, block_bytes = _DESCRIPTOR.unpack(body)
    instance_id = instance.decode("ascii", errors="replace")
    if magic != _DESCRIPTOR_MAGIC or not _INSTANCE_ID.fullmatch(instance_id):
        raise KvBadDescriptor("descriptor magic or instance id is not ours")
    return _Descriptor(instance_id, session_id, n_blocks, block_bytes)


class SharedMemoryTransport(KvTransport):
    """Blocks as files under /dev/shm; both workers must run on one host as one user.

        <root>/slagate-kv-<uid>/<instance id>/lock            flock'ed while the owner lives
                                             /<session>.kv    offered: renamed into place when whole
                                             /<session>.pull  taken: renamed by the one consumer

    A session is acknowledged when both of its files are gone. Directories of dead owners are removed when
    the next transport starts. Blocks are read in slices, so that a read does not hold up other streams.
    Raises `KvUnavailable` when the directory cannot be used.
    """

    name = "SHM"

    def __init__(self, root: Path | None = None) -> None:
        if root is None:
            shm = Path("/dev/shm")
            root = shm if shm.is_dir() else Path(tempfile.gettempdir())
        self._parent_folder = root / f"slagate-kv-{os.geteuid()}"
        self._open_parent_folder()
        self._instance_id = os.urandom(16).hex()
        self._folder = self._parent_folder / self._instance_id
        self._lock_fd = self._start()
        self._slices = Slices()
        self._offered: set[int] = set()
        self._closed = False

    @override
    def export(self, session_id: int, blocks: Blocks) -> bytes:
        if self._closed:
            raise KvTransferError("transport is closed")
        if session_id in self._offered:
            raise KvTransferError(f"session {session_id} is already exported")
        n_blocks, block_bytes = block_shape(blocks)
        payload = np.ascontiguousarray(blocks).data.cast("B")
        header = _HEADER.pack(_HEADER_MAGIC, session_id, n_blocks, block_bytes, zlib.crc32(payload))
        partial = self._folder / f"{session_id}.part"
        try:
            with partial.open("wb") as file:
                file.write(header)
                file.write(payload)
            partial.rename(self._folder / f"{session_id}.kv")
        except OSError as error:
            with contextlib.suppress(OSError):
                partial.unlink()
            raise KvTransferError(f"session {session_id}: cannot write blocks: {error}") from error
        self._offered.add(session_id)
        return _pack_descriptor(_Descriptor(self._instance_id, session_id, n_blocks, block_bytes))

    @override
    def pull(self, descriptor: bytes, done: Done) -> None:
        self._slices.start(self._pull(descriptor, done))

    def _pull(self, descriptor: bytes, done: Done) -> Steps[None]:
        try:
            blocks = yield from self._take_blocks(descriptor)
        except KvTransferError as error:
            done(error)
        else:
            done(blocks)

    def _take_blocks(self, descriptor: bytes) -> Generator[None, None, Blocks]:
        if self._closed:
            raise KvTransferError("transport is closed")
        wanted = _unpack_descriptor(descriptor)
        offered = self._parent_folder / wanted.instance_id / f"{wanted.session_id}.kv"
        taken = offered.with_suffix(".pull")
        try:
            offered.rename(taken)
        except FileNotFoundError:
            raise used_up(wanted.session_id) from None
        except OSError as error:
            raise KvTransferError(f"session {wanted.session_id}: cannot take: {error}") from error
        try:
            return (yield from _read_blocks(taken, wanted))
        except OSError as error:
            raise KvTransferError(f"session {wanted.session_id}: cannot read: {error}") from error
        finally:
            # An error here, as on a read-only file system, does not matter: the bytes are read.
            with contextlib.suppress(OSError):
                taken.unlink()

    @override
    def acks(self) -> list[int]:
        names: set[str] = set()
        if self._offered:
            with contextlib.suppress(OSError):
                names.update(os.listdir(self._folder))
        # A file that is renamed during the listing may be missing in it. So the missing ones are checked
        # again, first .kv, which the consumer moves to .pull, then .pull: a session with neither has been
        # pulled.
        done = sorted(
            session_id
            for session_id in self._offered
            if names.isdisjoint((f"{session_id}.kv", f"{session_id}.pull"))
            and not (self._folder / f"{session_id}.kv").exists()
            and not (self._folder / f"{session_id}.pull").exists()
        )
        self._offered.difference_update(done)
        return done

    @override
    def release(self, session_id: int) -> None:
        if session_id in self._offered:
            self._offered.discard(session_id)
            for suffix in ("kv", "pull"):
                # A pull that runs now may have unlinked it, or still succeed with its open file.
                with contextlib.suppress(OSError):
                    (self._folder / f"{session_id}.{suffix}").unlink()

    @override
    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._slices.fail_all(KvTransferError("transport is closed"))
            self._offered.clear()
            shutil.rmtree(self._folder, ignore_errors=True)
            os.close(self._lock_fd)

    @override
    def problem(self) -> str:
        if self._closed:
            return "transport is closed"
        return "" if self._folder.is_dir() else f"{self._folder} is gone"

    @override
    def counters(self) -> dict[str, int]:
        return {"kv_sessions_offered": len(self._offered)}

    def _open_parent_folder(self) -> None:
        # Anybody may write to /dev/shm, and make a directory with this name.
        try:
            self._parent_folder.mkdir(mode=0o700, exist_ok=True)
            found = self._parent_folder.lstat()
        except OSError as error:
            raise KvUnavailable(f"cannot use {self._parent_folder}: {error}") from error
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise KvUnavailable(f"{self._parent_folder} is not a directory of this user")

    def _start(self) -> int:
        """Remove dead directories, create and lock our own, with other transports locked out; our lock."""
        try:
            base_fd = os.open(self._parent_folder, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(base_fd, fcntl.LOCK_EX)
                for folder in self._parent_folder.iterdir():
                    if _INSTANCE_ID.fullmatch(folder.name):
                        _remove_if_dead(folder)
                self._folder.mkdir(mode=0o700)
                return _lock(self._folder)
            finally:
                os.close(base_fd)
        except OSError as error:
            raise KvUnavailable(f"cannot use {self._parent_folder}: {error}") from error


def _lock(folder: Path) -> int:
    """Lock a directory. Raises `BlockingIOError` if its owner lives, `OSError` if it is gone."""
    lock_fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock_fd)
        raise
    return lock_fd


def _remove_if_dead(folder: Path) -> None:
    # An error says that the owner lives, that it is being removed, or that it is not a transport's.
    with contextlib.suppress(OSError):
        lock_fd = _lock(folder)
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock_fd)


def _read_blocks(path: Path, wanted: _Descriptor) -> Generator[None, None, Blocks]:
    """Read in slices, and yield before each of them if there are several. Raises `OSError`."""
    where = f"session {wanted.session_id}"
    with path.open("rb", buffering=0) as file:
        header = file.read(_HEADER.size)
        if len(header) < _HEADER.size:
            raise KvIntegrity(f"{where}: truncated inside the header")
        magic, session_id, n_blocks, block_bytes, checksum = _HEADER.unpack(header)
        if magic != _HEADER_MAGIC:
            raise KvIntegrity(f"{where}: wrong magic, not a KV file")
        if (session_id, n_blocks, block_bytes) != wanted[1:]:
            raise KvIntegrity(f"{where}: header and descriptor disagree on session or sizes")
        n_bytes = os.fstat(file.fileno()).st_size - _HEADER.size
        if n_bytes != n_blocks * block_bytes:
            raise KvIntegrity(
                f"{where}: truncated, {n_bytes} of {n_blocks * block_bytes} bytes are there"
            )
        blocks = np.empty((n_blocks, block_bytes), np.uint8)
        payload = blocks.reshape(-1)
        found = 0
        for start in range(0, n_bytes, SLICE_BYTES):
            if n_bytes > SLICE_BYTES:
                yield
            part = payload[start : start + SLICE_BYTES].data
            if file.readinto(part) != len(part):
                raise KvIntegrity(f"{where}: truncated while it was read")
            found = zlib.crc32(part, found)
    if found != checksum:
        raise KvIntegrity(f"{where}: corrupted, checksum does not match")
    return blocks
