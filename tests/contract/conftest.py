"""Every scenario of the contract runs over each way to have a worker."""

import anyio
import pytest

from support import virtual_loop
from support.contract import DIRECT, SERVED, Play, Scenario, Setup


@pytest.fixture(params=[*DIRECT, *SERVED], ids=str)
def play(request: pytest.FixtureRequest) -> Play:
    """Run a scenario: directly in virtual time, served in real time."""
    setup: Setup = request.param

    def run(scenario: Scenario) -> None:
        async def main() -> None:
            with anyio.fail_after(30):
                await scenario(setup)

        if setup.served:
            anyio.run(main)
        else:
            virtual_loop.run(main)

    return run
