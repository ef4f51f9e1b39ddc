"""Another configuration for a running gateway: read, checked, compared, put in force, and taken back.

    slagate reload, SIGHUP, --watch ──▶ read and check ──▶ problems: nothing changes, and they are told
                                                      └──▶ in one step: grids, pools, version

What is read is checked off the event loop; what is put in force waits for nothing, so that no request sees
half of it.
"""

import logging
import os
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import anyio
import anyio.to_thread

from slagate.pools.fleet.config_diff import changes
from slagate.pools.fleet.fleet import Prepared, prepare
from slagate.pools.fleet_file.load import FleetConfig, load_config
from slagate.pools.grid.errors import ConfigError
from slagate.proto import gateway_pb2 as gw
from slagate.router.metrics import Metrics
from slagate.router.receipts.config import config_message
from slagate.router.receipts.ring import ReceiptRing
from slagate.router.scheduling.dispatcher import Dispatcher
from slagate.workers.runtime.listen import on_sighup
from slagate.workers.runtime.waiting import FileWatch, run_in_daemon_thread

log = logging.getLogger(__name__)

WATCH_INTERVAL_S = 1.0

MAX_HISTORY = 8
"""Configurations that can be gone back to, one after the other."""


class Source(Protocol):
    """Where a gateway's configuration comes from."""

    def read(self) -> FleetConfig:
        """Read it (again). Raises `ConfigError`."""

    def parse(self, text: str) -> FleetConfig:
        """Another content in its place. Raises `ConfigError`."""

    def stamp(self) -> object:
        """Something that is different once a file was written; never raises."""


@dataclass(frozen=True, slots=True)
class FleetSource:
    """The files and options that `slagate serve` was given: a reload reads the files again."""

    path: Path
    lenient: bool
    pools: Path | None
    workers: Mapping[str, Sequence[str]]

    def read(self) -> FleetConfig:
        """The configuration as the files say it now. Raises `ConfigError`."""
        return self._load(None)

    def parse(self, text: str) -> FleetConfig:
        """The configuration with another fleet file's text. Raises `ConfigError`."""
        return self._load(text)

    def stamp(self) -> object:
        """Something that is different once a file was written; never raises."""
        return [_stamp(path) for path in (self.path, self.pools) if path is not None]

    def _load(self, text: str | None) -> FleetConfig:
        return load_config(
            self.path,
            lenient=self.lenient,
            pools=self.pools,
            workers=self.workers,
            serving=True,
            text=text,
        )


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


class NothingBefore(Exception):
    """There is no configuration to go back to."""


class Reloaded(NamedTuple):
    """What came of a reload that was not refused."""

    version: str  # in force after it
    previous_version: str  # in force before it
    proposed_version: str  # of what was read
    changes: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def applied(self) -> bool:
        """Whether something is in force now that was not before."""
        return self.version != self.previous_version


class Proposal(NamedTuple):
    """A configuration that can be put in force, and what receipts say of it."""

    prepared: Prepared
    message: gw.GatewayConfig
    changes: tuple[str, ...] = ()  # to what was in force when it was made

    @classmethod
    def of(cls, config: FleetConfig, *, policy: str) -> "Proposal":
        """For a configuration that was checked for serving."""
        prepared = prepare(config)
        return cls(prepared, config_message(prepared, policy=policy))


def put_in_process(dispatcher: Dispatcher, receipts: ReceiptRing) -> Callable[[Proposal], None]:
    """The step that puts a proposal in force in one process."""

    def put_in_force(found: Proposal) -> None:
        dispatcher.put_in_force(found.prepared, found.message)
        receipts.put_in_force(found.message)

    return put_in_force


class Reloader:
    """The configuration that is in force, and those before it."""

    def __init__(
        self,
        in_force: Proposal,
        *,
        put_in_force: Callable[[Proposal], None],
        agree: Callable[[Proposal], Awaitable[None]] | None = None,
        metrics: Metrics,
        now_s: Callable[[], float],
    ) -> None:
        """`put_in_force` is the step; before it whoever else decides has to `agree`, else it raises."""
        self._now_s = now_s
        self._current = in_force
        self._before: list[Proposal] = []
        self._put_in_force = put_in_force
        self._agree = agree
        self._metrics = metrics
        self._one_at_a_time = anyio.Lock()
        self.since_s = now_s()

    @property
    def version(self) -> str:
        """What is in force."""
        return self._current.message.version

    @property
    def warnings(self) -> tuple[str, ...]:
        """Of what is in force."""
        return self._current.prepared.config.warnings

    async def reload(self, read: Callable[[], FleetConfig], *, dry_run: bool = False) -> Reloaded:
        """Put in force what `read` gives. Raises `ConfigError`: then nothing has changed."""
        async with self._one_at_a_time:
            try:
                found = await run_in_daemon_thread(lambda: self.propose(read))
                await self._agreed(found, dry_run=dry_run)
            except ConfigError as error:
                if not dry_run:
                    self._refused(error)
                raise
            return self.put(found, dry_run=dry_run)

    async def roll_back(self, *, dry_run: bool = False) -> Reloaded:
        """Put in force what was before, with the profiles of then.

        Raises `NothingBefore`, or `ConfigError` where somebody does not agree.
        """
        async with self._one_at_a_time:
            if not self._before:
                raise NothingBefore("there is no configuration before this one")
            before, last = self._before[:-1], self._before[-1]
            found = await anyio.to_thread.run_sync(self._compared, last)
            await self._agreed(found, dry_run=dry_run)
            result = self.put(found, dry_run=dry_run)
            if result.applied:
                self._before = before
            return result

    def propose(self, read: Callable[[], FleetConfig]) -> Proposal:
        """Check what `read` gives, and give it its version. Raises `ConfigError`."""
        return self._compared(Proposal.of(read(), policy=self._current.message.policy))

    def put(self, found: Proposal, *, dry_run: bool = False) -> Reloaded:
        """Put a proposal in force, in one step, unless it is already."""
        old = self._current
        result = Reloaded(
            version=old.message.version if dry_run else found.message.version,
            previous_version=old.message.version,
            proposed_version=found.message.version,
            changes=found.changes,
            warnings=found.prepared.config.warnings,
        )
        if not result.applied:
            return result
        self._put_in_force(found)
        self._current = found
        self._before = [*self._before, old][-MAX_HISTORY:]
        self.since_s = self._now_s()
        self._metrics.reloads["applied"].inc()
        about = {"version": result.version, "previous_version": result.previous_version}
        log.info("config.reloaded", extra=about | {"changes": list(result.changes)})
        return result

    async def _agreed(self, found: Proposal, *, dry_run: bool) -> None:
        if self._agree is not None and not dry_run and found.message.version != self.version:
            await self._agree(found)

    def _compared(self, found: Proposal) -> Proposal:
        """With the changes; a grid may have a million cells, and comparing them is no work for the loop."""
        return found._replace(changes=tuple(changes(self._current.prepared, found.prepared)))

    def _refused(self, error: ConfigError) -> None:
        self._metrics.reloads["refused"].inc()
        about = {"source": error.source, "problems": [str(each) for each in error.problems]}
        log.error("config.refused", extra=about)


@asynccontextmanager
async def reloading(
    reloader: Reloader,
    source: Source,
    *,
    watch: bool,
    stamp: object,
    also: Sequence[Callable[[], None]] = (),
) -> AsyncIterator[None]:
    """Within the block, read the source again with each SIGHUP, and with `watch` when it has changed.

    `stamp` is the source's from before it was read for what is in force now. What is in `also` comes
    first with each SIGHUP. After the block SIGHUP does nothing: a gateway that shuts down has better things
    to do than to die of it.
    """
    # One that is asked for while another is under way comes behind it, once.
    ask, asked = anyio.create_memory_object_stream[None](1)

    def hangup() -> None:
        for act in also:
            act()
        with suppress(anyio.WouldBlock):
            ask.send_nowait(None)

    with ask, asked:
        async with anyio.create_task_group() as tasks, on_sighup(hangup):
            tasks.start_soon(_on_hangup, reloader, source, asked)
            if watch:
                tasks.start_soon(_on_change, reloader, source, stamp)
            yield
            tasks.cancel_scope.cancel()


async def _on_hangup(reloader: Reloader, source: Source, asked: AsyncIterable[None]) -> None:
    async for _ in asked:
        await _reload(reloader, source)


async def _on_change(reloader: Reloader, source: Source, read: object) -> None:
    file_watch = FileWatch(source.stamp, in_use=read)
    while True:
        await file_watch.changed(WATCH_INTERVAL_S)
        await _reload(reloader, source)


async def _reload(reloader: Reloader, source: Source) -> None:
    try:
        await reloader.reload(source.read)
    except ConfigError:
        pass  # the log has it, and what is in force stays
    except Exception:
        log.exception("config.bug")
