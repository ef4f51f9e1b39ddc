"""Jobs on child processes: their results, their errors, and their end."""

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from slagate.router.replay.jobs import JobFailed, run_jobs
from slagate.workers.runtime.usage import UsageError


def doubled(job: Any, count: Callable[[], None]) -> Any:
    """What a child does with a job of these tests."""
    count()
    if job == "usage":
        raise UsageError("--x: is wrong")
    if job == "bug":
        raise AssertionError("leases are negative")
    if job == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    return os.getpid() if job == "pid" else 2 * job


def played(*jobs: Any, n_processes: int = 2) -> tuple[list[Any], list[int]]:
    counts: list[int] = []
    done = run_jobs(jobs, doubled, n_processes=n_processes, on_progress=counts.append)
    return sorted(done), counts


def test_each_job_is_done_once() -> None:
    done, counts = played(1, 2, 3, 4, 5)
    assert done == [(n, 2 * n) for n in range(1, 6)]
    assert counts == sorted(counts)
    assert counts[-1] <= 5


@pytest.mark.parametrize(
    ("job", "error", "says"),
    [
        ("usage", UsageError, "--x: is wrong"),
        ("bug", JobFailed, "bug: AssertionError: leases are negative"),
        ("killed", JobFailed, "a process that played killed or another run was ended"),
    ],
)
def test_an_error_of_a_job_ends_all(job: str, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        played(job)


def test_no_child_is_left_behind() -> None:
    jobs = run_jobs(["pid", "pid"], doubled, n_processes=1, on_progress=lambda _: None)
    pid = next(jobs).result
    jobs.close()  # type: ignore[attr-defined]
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
