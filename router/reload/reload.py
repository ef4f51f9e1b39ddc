"""Puts another configuration in force in a running gateway, or the one before it.

    slagate reload, SIGHUP, --watch ──▶ read and check ──▶ problems: nothing changes, they are reported
                                                      └──▶ in one step: grids, pools, version

A configuration is read and checked off the event loop, and put in force without an await, so that no
request sees half of it.
"""

import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import anyio
import anyio.to_thread

from slagate.pools.fleet.config_diff import changes
from slagate.pools.fleet.fleet import Prepared, prepare
from slagate.pools.fleet_file.load import FleetConfig, load_config
from slagate.pools.fleet_file.models import AdmissionMode, Scheduling
from slagate.pools.grid.errors import ConfigError
from slagate.proto import gateway_pb2 as gw
from slagate.router.metrics import Metrics
from slagate.router.receipts.config import config_message
from slagate.router.receipts.ring import ReceiptRing
from slagate.router.scheduling.dispatcher import Dispatcher
from slagate.workers.runtime.listen import on_sighup
from slagate.workers.runtime.waiting import FileWatch, file_stamp, run_in_daemon_thread

log = logging.getLogger(__name__)

WATCH_INTERVAL_S = 1.0

MAX_HISTORY = 8
"""How many configurations can be gone back to, one after the other."""


@dataclass(frozen=True, slots=True)
class FleetSource:
    """Where a gateway's configuration comes from: the files and options that `slagate serve` was given."""

    path: Path  # the fleet file
    lenient: bool
    pools: Path | None
    workers: Mapping[str, Sequence[str]]  # addresses by pool

    def read(self) -> FleetConfig:
        """Read the configuration from its files. Raises `ConfigError`."""
        return self.parse(None)

    def parse(self, text: str | None) -> FleetConfig:
        """Read the configuration, with `text`, if given, for the fleet file. Raises `ConfigError`."""
        return load_config(
            self.path,
            lenient=self.lenient,
            pools=self.pools,
            workers=self.workers,
            serving=True,
            text=text,
        )

    def stamp(self) -> object:
        """A value that compares unequal to an earlier one once a file was written. Never raises."""
        return [file_stamp(path) for path in (self.path, self.pools) if path is not None]


class NothingBefore(Exception):
    """There is no configuration to go back to."""


class Reloaded(NamedTuple):
    """The result of a reload that was not refused."""

    version: str  # in force after the reload
    previous_version: str  # in force before it
    proposed_version: str  # of what was read
    changes: tuple[str, ...]  # a line each, from what was in force to what was read
    warnings: tuple[str, ...]  # of what was read

    @property
    def applied(self) -> bool:
        """Whether the configuration in force has changed."""
        return self.version != self.previous_version


class Proposal(NamedTuple):
    """A checked configuration that can be put in force, with its message for receipts."""

    prepared: Prepared
    message: gw.GatewayConfig
    changes: tuple[str, ...] = ()  # from what was in force when it was made

    @classmethod
    def of(cls, config: FleetConfig, *, policy: str) -> "Proposal":
        """The proposal of a configuration that was checked for serving."""
        prepared = prepare(config)
        return cls(prepared, config_message(prepared, policy=policy))


def put_in_force_here(dispatcher: Dispatcher, receipts: ReceiptRing) -> Callable[[Proposal], None]:
    """Make the function that puts a configuration in force in this process, for `Reloader`."""

    def put_in_force(found: Proposal) -> None:
        dispatcher.put_in_force(found.prepared, found.message)
        receipts.put_in_force(found.message)

    return put_in_force


class Reloader:
    """Owns the configuration in force, and up to `MAX_HISTORY` earlier ones to go back to."""

    def __init__(
        self,
        in_force: Proposal,
        *,
        put_in_force: Callable[[Proposal], None],
        agree: Callable[[Proposal], Awaitable[None]] | None = None,
        admission: Callable[[], AdmissionMode | None] = lambda: None,
        metrics: Metrics,
        now_s: Callable[[], float],
    ) -> None:
        """`put_in_force` must not wait; `agree` is awaited before, and raises `ConfigError` to refuse.

        `admission` is the mode in force, which may be other than the configuration's (None: it is not).
        """
        self._now_s = now_s
        self._current = in_force
        self._before: list[Proposal] = []
        self._put_in_force = put_in_force
        self._agree = agree
        self._admission = admission
        self._metrics = metrics
        self._one_at_a_time = anyio.Lock()
        self.since_s = now_s()

    @property
    def version(self) -> str:
        """The version of the configuration in force."""
        return self._current.message.version

    @property
    def scheduling(self) -> Scheduling:
        """`scheduling` of the configuration in force."""
        return self._current.prepared.config.scheduling

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings of the configuration in force."""
        return self._current.prepared.config.warnings

    async def reload(self, read: Callable[[], FleetConfig], *, dry_run: bool = False) -> Reloaded:
        """Put in force what `read` returns. Raises `ConfigError`: then nothing has changed."""
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
        """Put the configuration before this one in force, with the profiles it had.

        Raises `NothingBefore`, or `ConfigError` if `agree` does.
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
        """Prepare what `read` returns, and list its changes. Blocks. Raises `ConfigError`."""
        return self._compared(Proposal.of(read(), policy=self._current.message.policy))

    def put(self, found: Proposal, *, dry_run: bool = False) -> Reloaded:
        """Put a proposal in force, unless it is already; with `dry_run` only report what would change.

        What is in force already, but for an admission mode that was set since, is put in force again.
        """
        old = self._current
        result = Reloaded(
            version=old.message.version if dry_run else found.message.version,
            previous_version=old.message.version,
            proposed_version=found.message.version,
            changes=found.changes,
            warnings=found.prepared.config.warnings,
        )
        if dry_run or not (result.applied or self._is_switched):
            return result
        self._put_in_force(found)
        if not result.applied:
            return result
        self._current = found
        self._before = [*self._before, old][-MAX_HISTORY:]
        self.since_s = self._now_s()
        self._metrics.reloads["applied"].inc()
        about = {"version": result.version, "previous_version": result.previous_version}
        log.info("config.reloaded", extra=about | {"changes": list(result.changes)})
        return result

    @property
    def _is_switched(self) -> bool:
        """Whether the admission mode in force is not that of the configuration."""
        return self._admission() not in (None, self.scheduling.admission)

    async def _agreed(self, found: Proposal, *, dry_run: bool) -> None:
        is_other = found.message.version != self.version
        if self._agree is not None and not dry_run and (is_other or self._is_switched):
            await self._agree(found)

    def _compared(self, found: Proposal) -> Proposal:
        """Add the changes. Not for the event loop: a grid may have a million cells to compare."""
        lines = list(changes(self._current.prepared, found.prepared))
        mode, next_mode = self._admission(), found.prepared.config.scheduling.admission
        if self._is_switched and mode != next_mode:
            lines.append(f"admission in force {mode} -> {next_mode}")
        return found._replace(changes=tuple(lines))

    def _refused(self, error: ConfigError) -> None:
        self._metrics.reloads["refused"].inc()
        about = {"source": error.source, "problems": [str(each) for each in error.problems]}
        log.error("config.refused", extra=about)


def reloader_here(
    in_force: Proposal,
    dispatcher: Dispatcher,
    receipts: ReceiptRing,
    *,
    metrics: Metrics,
    now_s: Callable[[], float],
) -> Reloader:
    """The reloader of a gateway of one process, or of one process of several."""
    return Reloader(
        in_force,
        put_in_force=put_in_force_here(dispatcher, receipts),
        admission=lambda: dispatcher.admission,
        metrics=metrics,
        now_s=now_s,
    )


@asynccontextmanager
async def reloading(
    reloader: Reloader,
    source: FleetSource,
    *,
    watch: bool,
    stamp: object,
    also: Sequence[Callable[[], None]] = (),
) -> AsyncIterator[None]:
    """Within the `with`, reload on each SIGHUP, and with `watch` whenever a file of the source has changed.

    `stamp` is the source's from before the configuration in force was read. On each SIGHUP the functions in
    `also` are called first. Afterwards SIGHUP does nothing, so that a gateway that shuts down survives it.
    """
    file_watch = FileWatch(source.stamp if watch else lambda: stamp, in_use=stamp)

    def hangup() -> None:
        for act in also:
            act()
        file_watch.ask()

    async def follow() -> None:
        while True:
            await file_watch.changed(WATCH_INTERVAL_S if watch else math.inf)
            try:
                await reloader.reload(source.read)
            except ConfigError:
                pass  # the log has it, and what is in force stays
            except Exception:
                log.exception("config.bug")

    async with anyio.create_task_group() as tasks, on_sighup(hangup):
        tasks.start_soon(follow)
        yield
        tasks.cancel_scope.cancel()
