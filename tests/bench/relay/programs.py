"""Processes of a run: each on its core, the C programs, and what a process has used."""

import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from bench.relay.workloads import Workload, write_answer, write_requests

HERE = Path(__file__).parent
N_WORKERS = 2
END_S = 10.0


class Cores(NamedTuple):
    """Where things run: what is measured has a core to itself."""

    measured: int
    others: int


def two_cores() -> Cores:
    """The last one, and the first. Raises `SystemExit` where there is but one."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("bench-relay needs two cores")
    return Cores(measured=cores[-1], others=cores[0])


def compiled(name: str, folder: Path) -> Path:
    """A C program of ours, compiled where it was not yet. Raises `CalledProcessError`."""
    program, source = folder / name, HERE / f"{name}.c"
    newest_s = max(path.stat().st_mtime for path in (source, HERE / "common.h"))
    if not program.exists() or program.stat().st_mtime < newest_s:
        folder.mkdir(parents=True, exist_ok=True)
        made = ["gcc", "-O2", "-Wall", "-Wextra", "-o", str(program), str(source), "-lnghttp2"]
        subprocess.run(made, check=True)
    return program


# --- what is running --------------------------------------------------------------------------------


@contextmanager
def running(
    command: Sequence[str], core: int, *, log: Path, env: Mapping[str, str] | None = None
) -> Iterator["subprocess.Popen[str]"]:
    """A process on one core, for the time of the block; what it says on stderr goes into `log`."""
    with (
        log.open("w") as errors,
        subprocess.Popen(
            ["taskset", "-c", str(core), *command],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=None if env is None else {**os.environ, **env},
        ) as process,
    ):
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()


def port_of(process: "subprocess.Popen[str]", log: Path) -> int:
    """What it has printed. Raises `RuntimeError` with its last words where it has ended instead."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"{process.args!r}: {log.read_text()[-2000:]}")
    return int(line)


@contextmanager
def workers(
    workload: Workload, folder: Path, core: int, *, packed: bool = False
) -> Iterator[list[str]]:
    """Addresses of the backends."""
    messages = folder / "answer"
    pace = [str(workload.pace_us), "spread" if workload.spread else "together"]
    backend = str(compiled("backend", folder.parent))
    command = [backend, str(messages), *(pace if workload.pace_us else [])]
    with ExitStack() as stack:
        addresses = []
        for number in range(N_WORKERS):
            log = folder / f"backend-{number}.log"
            env = {"PACKED": "1"} if packed else None
            process = stack.enter_context(running(command, core, log=log, env=env))
            addresses.append(f"127.0.0.1:{port_of(process, log)}")
        yield addresses


class Files(NamedTuple):
    """What a load is made of."""

    requests: Path
    salt_at: int
    answer_bytes: int


def files_of(workload: Workload, folder: Path) -> Files:
    """Written anew."""
    requests = folder / "requests"
    return Files(
        requests, write_requests(requests, workload), write_answer(folder / "answer", workload)
    )


# --- load -------------------------------------------------------------------------------------------


class Load:
    """A client that is at work from the moment it is made."""

    def __init__(
        self, program: Path, addresses: Sequence[str], core: int, options: Mapping[str, object]
    ) -> None:
        self._command = [str(program), *addresses, *(f"{k}={v}" for k, v in options.items())]
        self._process = subprocess.Popen(
            ["taskset", "-c", str(core), *self._command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def found(self) -> dict[str, Any]:
        """Wait for what it has found. Raises `RuntimeError` where an answer was not as it must be."""
        out, errors = self._process.communicate()
        if self._process.returncode != 0:
            raise RuntimeError(f"{' '.join(self._command)}: {out} {errors}")
        found: dict[str, Any] = json.loads(out)
        return found


# --- CPU and memory ---------------------------------------------------------------------------------


def tree(pid: int) -> list[int]:
    """A process and what descends from it."""
    found = [pid]
    for parent in found:
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            found += map(int, children.read_text().split())
    return found


def cpu_s(pid: int) -> float:
    """User and system seconds of a process and its descendants, by the scheduler's nanoseconds.

    Those of nobody, with the number 0, are none. Threads that have ended do not count any more.
    """
    if not pid:
        return 0.0
    tasks = (path for each in tree(pid) for path in Path(f"/proc/{each}/task").glob("*/schedstat"))
    return sum(int(path.read_text().split()[0]) for path in tasks) / 1e9


def rss_bytes(pid: int) -> int:
    """Resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
