"""Bytes that no peer should send, to both ends: nothing raises, hangs or is left, and others go on."""

import asyncio
import random
from collections.abc import Callable

import anyio

from slagate.proto.rpc.frames import prefix
from slagate.proto.rpc.status import OK
from slagate.workers.client.client import WorkerClient
from slagate.workers.runtime.virtual_loop import VirtualLoop, run
from support.http2.fuzz import PREFACE, Replay, frames, spoilt_client, spoilt_server
from support.http2.memory_transport import MemoryTransport, Network, joined
from support.http2.peer import ANSWER, PeerServer, PeerStream, echo
from support.seeds import each_seed, n_seeds_of
from support.worker.bytes_sink import BytesSink

N_INPUTS = 500
N_CALLS = 6
TIMEOUT_S = 20.0


def talk(stream: PeerStream) -> None:
    """Something of everything that a server may say."""
    number = stream.stream.id  # type: ignore[attr-defined]
    if number % 4 == 1:
        stream.answer(b"one", b"two" * 50, bytes(1000))
        stream.finish(0, b"")
    elif number % 8 == 3:
        stream.stream.respond([*ANSWER, (b"grpc-status", b"5"), (b"grpc-message", b"a%20b")])
        stream.stream.end_stream()
    else:
        stream.answer(b"one")
        stream.stream.reset()


def conversation() -> tuple[bytes, bytes]:
    """What a client and a server say to each other, N_CALLS calls long."""
    said: tuple[bytearray, bytearray] = (bytearray(), bytearray())

    async def main() -> None:
        server = PeerServer(talk)
        network = Network(server.protocol)
        async with anyio.create_task_group() as tasks:

            async def dial(address: str, make: Callable[[], asyncio.Protocol]) -> None:
                await network.dial(address, make)
                for transport, log in zip(network.links[0], said, strict=True):
                    tap(transport, log)

            channel = WorkerClient("worker:1", tasks, dial=dial)
            sinks = [BytesSink() for _ in range(N_CALLS)]
            for at, sink in enumerate(sinks):
                channel.generate(bytes(at * 100), [("x-number", str(at))], sink, timeout_s=50.0)
            for sink in sinks:
                await sink.done()
            channel.close()
            tasks.cancel_scope.cancel()

    def tap(transport: MemoryTransport, log: bytearray) -> None:
        for data in transport._travelling:
            log.extend(data or b"")
        write = transport._send

        def send(data: bytes | None) -> None:
            log.extend(data or b"")
            write(data)

        transport._send = send  # type: ignore[method-assign]

    run(main)
    return bytes(said[0]), bytes(said[1])


CLIENT_SAID, SERVER_SAID = conversation()


def test_whatever_a_worker_says_each_call_ends_once_and_the_next_connection_is_good(
    record_property: Callable[[str, object], None],
) -> None:
    record_property("fuzz inputs", n_seeds_of(N_INPUTS))

    def history(seed: int) -> None:
        rng = random.Random(seed)
        first = len(frames(SERVER_SAID)[0])
        data = spoilt_server(SERVER_SAID, rng)

        async def main() -> None:
            good = PeerServer(echo)
            servers: list[asyncio.Protocol] = [Replay(data, rng, first)]
            network = Network(lambda: servers.pop() if servers else good.protocol())
            async with anyio.create_task_group() as tasks:
                channel = WorkerClient("worker:1", tasks, dial=network.dial)
                sinks = [BytesSink() for _ in range(N_CALLS)]
                for sink in sinks:
                    call = channel.generate(b"r" * 100, (), sink, timeout_s=TIMEOUT_S)
                    if rng.random() < 0.2:
                        call.pause()
                for sink in sinks:
                    await sink.done()
                for connection in channel.pool.connections:
                    connection.close("was spoilt")
                channel.pool.reachable()
                last = BytesSink()
                channel.generate(b"r", (), last, timeout_s=TIMEOUT_S)
                assert await last.done() == OK
                assert repr(channel).startswith("WorkerClient(0 calls, 0 waiting")
                channel.close()
                tasks.cancel_scope.cancel()
            loop = asyncio.get_running_loop()
            assert isinstance(loop, VirtualLoop)
            await anyio.sleep(1)
            assert loop.n_timers == 0

        run(main)

    each_seed(N_INPUTS, history)


def test_whatever_a_client_says_its_connection_alone_suffers(
    record_property: Callable[[str, object], None],
) -> None:
    record_property("fuzz inputs", n_seeds_of(N_INPUTS))

    def history(seed: int) -> None:
        rng = random.Random(seed)
        data = spoilt_client(CLIENT_SAID, rng)

        async def main() -> None:
            server = PeerServer(talk)
            joined(server.protocol(), Replay(data, rng))
            near = Network(server.protocol)
            async with anyio.create_task_group() as tasks:
                channel = WorkerClient("worker:1", tasks, dial=near.dial)
                server.on_request = talk
                await anyio.sleep(1)
                bad = server.connections[0]
                for stream in server.streams:
                    stream.say(b"late")
                    stream.finish()
                await anyio.sleep(100)
                server.on_request = echo
                last = BytesSink()
                channel.generate(b"r", (), last, timeout_s=TIMEOUT_S)
                assert await last.done() == OK
                channel.close()
                tasks.cancel_scope.cancel()
            bad.close("over")
            assert bad.n_streams == 0
            await anyio.sleep(1)
            loop = asyncio.get_running_loop()
            assert isinstance(loop, VirtualLoop)
            assert loop.n_timers == 0

        run(main)

    each_seed(N_INPUTS, history)


def test_the_recorded_conversation_is_one() -> None:
    """Else the inputs would be spoilt before they are made."""
    assert CLIENT_SAID.startswith(PREFACE)
    kinds = [frame[3] for frame in frames(CLIENT_SAID[len(PREFACE) :])]
    assert kinds.count(1) == N_CALLS
    assert prefix(bytes(100)) in CLIENT_SAID
    assert {0, 1, 3, 4} <= {frame[3] for frame in frames(SERVER_SAID)}
