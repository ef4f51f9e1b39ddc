"""Every connection of a client is counted once when it comes, and once when it is over."""

from collections.abc import Awaitable, Callable

import anyio
from prometheus_client import CollectorRegistry

from slagate.proto.rpc.status import OK
from slagate.router.metrics import ConnectionCounts, ConnectionEnd, RefusedConnection
from slagate.router.request.settings import ClientLimits, Settings
from slagate.workers.runtime.virtual_loop import run
from support.builders import finished, token
from support.gateway.front_path import Served, served
from support.http2.memory_transport import joined
from support.http2.raw import HELLO, PING, RawClient, frame


def figures(s: Served) -> dict[str, float]:
    """Those that are not 0."""
    found = {}
    for family in s.bench.app.gateway.metrics.registry.collect():
        for sample in family.samples:
            is_one = sample.name.startswith("slagate_client_connections")
            if is_one and sample.value and "_created" not in sample.name:
                name = sample.name.removeprefix("slagate_client_connections").strip("_")
                found[" ".join([name, *sample.labels.values()]).strip()] = sample.value
    return found


def play(scene: Callable[[Served], Awaitable[None]], *, limits: ClientLimits | None = None) -> None:
    async def main() -> None:
        settings = Settings(clients=limits or ClientLimits())
        async with served((token(1), finished(), OK), settings=settings) as s:
            assert figures(s) == {}
            await scene(s)

    run(main)


def test_what_clients_do_tells_how_their_connections_end() -> None:
    async def scene(s: Served) -> None:
        raws = [s.raw() for _ in range(6)]
        leaves, is_lost, breaks, chatters, is_silent, stays = raws
        for each in (leaves, is_lost, breaks, chatters, stays):
            each.send(HELLO)
        await anyio.sleep(0.1)
        assert figures(s) == {"": 6, "accepted_total": 6}
        assert leaves.transport is not None
        assert is_lost.transport is not None
        leaves.transport.close()
        is_lost.transport.abort()
        breaks.send(b"no frame of HTTP/2" * 100)
        chatters.send(frame(PING, payload=bytes(8)) * 300)
        await anyio.sleep(20)  # the silent one too is over
        assert [each.is_over for each in (breaks, chatters, is_silent, stays)] == [True] * 3 + [
            False
        ]
        ends = {"ended_total client": 2, "ended_total broken": 3}
        assert figures(s) == {"": 1, "accepted_total": 6} | ends

    play(scene)


def test_connections_that_are_not_taken_are_counted_by_why() -> None:
    async def scene(s: Served) -> None:
        first, second, _ = s.raw(), s.raw(), s.raw()
        for each in (first, second):
            each.send(HELLO)
        await anyio.sleep(0.1)
        assert figures(s) == {"": 2, "accepted_total": 2, "refused_total limit": 1}
        s.front.retire()
        await anyio.sleep(2)  # goodbye
        s.raw()
        await anyio.sleep(0.1)
        assert figures(s) == {
            "accepted_total": 2,
            "ended_total drained": 2,
            "refused_total limit": 1,
            "refused_total draining": 1,
        }

    play(scene, limits=ClientLimits(max_connections=2))


def test_one_over_the_limit_is_counted_when_its_handshake_is_over_and_not_when_it_begins() -> None:
    """With TLS it may fail yet, which counts by itself, or somebody may leave meanwhile."""

    async def scene(s: Served) -> None:
        first = s.raw()
        _, second, third = s.front.protocol(), s.front.protocol(), s.front.protocol()
        assert figures(s) == {"": 1, "accepted_total": 1}
        joined(RawClient(), second)
        assert figures(s) == {"": 1, "accepted_total": 1, "refused_total limit": 1}
        assert first.transport is not None
        first.transport.close()
        await anyio.sleep(0.1)
        joined(RawClient(), third)
        assert figures(s)["accepted_total"] == 2

    play(scene, limits=ClientLimits(max_connections=1))


def test_every_reason_is_a_series_from_the_start() -> None:
    registry = CollectorRegistry()
    ConnectionCounts(registry, CollectorRegistry())
    for name, reasons in (("ended", ConnectionEnd), ("refused", RefusedConnection)):
        for each in reasons:
            full = f"slagate_client_connections_{name}_total"
            assert registry.get_sample_value(full, {"reason": each.value}) == 0
