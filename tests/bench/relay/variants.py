"""What is measured, by name."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from bench.relay.programs import Proxy, nginx, python_relay
from bench.relay.workloads import Workload

Start = Callable[[Workload, Path, int, list[str]], AbstractContextManager[Proxy]]


@contextmanager
def _direct(_: Workload, folder: Path, core: int, workers: list[str]) -> Iterator[Proxy]:
    """Nothing in between."""
    del folder, core
    yield Proxy(0, workers)


def _nginx(
    _: Workload, folder: Path, core: int, workers: list[str]
) -> AbstractContextManager[Proxy]:
    return nginx(folder, core, workers)


def _relay(module: str) -> Start:
    def start(
        _: Workload, folder: Path, core: int, workers: list[str]
    ) -> AbstractContextManager[Proxy]:
        return python_relay(module, (), folder, core, workers)

    return start


VARIANTS: dict[str, Start] = {
    "direct": _direct,
    "nginx": _nginx,
    "fixed": _relay("fixed"),
}
