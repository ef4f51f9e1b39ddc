"""A gateway and its workers as child processes of this one, for as long as the owner wants them.

start ──▶ (child prints its ready line) ──▶ runs ──▶ stop: SIGTERM, then SIGKILL
                └─ ends, or is late ──▶ ClusterError with the last lines of its log
"""

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import anyio
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from slagate.router.process import SLAGATE
from slagate.workers.runtime.listen import MAX_READY_LINE_BYTES

STOP_GRACE_S = 10.0
LOG_LINES = 15

_T = TypeVar("_T")


class ClusterError(Exception):
    """A child process that ended, or was not ready in time; the text is for the person at the console."""


class Child:
    """One `slagate` process. `ready` holds its ready line once that has come."""

    def __init__(self, name: str, process: Process, log_path: Path) -> None:
        self.name = name
        self.process = process
        self.ready: Mapping[str, str] = {}
        self._log_path = log_path
        assert process.stdout is not None
        self._stdout = BufferedByteReceiveStream(process.stdout)

    def __repr__(self) -> str:
        """Name, process id and exit code, for people."""
        return f"Child({self.name}, pid {self.process.pid}, exit code {self.process.returncode})"

    async def wait_ready(self, *, limit_s: float) -> Mapping[str, str]:
        """Its ready line, waited for at most `limit_s`. Raises `ClusterError`."""
        try:
            with anyio.fail_after(limit_s):
                line = await self._stdout.receive_until(b"\n", MAX_READY_LINE_BYTES)
        except TimeoutError:
            raise self.error(f"was not ready after {limit_s:.0f} s") from None
        except (anyio.IncompleteRead, anyio.ClosedResourceError):
            await self.process.wait()
            raise self.error(f"ended before it was ready, {_exit(self.process)}") from None
        except anyio.DelimiterNotFound:
            raise self.error("printed no ready line") from None
        try:
            ready = json.loads(line)
        except ValueError:
            ready = None
        if not isinstance(ready, dict) or ready.get("event") != "ready":
            raise self.error(f"printed no ready line but {line[:200]!r}")
        self.ready = ready
        return ready

    def error(self, what: str) -> ClusterError:
        """What happened to this child, with the end of its log."""
        lines = self._log_path.read_text(errors="replace").splitlines()[-LOG_LINES:]
        log = "\n".join(f"  {line}" for line in lines) or "  (empty)"
        return ClusterError(f"{self.name} {what}. The end of {self._log_path}:\n{log}")


class Cluster:
    """The children. Whoever makes one calls `stop` in the end, in a shielded scope."""

    def __init__(self, log_folder: Path) -> None:
        log_folder.mkdir(parents=True, exist_ok=True)
        self._log_folder = log_folder
        self._children: list[Child] = []

    async def start(self, name: str, arguments: Sequence[str]) -> Child:
        """Start `slagate` with `arguments`; its standard error goes to a log file named after it."""
        log_path = self._log_folder / f"{name}.log"
        with log_path.open("wb") as log:
            process = await anyio.open_process([*SLAGATE, *arguments], stdin=None, stderr=log)
        child = Child(name, process, log_path)
        self._children.append(child)
        return child

    async def during(self, work: Callable[[], Awaitable[_T]]) -> _T:
        """The result of `work`, which is given up when a child ends. Raises `ClusterError` then.

        What `work` raises arrives in an exception group.
        """
        ended: list[Child] = []
        results: list[_T] = []
        async with anyio.create_task_group() as tasks:

            async def watch(child: Child) -> None:
                await child.process.wait()
                ended.append(child)
                tasks.cancel_scope.cancel()

            for child in self._children:
                tasks.start_soon(watch, child)
            results.append(await work())
            tasks.cancel_scope.cancel()
        if results:
            return results[0]
        raise ended[0].error(f"ended during the run, {_exit(ended[0].process)}")

    def kill(self) -> None:
        """End every child now; `stop` has yet to be called, or is waiting for them."""
        for child in self._children:
            with suppress(ProcessLookupError):
                child.process.kill()

    async def stop(self) -> list[str]:
        """End every child, at the latest after `STOP_GRACE_S`; the names of those that were killed."""
        alive = [child for child in self._children if child.process.returncode is None]
        for child in alive:
            child.process.terminate()
        with anyio.move_on_after(STOP_GRACE_S):
            for child in alive:
                await child.process.wait()
        killed = [child for child in alive if child.process.returncode is None]
        for child in killed:
            child.process.kill()
        for child in self._children:
            await child.process.aclose()
        self._children.clear()
        return [child.name for child in killed]


def _exit(process: Process) -> str:
    code = process.returncode
    if code is not None and code < 0:
        return f"by signal {-code}"
    return f"exit code {code}"
