"""What is measured, by name."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from bench.relay.proxies import Proxy, envoy, nginx, python_relay
from bench.relay.workloads import Workload

Start = Callable[[Workload, Path, int, list[str]], AbstractContextManager[Proxy]]
"""A relay for a workload, its files in a folder, on a core, in front of workers."""


@contextmanager
def _direct(_: Workload, _folder: Path, _core: int, workers: list[str]) -> Iterator[Proxy]:
    """Nothing in between."""
    yield Proxy(0, workers)


def _nginx(
    _: Workload, folder: Path, core: int, workers: list[str]
) -> AbstractContextManager[Proxy]:
    return nginx(folder, core, workers)


def _envoy(
    _: Workload, folder: Path, core: int, workers: list[str]
) -> AbstractContextManager[Proxy]:
    return envoy(folder, core, workers)


def _fixed(
    _: Workload, folder: Path, core: int, workers: list[str]
) -> AbstractContextManager[Proxy]:
    return python_relay("fixed", (), folder, core, workers)


def _full(
    workload: Workload, folder: Path, core: int, workers: list[str]
) -> AbstractContextManager[Proxy]:
    return python_relay("full", (str(workload.n_tokens),), folder, core, workers)


def _full_own(
    workload: Workload, folder: Path, core: int, workers: list[str]
) -> AbstractContextManager[Proxy]:
    return python_relay("full", ("--own", str(workload.n_tokens)), folder, core, workers)


def _aio(_: Workload, folder: Path, core: int, workers: list[str]) -> AbstractContextManager[Proxy]:
    return python_relay("aio_reference", (), folder, core, workers)


def _bare(
    _: Workload, folder: Path, core: int, workers: list[str]
) -> AbstractContextManager[Proxy]:
    return python_relay("bare", (), folder, core, workers)


VARIANTS: dict[str, Start] = {
    "direct": _direct,
    "nginx": _nginx,
    "envoy": _envoy,
    "bare": _bare,
    "fixed": _fixed,
    "full": _full,
    "full_own": _full_own,
    "aio": _aio,
}
