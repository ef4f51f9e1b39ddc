"""One of the processes of a gateway: its place among them, and its part in what they share.

The parent starts it with the options of `slagate serve` and its place in the environment; it says on its
standard output where it listens, and ends when its standard input does, as then the parent has ended.
"""

import asyncio
import os
import shutil
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import anyio
import msgspec
from prometheus_client import values

from slagate.pools.fleet_file.load import FleetConfig
from slagate.pools.inflight.shared_counts import GATEWAY, GatewayCell, SharedCounts
from slagate.proto import gateway_pb2 as gw
from slagate.router.receipts.config import prepared_of
from slagate.router.scheduling.peers import PeerProcesses
from slagate.workers.runtime.listen import hung_up

PLACE = "SLAGATE_PROCESS"
"""Of the environment: the place of a process, as JSON."""

METRICS_FOLDER = "PROMETHEUS_MULTIPROC_DIR"


class ProcessSlot(msgspec.Struct, frozen=True):
    """Which of the processes of which gateway."""

    number: int
    n_processes: int
    folder: str
    instance_id: str  # of the gateway
    port: int  # of the clients' listener

    def path(self, name: str, *, number: int | None = None) -> Path:
        """Something of a process in the gateway's folder, by default of this one."""
        return Path(self.folder) / f"{self.number if number is None else number}.{name}"

    @property
    def counts(self) -> Path:
        """What all of them have under way."""
        return Path(self.folder) / "counts"

    @property
    def config(self) -> Path:
        """The configuration in force, a `GatewayConfig`."""
        return Path(self.folder) / "config"

    def in_environment(self) -> dict[str, str]:
        """The variables for a child."""
        return {PLACE: msgspec.json.encode(self).decode()}


def own_place() -> ProcessSlot | None:
    """This process's place; None: it was not started by another one of its gateway."""
    text = os.environ.pop(PLACE, None)
    return None if text is None else msgspec.json.decode(text, type=ProcessSlot)


def config_in_force(place: ProcessSlot) -> FleetConfig:
    """What the parent says is in force. Raises `OSError` or `UnusableReceipt`."""
    return prepared_of(gw.GatewayConfig.FromString(place.config.read_bytes())).config


class SharedState(NamedTuple):
    """What a gateway needs to be one of several."""

    counts: SharedCounts
    neighbours: PeerProcesses
    receipt_number: Callable[[int], int]


def share_of(
    counts: SharedCounts,
    *,
    n_processes: int,
    wake: Callable[[int], None],
    now_s: Callable[[], float],
) -> SharedState:
    """A process's part in `counts`; `wake` has the process of that number look again."""
    assert counts.number is not None
    number = counts.number
    slot = counts.claim(GATEWAY)
    n_before = counts.get(slot, GatewayCell.RECEIPTS)

    def receipt_number(place: int) -> int:
        """Its own, from 1 on: with N processes each has every N-th, also after a crash."""
        counts.set(slot, GatewayCell.RECEIPTS, n_before + place)
        return (n_before + place - 1) * n_processes + number + 1

    return SharedState(counts, PeerProcesses(counts, wake=wake, now_s=now_s), receipt_number)


@contextmanager
def sharing(place: ProcessSlot, *, now_s: Callable[[], float]) -> Iterator[SharedState]:
    """This process's part in what the gateway has under way, for the time of the block."""
    # Counters go to a file that the parent adds up, and that a successor goes on with.
    os.environ[METRICS_FOLDER] = place.folder
    values.ValueClass = values.MultiProcessValue(lambda: place.number)  # type: ignore[no-untyped-call]
    counts = SharedCounts(place.counts, place.number, n_processes=place.n_processes)
    with closing(counts), _Wakes(place) as wakes:
        share = share_of(counts, n_processes=place.n_processes, wake=wakes.wake, now_s=now_s)
        wakes.look = lambda: share.neighbours.look()
        yield share
        share.neighbours.close()


class _Wakes:
    """Datagrams, on which a process looks again whether somebody who waits can be served."""

    def __init__(self, place: ProcessSlot) -> None:
        self._place = place
        self.look: Callable[[], None] = lambda: None
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.settimeout(0)

    def __enter__(self) -> "_Wakes":
        path = self._place.path("wake")
        path.unlink(missing_ok=True)  # of the process before
        self._socket.bind(str(path))
        asyncio.get_running_loop().add_reader(self._socket, self._read)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()

    def wake(self, number: int) -> None:
        send_wake(self._socket, self._place.path("wake", number=number))

    def _read(self) -> None:
        with suppress(BlockingIOError):
            while True:
                self._socket.recv(1)
        self.look()


def send_wake(sender: socket.socket, path: Path) -> None:
    """Have a process look again. One that is not there, or was told often enough, needs no telling."""
    with suppress(OSError):
        sender.sendto(b"!", str(path))


@asynccontextmanager
async def parent_watched(
    place: ProcessSlot, stop: anyio.Event, *, hangup: Callable[[], None]
) -> AsyncIterator[None]:
    """Within the block, set `stop` when the parent ends, and call `hangup` when it passes a SIGHUP on.

    Behind it, remove what a parent left that has ended.
    """
    loop = asyncio.get_running_loop()
    has_ended = False

    def ended() -> None:
        nonlocal has_ended
        if not os.read(sys.stdin.fileno(), 1):
            has_ended = True
            loop.remove_reader(sys.stdin.fileno())
            stop.set()

    loop.add_reader(sys.stdin.fileno(), ended)
    try:
        async with hung_up(hangup):
            yield
    finally:
        if has_ended:
            shutil.rmtree(place.folder, ignore_errors=True)
        else:
            loop.remove_reader(sys.stdin.fileno())
