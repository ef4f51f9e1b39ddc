"""Shared-memory transport: consumed once, checked whole, swept after death, across processes."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from struct import pack

import numpy as np
import numpy.typing as npt
import pytest

from slagate.workers.kv_transfer.shm import SharedMemoryTransport
from slagate.workers.kv_transfer.transport import (
    Blocks,
    KvBadDescriptor,
    KvIntegrity,
    KvTransferError,
    KvTransport,
    KvUnavailable,
)
from slagate.workers.runtime.cooperative import SLICE_BYTES
from slagate.workers.runtime.virtual_loop import run
from support.kv.processes import blocks_of, pulled
from support.limits import HANG_S


@pytest.fixture
def prefill(tmp_path: Path) -> Iterator[SharedMemoryTransport]:
    transport = SharedMemoryTransport(tmp_path)
    yield transport
    transport.close()


@pytest.fixture
def decode(tmp_path: Path) -> Iterator[SharedMemoryTransport]:
    transport = SharedMemoryTransport(tmp_path)
    yield transport
    transport.close()


def blocks(n: int = 3, block_bytes: int = 64) -> npt.NDArray[np.uint8]:
    return np.arange(n * block_bytes, dtype=np.uint32).astype(np.uint8).reshape(n, block_bytes)


def offered(tmp_path: Path) -> Path:
    (path,) = tmp_path.rglob("*.kv")
    return path


def test_it_is_a_transport(prefill: SharedMemoryTransport) -> None:
    transport: KvTransport = prefill
    assert transport.name == "SHM"


def test_blocks_arrive_and_the_owner_hears_of_it_once(
    prefill: SharedMemoryTransport, decode: SharedMemoryTransport
) -> None:
    descriptor = prefill.export(7, blocks())
    prefill.export(8, blocks())
    assert prefill.acks() == []
    assert np.array_equal(pulled(decode, descriptor), blocks())
    assert prefill.acks() == [7]
    assert prefill.acks() == []


def test_a_second_pull_is_refused(
    prefill: SharedMemoryTransport, decode: SharedMemoryTransport
) -> None:
    descriptor = prefill.export(7, blocks())
    pulled(decode, descriptor)
    with pytest.raises(KvTransferError, match="session 7: already consumed or released"):
        pulled(decode, descriptor)


def test_a_released_session_cannot_be_pulled_and_is_not_acknowledged(
    prefill: SharedMemoryTransport, decode: SharedMemoryTransport, tmp_path: Path
) -> None:
    descriptor = prefill.export(7, blocks())
    prefill.release(7)
    prefill.release(7)
    prefill.release(99)
    with pytest.raises(KvTransferError, match="already consumed or released"):
        pulled(decode, descriptor)
    assert prefill.acks() == []
    assert list(tmp_path.rglob("*.kv")) == []


def test_a_pull_in_progress_is_not_acknowledged_yet(
    prefill: SharedMemoryTransport, tmp_path: Path
) -> None:
    prefill.export(7, blocks())
    taken = offered(tmp_path).rename(offered(tmp_path).with_suffix(".pull"))
    assert prefill.acks() == []
    taken.unlink()
    assert prefill.acks() == [7]


def test_an_exported_session_cannot_be_exported_again(prefill: SharedMemoryTransport) -> None:
    prefill.export(7, blocks())
    with pytest.raises(KvTransferError, match="session 7 is already exported"):
        prefill.export(7, blocks())


def test_every_flipped_bit_of_a_descriptor_is_refused(
    prefill: SharedMemoryTransport, decode: SharedMemoryTransport
) -> None:
    descriptor = prefill.export(7, blocks())
    for i in range(len(descriptor)):
        altered = bytearray(descriptor)
        altered[i] ^= 1
        with pytest.raises(KvBadDescriptor, match="checksum"):
            pulled(decode, bytes(altered))
    assert np.array_equal(pulled(decode, descriptor), blocks())


@pytest.mark.parametrize("keep", [0, 1, 40, -1])
def test_a_truncated_descriptor_is_refused(
    prefill: SharedMemoryTransport, decode: SharedMemoryTransport, keep: int
) -> None:
    descriptor = prefill.export(7, blocks())
    with pytest.raises(KvBadDescriptor, match="truncated"):
        pulled(decode, descriptor[:keep])


def test_a_well_signed_descriptor_cannot_leave_the_directory(
    decode: SharedMemoryTransport,
) -> None:
    """The checksum is no secret, so the instance id is checked for itself."""
    body = pack("<4s32sQII", b"SKD1", b"../" * 10 + b"aa", 7, 1, 16)
    with pytest.raises(KvBadDescriptor, match="instance id"):
        pulled(decode, body + blake2b(body, digest_size=16).digest())


@pytest.mark.parametrize(
    ("n_bytes", "message"), [(0, "header"), (10, "header"), (50, "truncated"), (-1, "truncated")]
)
def test_a_truncated_file_is_refused_and_used_up(
    prefill: SharedMemoryTransport,
    decode: SharedMemoryTransport,
    tmp_path: Path,
    n_bytes: int,
    message: str,
) -> None:
    descriptor = prefill.export(7, blocks())
    raw = offered(tmp_path).read_bytes()
    offered(tmp_path).write_bytes(raw[:n_bytes])
    with pytest.raises(KvIntegrity, match=f"session 7: .*{message}"):
        pulled(decode, descriptor)
    assert prefill.acks() == [7]


@pytest.mark.parametrize(
    ("position", "message"), [(0, "magic"), (4, "disagree"), (12, "disagree"), (-1, "corrupted")]
)
def test_a_changed_file_is_refused_with_the_check_that_failed(
    prefill: SharedMemoryTransport,
    decode: SharedMemoryTransport,
    tmp_path: Path,
    position: int,
    message: str,
) -> None:
    descriptor = prefill.export(7, blocks())
    raw = bytearray(offered(tmp_path).read_bytes())
    raw[position] ^= 1
    offered(tmp_path).write_bytes(raw)
    with pytest.raises(KvIntegrity, match=message):
        pulled(decode, descriptor)


BIG = blocks_of(1, 3 * SLICE_BYTES // 4096 + 1, 4096)


def taken(tmp_path: Path) -> list[Path]:
    return list(tmp_path.rglob("*.pull"))


async def turns(n: int) -> None:
    """Let the loop turn some times."""
    for _ in range(n):
        reached = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(reached.set_result, None)
        await reached


class Turns:
    """Counts the turns of the loop, as the streams beside a pull would get them."""

    def __init__(self) -> None:
        self.n = 0
        self._loop = asyncio.get_running_loop()
        self._next()

    def _next(self) -> None:
        self.n += 1
        self._handle = self._loop.call_soon(self._next)

    def stop(self) -> None:
        self._handle.cancel()


async def outcome(
    transport: SharedMemoryTransport, descriptor: bytes
) -> tuple[Blocks | KvTransferError, int]:
    """How a pull ends, and how many turns of the loop went by until then."""
    done: asyncio.Future[Blocks | KvTransferError] = asyncio.get_running_loop().create_future()
    counted = Turns()
    transport.pull(descriptor, done.set_result)
    result = await done
    counted.stop()
    return result, counted.n


def test_many_blocks_are_read_in_slices_between_which_others_run(
    prefill: SharedMemoryTransport, decode: SharedMemoryTransport
) -> None:
    async def scenario() -> None:
        result, n_turns = await outcome(decode, prefill.export(7, BIG))
        assert isinstance(result, np.ndarray)
        assert np.array_equal(result, BIG)
        assert n_turns >= 4
        assert prefill.acks() == [7]

    run(scenario)


@pytest.mark.parametrize(
    ("damage", "message"), [("change", "corrupted"), ("cut", "truncated while it was read")]
)
def test_damage_in_a_later_slice_is_noticed(
    prefill: SharedMemoryTransport,
    decode: SharedMemoryTransport,
    tmp_path: Path,
    damage: str,
    message: str,
) -> None:
    async def scenario() -> None:
        results: list[Blocks | KvTransferError] = []
        decode.pull(prefill.export(7, BIG), results.append)
        with taken(tmp_path)[0].open("r+b") as file:
            if damage == "cut":
                file.truncate(SLICE_BYTES * 2)
            else:
                file.seek(SLICE_BYTES * 2)
                byte = file.read(1)[0]
                file.seek(SLICE_BYTES * 2)
                file.write(bytes([byte ^ 1]))
        await turns(20)
        (result,) = results
        assert isinstance(result, KvIntegrity)
        assert message in str(result)
        assert prefill.acks() == [7]

    run(scenario)


def test_closing_ends_every_pull_once_and_leaves_nothing_of_it(
    prefill: SharedMemoryTransport, decode: SharedMemoryTransport, tmp_path: Path
) -> None:
    async def scenario() -> None:
        results: list[Blocks | KvTransferError] = []
        for session in (7, 8):
            decode.pull(prefill.export(session, BIG), results.append)
        assert prefill.acks() == []
        decode.close()
        assert [str(result) for result in results] == ["transport is closed"] * 2
        await turns(20)
        assert len(results) == 2
        assert taken(tmp_path) == []
        assert prefill.acks() == [7, 8]

    run(scenario)


def test_a_pull_may_close_its_transport(
    prefill: SharedMemoryTransport, decode: SharedMemoryTransport
) -> None:
    async def scenario() -> None:
        ended = asyncio.Event()

        def done(_: object) -> None:
            decode.close()
            ended.set()

        decode.pull(prefill.export(7, BIG), done)
        await ended.wait()

    run(scenario)


def test_a_file_renamed_during_the_listing_is_not_taken_for_pulled(
    prefill: SharedMemoryTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill.export(7, blocks())
    monkeypatch.setattr(os, "listdir", lambda _: ["lock"])
    assert prefill.acks() == []


def test_acknowledgements_of_many_sessions_take_one_look(
    prefill: SharedMemoryTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    for session in range(50):
        prefill.export(session, blocks())

    looks: list[Path] = []
    with monkeypatch.context() as patched:
        patched.setattr(Path, "exists", lambda path: looks.append(path) is None)
        assert prefill.acks() == []
    assert looks == []


def test_an_export_that_cannot_be_tidied_up_is_refused_all_the_same(
    prefill: SharedMemoryTransport, tmp_path: Path
) -> None:
    (folder,) = (path.parent for path in tmp_path.rglob("lock"))
    (folder / "7.part").mkdir()
    with pytest.raises(KvTransferError, match="session 7: cannot write blocks"):
        prefill.export(7, blocks())


def test_a_closed_transport_offers_nothing(tmp_path: Path, decode: SharedMemoryTransport) -> None:
    owner = SharedMemoryTransport(tmp_path)
    descriptor = owner.export(7, blocks())
    owner.close()
    owner.close()
    with pytest.raises(KvTransferError, match="closed"):
        owner.export(8, blocks())
    with pytest.raises(KvTransferError, match="already consumed or released"):
        pulled(decode, descriptor)


EXPORT_AND_DIE = """
import os, sys
from pathlib import Path
import numpy as np
from slagate.workers.kv_transfer.shm import SharedMemoryTransport
transport = SharedMemoryTransport(Path(sys.argv[1]))
print(transport.export(7, np.zeros((2, 64), np.uint8)).hex(), flush=True)
os._exit(9)
"""

PULL = """
import sys
from pathlib import Path
from slagate.workers.kv_transfer.shm import SharedMemoryTransport
transport = SharedMemoryTransport(Path(sys.argv[1]))
transport.pull(bytes.fromhex(sys.argv[2]), lambda blocks: print(blocks.sum()))
transport.close()
"""


def python(code: str, *arguments: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        timeout=HANG_S,
    ).stdout.strip()


def test_another_process_can_pull(prefill: SharedMemoryTransport, tmp_path: Path) -> None:
    """And starting and ending it touches nothing of the living owner."""
    descriptor = prefill.export(7, blocks())
    prefill.export(8, blocks())
    assert python(PULL, str(tmp_path), descriptor.hex()) == str(blocks().sum())
    assert prefill.acks() == [7]
    assert offered(tmp_path).name == "8.kv"


def test_what_a_dead_owner_left_is_swept_by_the_next_start(tmp_path: Path) -> None:
    descriptor = bytes.fromhex(python(EXPORT_AND_DIE, str(tmp_path)))
    assert offered(tmp_path).exists()
    transport = SharedMemoryTransport(tmp_path)
    assert list(tmp_path.rglob("*.kv")) == []
    with pytest.raises(KvTransferError, match="already consumed or released"):
        pulled(transport, descriptor)
    transport.close()


def base_of(root: Path) -> Path:
    """Where transports under `root` keep their directories; nothing is there yet."""
    SharedMemoryTransport(root).close()
    (base,) = root.glob("slagate-kv-*")
    base.rmdir()
    return base


def test_a_planted_base_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    base_of(tmp_path).write_text("")
    with pytest.raises(KvUnavailable, match="cannot use"):
        SharedMemoryTransport(tmp_path)


def test_a_planted_link_is_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    base_of(tmp_path).symlink_to(elsewhere)
    with pytest.raises(KvUnavailable, match="is not a directory of this user"):
        SharedMemoryTransport(tmp_path)
    assert list(elsewhere.iterdir()) == []


def test_what_a_crashed_start_left_is_swept_by_the_next_start(tmp_path: Path) -> None:
    """It has died between any two steps of making its directory."""
    base = base_of(tmp_path)
    for name, has_lock in (("a" * 32, False), ("b" * 32, True)):
        (base / name).mkdir(parents=True)
        if has_lock:
            (base / name / "lock").touch()
    transport = SharedMemoryTransport(tmp_path)
    (path,) = base.iterdir()
    assert path.name not in {"a" * 32, "b" * 32}
    transport.close()


def test_a_base_that_cannot_be_used_is_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the directory of a transport cannot be made: the disk is full or read-only."""
    base = base_of(tmp_path)
    make = Path.mkdir

    def refuse(path: Path, mode: int = 0o777, **options: bool) -> None:
        if path.parent == base:
            raise OSError(28, "No space left on device")
        make(path, mode, **options)

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(KvUnavailable, match="No space left"):
        SharedMemoryTransport(tmp_path)
