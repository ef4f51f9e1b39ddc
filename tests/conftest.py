"""Options of the whole suite."""

import gc
import logging
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from hypothesis import HealthCheck, settings

from support.seeds import is_long_run

GOLDEN = Path(__file__).parent / "golden"

# With its last object grpc.aio ends its poller thread, and waits for that. Where a garbage collection finds
# the object, in the middle of whatever runs then, the two can wait for each other for ever.
grpc.aio.init_grpc_aio()

# Hypothesis limits the time of an example and of making one; a busy machine would fail right tests. The
# gate tries the same examples each time: what is new is for `make test-long` to find, not for whoever
# changes a word.
settings.register_profile(
    "untimed",
    deadline=None,
    derandomize=not is_long_run(),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("untimed")


@pytest.fixture(autouse=True, scope="module")
def _nothing_of_others() -> None:
    """What is there now stays until the end: looking at it in each full collection costs a third of all."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _restored_root() -> Iterator[None]:
    """Setting up logging is for a whole process: undo it."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite-golden",
        action="store_true",
        help="write tests/golden/* anew instead of comparing",
    )


@pytest.hookimpl(wrapper=True)
def pytest_ignore_collect(collection_path: Path) -> Generator[None, bool | None, bool | None]:
    """Nobody leaves out a module of tests, as plugins of installed packages do by its name."""
    is_left_out = yield
    if is_left_out and collection_path.match("test_*.py"):
        raise pytest.UsageError(f"a plugin leaves out {collection_path}")
    return is_left_out


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Shuffled as they are, those of tests/e2e come first, then those of tests/contract.

    Of two processes the first one then has most of them, with the processes that they share and the time
    they wait, the other one works, and what is left for the end are small tests.
    """
    first = ["e2e", "contract"]
    items.sort(key=lambda item: [item.path.parent.name != folder for folder in first])


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """How many inputs of bytes were tried: the line that `make fuzz` ends with."""
    done = {
        outcome: [
            number
            for report in terminalreporter.stats.get(outcome, [])
            for name, number in getattr(report, "user_properties", ())
            if name == "fuzz inputs"
        ]
        for outcome in ("passed", "failed")
    }
    if any(done.values()):
        n_inputs, n_failed = sum(map(sum, done.values())), len(done["failed"])
        n_tests = sum(map(len, done.values()))
        terminalreporter.write_line(
            f"fuzz: {n_inputs} inputs in {n_tests} tests, {n_failed} of them failed"
        )


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compares a text with a file of tests/golden, or writes the file."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--rewrite-golden"):
            path.write_text(text, encoding="utf-8")
        wanted = path.read_text(encoding="utf-8")
        assert text == wanted, (
            f"{name} changed; run pytest --rewrite-golden, and commit it only if you can say why"
            " each line changed"
        )

    return compare
