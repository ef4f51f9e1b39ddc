"""Every scenario of the contract runs over each way to have a worker, and over each engine version."""

from collections.abc import Iterator

import anyio
import pytest

from slagate.workers.runtime import virtual_loop
from support.engine.process import SharedWorkers
from support.limits import HANG_S
from support.worker.contract import DIRECT, PROCESS, SERVED, Play, Scenario, Setup


@pytest.fixture(scope="package")
def shared_workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedWorkers]:
    """Worker processes of all tests of this folder."""
    shared = SharedWorkers(tmp_path_factory.mktemp("workers"))
    yield shared
    shared.close()


def playing(setup: Setup) -> Play:
    """Run a scenario: directly in virtual time, else in real time."""

    def run(scenario: Scenario) -> None:
        async def main() -> None:
            with anyio.fail_after(HANG_S):
                await scenario(setup)

        if setup.way == "direct":
            virtual_loop.run(main)
        else:
            anyio.run(main)

    return run


@pytest.fixture(params=[*DIRECT, *SERVED, *PROCESS], ids=str)
def play(request: pytest.FixtureRequest, shared_workers: SharedWorkers) -> Play:
    """Run a scenario that sees its workers as a client does."""
    return playing(request.param._replace(shared=shared_workers))


@pytest.fixture(params=[*DIRECT, *SERVED], ids=str)
def inside(request: pytest.FixtureRequest) -> Play:
    """Run a scenario that looks into its workers, or has some of its own making.

    Processes are for scenarios that can share them: each start costs a second.
    """
    return playing(request.param)
