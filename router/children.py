"""Other processes of slagate, as children of this one: those of a gateway, and the fleets of the tools.

start ──▶ (child prints its ready line) ──▶ runs ──▶ stop: SIGTERM, then SIGKILL
                └─ ends, or is late ──▶ ChildError
"""

import json
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TypeVar

import anyio
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from slagate.workers.runtime.listen import MAX_READY_LINE_BYTES

# Isolated: a module that lies where the user stands must not take the place of one of ours.
SLAGATE = (sys.executable, "-I", "-m", "slagate.router")

STOP_GRACE_S = 10.0
LOG_LINES = 15

_T = TypeVar("_T")


class ChildError(Exception):
    """A child process that ended, or was not ready in time; the text is for the person at the console."""


class ChildProcess:
    """One `slagate` process."""

    def __init__(self, name: str, process: Process, log_path: Path | None) -> None:
        """Called by `start`."""
        self.name = name
        self._process = process
        self._log_path = log_path
        assert process.stdout is not None
        self._stdout = BufferedByteReceiveStream(process.stdout)

    @classmethod
    async def start(
        cls,
        name: str,
        arguments: Sequence[str],
        *,
        stdin: int | None = None,
        environment: Mapping[str, str] | None = None,
        log_path: Path | None = None,
    ) -> "ChildProcess":
        """Start `slagate` with `arguments`; its stderr goes to the file at `log_path`.

        Whatever is None of `stdin`, `environment` and `log_path`, the child shares this process's.
        """
        with nullcontext() if log_path is None else log_path.open("wb") as log:
            process = await anyio.open_process(
                [*SLAGATE, *arguments], stdin=stdin, stderr=log, env=environment
            )
        return cls(name, process, log_path)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit status, or the signal that ended it as a negative number; None while it runs."""
        return self._process.returncode

    async def wait_ready(self, *, limit_s: float) -> Mapping[str, str]:
        """Wait at most `limit_s` for the child's ready line, and return its fields. Raises `ChildError`."""
        try:
            with anyio.fail_after(limit_s):
                line = await self._stdout.receive_until(b"\n", MAX_READY_LINE_BYTES)
        except TimeoutError:
            raise self.error(f"was not ready after {limit_s:.0f} s") from None
        except (anyio.IncompleteRead, anyio.ClosedResourceError):
            await self.wait()
            raise self.error(f"ended before it was ready, {self._exit()}") from None
        except anyio.DelimiterNotFound:
            raise self.error("printed no ready line") from None
        try:
            ready = json.loads(line)
        except ValueError:
            ready = None
        if not isinstance(ready, dict) or ready.get("event") != "ready":
            raise self.error(f"printed no ready line but {line[:200]!r}")
        return ready

    async def wait(self) -> int:
        """Wait until the process has ended, and return its exit status, as in `returncode`."""
        return await self._process.wait()

    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal, if it still runs."""
        with suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def aclose(self) -> None:
        """Close its pipes, and wait until it has ended."""
        await self._process.aclose()

    def error(self, what: str) -> ChildError:
        """Make the error for what happened to this child, with the end of its log."""
        if self._log_path is None:
            return ChildError(f"{self.name} {what}")
        lines = self._log_path.read_text(errors="replace").splitlines()[-LOG_LINES:]
        log = "\n".join(f"  {line}" for line in lines) or "  (empty)"
        return ChildError(f"{self.name} {what}. The end of {self._log_path}:\n{log}")

    def ended_early(self) -> ChildError:
        """The error of a child that ended while it was needed."""
        return self.error(f"ended during the run, {self._exit()}")

    def _exit(self) -> str:
        code = self.returncode
        return f"by signal {-code}" if code is not None and code < 0 else f"exit code {code}"


class Cluster:
    """The processes of a gateway and its workers. In the end, await `stop` in a shielded scope."""

    def __init__(self, log_folder: Path) -> None:
        log_folder.mkdir(parents=True, exist_ok=True)
        self._log_folder = log_folder
        self._children: list[ChildProcess] = []

    async def start(self, name: str, arguments: Sequence[str]) -> ChildProcess:
        """Start `slagate` with `arguments`; its stderr goes to NAME.log in the folder of logs."""
        log_path = self._log_folder / f"{name}.log"
        child = await ChildProcess.start(name, arguments, log_path=log_path)
        self._children.append(child)
        return child

    async def during(self, work: Callable[[], Awaitable[_T]]) -> _T:
        """Run `work` and return its result; if a child ends meanwhile, cancel it and raise `ChildError`.

        Exceptions of `work` arrive in an exception group.
        """
        ended: list[ChildProcess] = []
        results: list[_T] = []
        async with anyio.create_task_group() as tasks:

            async def watch(child: ChildProcess) -> None:
                await child.wait()
                ended.append(child)
                tasks.cancel_scope.cancel()

            for child in self._children:
                tasks.start_soon(watch, child)
            results.append(await work())
            tasks.cancel_scope.cancel()
        if results:
            return results[0]
        raise ended[0].ended_early()

    def kill(self) -> None:
        """Send every child SIGKILL; `stop` still has to be awaited."""
        for child in self._children:
            child.send_signal(signal.SIGKILL)

    async def stop(self) -> list[str]:
        """End every child, after `STOP_GRACE_S` by SIGKILL; returns the names of those killed."""
        alive = [child for child in self._children if child.returncode is None]
        for child in alive:
            child.send_signal(signal.SIGTERM)
        with anyio.move_on_after(STOP_GRACE_S):
            for child in alive:
                await child.wait()
        killed = [child for child in alive if child.returncode is None]
        for child in killed:
            child.send_signal(signal.SIGKILL)
        for child in self._children:
            await child.aclose()
        self._children.clear()
        return [child.name for child in killed]
