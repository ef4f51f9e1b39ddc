"""What several files of unit tests set up."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.engine.sim_llm import Pair


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    """A prefill and a decode engine that can hand off, in virtual time."""
    both = Pair(tmp_path)
    yield both
    for transport in both.transports:
        transport.close()
