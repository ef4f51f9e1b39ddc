"""Clusters that test files share: starting one costs seconds of CPU, a test costs milliseconds."""

from collections.abc import Iterator

import pytest

from support.gateway.foreign_client import Client
from support.gateway.processes import Cluster, Pool, cluster


# They end with the last test of this folder: eight idle processes take a tenth of a core from all others.
@pytest.fixture(scope="package")
def disagg(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two equal prefill and two equal decode workers at true speed; context window 32,768."""
    window = ("--max-seq-len", "32768")
    pools = {"p": Pool("prefill", 2, window), "d": Pool("decode", 2, window)}
    with cluster(tmp_path_factory.mktemp("disagg"), pools) as running:
        yield running


@pytest.fixture(scope="package")
def agg(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two equal workers that do both phases, at true speed."""
    with cluster(tmp_path_factory.mktemp("agg"), {"a": Pool("agg", 2)}) as running:
        yield running


@pytest.fixture(params=["disagg", "agg"])
def either(request: pytest.FixtureRequest) -> Cluster:
    """Each of the two clusters in turn."""
    running: Cluster = request.getfixturevalue(request.param)
    return running


@pytest.fixture
def client(either: Cluster) -> Iterator[Client]:
    """A connection to the gateway of `either`."""
    with Client(either.gateway.address) as connected:
        yield connected


@pytest.fixture
def disagg_client(disagg: Cluster) -> Iterator[Client]:
    """A connection to the gateway of `disagg`."""
    with Client(disagg.gateway.address) as connected:
        yield connected
