"""`slagate serve --processes 2`: what takes several restarts, or a drain that is cut."""

import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from support.gateway.foreign_client import Client, request
from support.gateway.processes import Cluster, Gateway, eventually, gateway
from support.gateway.several import Streams, config_of, is_whole_again, kill, two_processes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("processes")


@pytest.fixture(scope="module")
def two(folder: Path) -> Iterator[Cluster]:
    with two_processes(folder) as running:
        yield running


def page(of: Gateway) -> dict[str, Metric]:
    """/metrics, every family once and as a scraper reads it."""
    text = of.http("/metrics")[1]
    about = [line.split()[1:3] for line in text.splitlines() if line.startswith("#")]
    assert [each for each, n in Counter(map(tuple, about)).items() if n > 1] == []
    families = list(text_string_to_metric_families(text))
    names = Counter(family.name for family in families)
    assert set(names.values()) == {1}, names
    assert {family.type for family in families} == {"counter", "gauge", "histogram"}
    assert not [name for name in names if name.endswith("_created")]
    return {family.name: family for family in families}


def counted(families: dict[str, Metric]) -> dict[tuple[object, ...], float]:
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in families.values()
        if family.type != "gauge"
        for sample in family.samples
    }


def test_no_counter_of_the_gateway_goes_back_when_a_process_is_started_again(two: Cluster) -> None:
    served = two.gateway

    def ask() -> None:
        with ExitStack() as stack:
            clients = [stack.enter_context(Client(served.address)) for _ in range(8)]
            for client in clients:
                assert not client.generate(request(range(50), 4)).failed
            (open_now,) = served.metrics("slagate_client_connections").values()
            assert open_now >= 8

    pages = [page(served)]
    for number in (0, 1):
        ask()
        pages.append(page(served))
        kill(served, number)
        pages.append(page(served))
        is_whole_again(served)
        pages.append(page(served))
    ask()
    pages.append(page(served))
    for earlier, later in itertools.pairwise(map(counted, pages)):
        gone_back = {
            key: (was, later.get(key)) for key, was in earlier.items() if later.get(key, -1) < was
        }
        assert gone_back == {}
    first, last = counted(pages[0]), counted(pages[-1])
    for name in ("slagate_client_connections_accepted_total", "slagate_output_tokens_total"):
        assert last[name,] >= first[name,] + 24
    assert set(pages[0]) <= set(pages[-1])


def test_what_does_not_end_in_time_gets_a_status(two: Cluster, folder: Path) -> None:
    with ExitStack() as stack:
        served = stack.enter_context(
            gateway(folder, config_of(two), "--processes", "2", "--drain", "0.2", name="cut")
        )
        eventually(served.is_ready, "it is ready")
        streams = Streams(served.address, 20, 3000, stack)
        assert served.process.terminate() == 0
        assert streams.join() == {grpc.StatusCode.UNAVAILABLE: 20}
