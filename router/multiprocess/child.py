"""One of the processes of a gateway: its place among them, and its part in what they share.

The parent starts it with the options of `slagate serve` and its place in the environment; it says on its
standard output where it listens, and ends when its standard input does, as then the parent has ended.
"""

import asyncio
import os
import shutil
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import msgspec

from slagate.pools.fleet_file.load import FleetConfig
from slagate.proto import gateway_pb2 as gw
from slagate.router.receipts.config import prepared_of
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
