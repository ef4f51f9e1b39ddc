"""Bytes that no peer should send, to both ends: nothing raises, hangs or is left, and others go on."""

import asyncio
import random
from collections.abc import Callable

import anyio

from slagate.workers.channel import StreamChannel
from slagate.workers.grpc_wire import prefix
from slagate.workers.worker import OK
from support.bytes_sink import BytesSink
from support.h2_peer import ANSWER, PeerServer, PeerStream, echo
from support.memory_transport import MemoryTransport, Network, joined
from support.seeds import each_seed
from support.virtual_loop import VirtualLoop, run

N_INPUTS = 1000
N_CALLS = 6
TIMEOUT_S = 20.0

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def talk(stream: PeerStream) -> None:
    """Something of everything that a server may say."""
    number = stream.stream.id  # type: ignore[attr-defined]
    if number % 4 == 1:
        stream.answer(b"one", b"two" * 50, bytes(1000))
        stream.finish(0, b"")
    elif number % 8 == 3:
        stream.stream.respond([*ANSWER, (b"grpc-status", b"5"), (b"grpc-message", b"a%20b")])
        stream.stream.finish()
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

            channel = StreamChannel("worker:1", tasks, dial=dial)
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


def frames(data: bytes) -> list[bytes]:
    found, at = [], 0
    while at < len(data):
        end = at + 9 + int.from_bytes(data[at : at + 3], "big")
        found.append(data[at:end])
        at = end
    return found


def spoilt(data: bytes, rng: random.Random) -> bytes:
    """The same with a few things wrong, of frames or of bytes."""
    parts = frames(data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(parts))
        frame = bytearray(parts[at])
        if not frame:
            continue
        match rng.randrange(9):
            case 0:
                parts.pop(at) if len(parts) > 1 else None
            case 1:
                parts.insert(rng.randrange(len(parts) + 1), bytes(frame))
            case 2:
                other = rng.randrange(len(parts))
                parts[at], parts[other] = parts[other], parts[at]
            case 3:
                frame[3:4] = bytes((rng.randrange(14),))  # the type
                parts[at] = bytes(frame)
            case 4:
                frame[4:5] = bytes((rng.randrange(256),))  # the flags
                parts[at] = bytes(frame)
            case 5:
                frame[5:9] = rng.choice((0, 1, 2, 3, 9, 99, 1 << 31)).to_bytes(4, "big")
                parts[at] = bytes(frame)
            case 6:
                for _ in range(rng.choice((1, 3))):
                    frame[rng.randrange(len(frame))] = rng.randrange(256)
                parts[at] = bytes(frame)
            case 7:
                parts[at] = bytes(frame[: rng.randrange(len(frame) + 1)])
            case _:
                payload = rng.randbytes(rng.choice((0, 4, 5, 8, 40)))
                header = len(payload).to_bytes(3, "big") + bytes(
                    (
                        rng.randrange(12),
                        rng.choice((0, 1, 4, 5, 8, 0x20)),
                        0,
                        0,
                        0,
                        rng.randrange(8),
                    )
                )
                parts.insert(at, header + payload)
    return b"".join(parts)


class Replay(asyncio.Protocol):
    """Says these bytes in pieces, whatever it is told."""

    def __init__(self, data: bytes, rng: random.Random, first_bytes: int) -> None:
        cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.choice((0, 1, 4, 30))))
        ends = [first_bytes, *(cut for cut in cuts if cut > first_bytes), len(data)]
        starts = [0, *ends[:-1]]
        self._pieces = [data[start:end] for start, end in zip(starts, ends, strict=True)]
        self._says_goodbye = rng.random() < 0.5

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        loop = asyncio.get_running_loop()
        for at, piece in enumerate(self._pieces):
            loop.call_later(0.001 * at, transport.write, piece)
        if self._says_goodbye:
            loop.call_later(0.001 * len(self._pieces), transport.close)


def test_whatever_a_worker_says_each_call_ends_once_and_the_next_connection_is_good() -> None:
    def history(seed: int) -> None:
        rng = random.Random(seed)
        first = len(frames(SERVER_SAID)[0])
        data = SERVER_SAID[:first] + spoilt(SERVER_SAID[first:], rng)
        if rng.random() < 0.1:
            data = spoilt(SERVER_SAID, rng)

        async def main() -> None:
            good = PeerServer(echo)
            servers: list[asyncio.Protocol] = [Replay(data, rng, first)]
            network = Network(lambda: servers.pop() if servers else good.protocol())
            async with anyio.create_task_group() as tasks:
                channel = StreamChannel("worker:1", tasks, dial=network.dial)
                sinks = [BytesSink() for _ in range(N_CALLS)]
                for sink in sinks:
                    call = channel.generate(b"r" * 100, (), sink, timeout_s=TIMEOUT_S)
                    if rng.random() < 0.2:
                        call.pause()
                for sink in sinks:
                    await sink.done()
                for connection in channel.links.connections:
                    connection.close("was spoilt")
                channel.reachable()
                last = BytesSink()
                channel.generate(b"r", (), last, timeout_s=TIMEOUT_S)
                assert await last.done() == OK
                assert repr(channel).startswith("StreamChannel(0 calls, 0 waiting")
                channel.close()
                tasks.cancel_scope.cancel()
            loop = asyncio.get_running_loop()
            assert isinstance(loop, VirtualLoop)
            await anyio.sleep(1)
            assert loop.n_timers == 0

        run(main)

    each_seed(N_INPUTS, history)


def test_whatever_a_client_says_its_connection_alone_suffers() -> None:
    def history(seed: int) -> None:
        rng = random.Random(seed)
        data = PREFACE + spoilt(CLIENT_SAID[len(PREFACE) :], rng)
        if rng.random() < 0.05:
            data = rng.randbytes(rng.randrange(200))

        async def main() -> None:
            server = PeerServer(talk)
            joined(server.protocol(), Replay(data, rng, 0))
            near = Network(server.protocol)
            async with anyio.create_task_group() as tasks:
                channel = StreamChannel("worker:1", tasks, dial=near.dial)
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
