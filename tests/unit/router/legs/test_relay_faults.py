"""The relay where several things come together: in one read, in one turn, on a line that is full."""

import random
import struct
import tracemalloc
from typing import Any

import anyio
import grpc
import pytest

from slagate.pools.grid.grid import Stage
from slagate.proto import openengine_pb2 as oe
from slagate.proto.http2.connection import ConnectionState, H2Connection
from slagate.proto.http2.engine import RequestReceived
from slagate.proto.http2.interfaces import Http2Settings
from slagate.proto.rpc.client_call import ServerStreamCall
from slagate.proto.rpc.frames import framed
from slagate.proto.rpc.sinks import BufferedSink
from slagate.router.legs.relay import Relay, plain_tokens
from slagate.router.receipts.record import StreamStats
from slagate.workers.legs import client_id_suffix
from slagate.workers.runtime.virtual_loop import run
from support.seeds import n_in
from support.worker.bytes_sink import BytesSink


class Paused:
    """A call that notes whether it is to be silent."""

    def __init__(self) -> None:
        self.n_pauses = 0

    def cancel(self) -> None: ...

    def pause(self) -> None:
        self.n_pauses += 1

    def resume(self) -> None:
        self.n_pauses -= 1


def one_token(number: int) -> bytes:
    response = oe.GenerateResponse(request_id="leg-1")
    response.token.output_index = 0
    response.token.tokens.add(token_id=number)
    return response.SerializeToString()


@pytest.mark.parametrize("n_together", [1, 2, 40, 100])
def test_what_came_together_across_the_bound_of_the_buffer_is_passed_on_and_the_worker_waits(
    n_together: int,
) -> None:
    async def main() -> None:
        client, call, stats = BufferedSink(), Paused(), StreamStats()
        relay = Relay(
            Stage.DECODE,
            client,
            leg_id="leg-1",
            client_id="mine",
            stats=stats,
            max_buffer_bytes=1000,
            stuck_s=5.0,
            now_s=lambda: 1.0,
            on_token=lambda: None,
            on_answered=lambda: None,
        )
        relay.started(call)
        messages = [one_token(number) for number in range(100)]
        n_given = 0
        while not call.n_pauses:
            relay.batch(messages[n_given : n_given + n_together])
            n_given += n_together
        assert relay.failure() is None
        assert stats.n_messages == stats.n_tokens == min(n_given, 100)
        relay.detach()

    run(main)


class Nowhere:
    """A pool of connections that has none."""

    def drop(self, call: object) -> None: ...


class Wire:
    """A stream of an HTTP/2 connection that takes everything."""

    unsent_bytes = 0
    n_resets = 0

    def reset(self, _code: int = 0) -> None:
        self.n_resets += 1

    def pause(self) -> None: ...

    def resume(self) -> None: ...


def test_a_call_that_failed_while_it_was_paused_does_not_end_well() -> None:
    async def main() -> None:
        sink, wire = BytesSink(), Wire()
        call = ServerStreamCall((), b"", (), sink, pool=Nowhere(), timeout_s=None, running=set())
        call._stream = wire  # type: ignore[assignment]
        call.headers([(b":status", b"200"), (b"content-type", b"application/grpc")])
        call.pause()
        call.data(framed([b"1"]))
        call.data(struct.pack(">BI", 1, 3) + b"bad")  # compressed, in a stream without an encoding
        assert wire.n_resets == 1
        call.data(framed([b"2"]))
        call.trailers([(b"grpc-status", b"0")])
        call.ended()
        call.resume()
        await anyio.sleep(0.01)
        assert sink.messages == [b"1"]
        assert sink.code is grpc.StatusCode.INTERNAL

    run(main)


@pytest.mark.parametrize("is_paused", [False, True])
def test_messages_in_front_of_one_that_cannot_be_read_come_before_the_error(
    *, is_paused: bool
) -> None:
    """In one read, from a worker that then breaks off."""

    async def main() -> None:
        sink, wire = BytesSink(), Wire()
        call = ServerStreamCall((), b"", (), sink, pool=Nowhere(), timeout_s=None, running=set())
        call._stream = wire  # type: ignore[assignment]
        call.headers([(b":status", b"200"), (b"content-type", b"application/grpc")])
        if is_paused:
            call.pause()
        call.data(framed([b"1", b"2"]) + struct.pack(">BI", 1, 3) + b"bad")
        assert wire.n_resets >= 1
        if is_paused:
            assert sink.status is None
            call.resume()
            await anyio.sleep(0.01)
        assert sink.messages == [b"1", b"2"]
        assert sink.code is grpc.StatusCode.INTERNAL

    run(main)


def test_a_call_that_is_answered_before_all_of_it_was_sent_gives_its_place_back() -> None:
    async def main() -> None:
        sink, wire = BytesSink(), Wire()
        wire.unsent_bytes = 5
        call = ServerStreamCall((), b"", (), sink, pool=Nowhere(), timeout_s=None, running=set())
        call._stream = wire  # type: ignore[assignment]
        call.headers([(b":status", b"200"), (b"content-type", b"application/grpc")])
        call.trailers([(b"grpc-status", b"8")])
        call.ended()
        assert sink.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert wire.n_resets == 1

    run(main)


def test_a_stream_is_reset_behind_its_last_words_and_not_while_they_cannot_be_written() -> None:
    async def main() -> None:
        owner: Any = None
        connection = H2Connection(owner, Http2Settings())
        transport: Any = Taking()
        connection._transport = transport
        resets: list[int] = []
        connection.engine = Idle(resets)  # type: ignore[assignment]
        stream = connection._opened(1, None)
        connection._is_blocked = True
        stream.reset_behind(0)
        connection._flush()
        assert resets == []
        connection._is_blocked = False
        connection._flush()
        assert resets == [1]
        connection._keepalive.stop()

    run(main)


class Taking:
    """A transport that takes everything."""

    def write(self, data: bytes) -> None: ...


class Idle:
    """An engine that has nothing to send."""

    def __init__(self, resets: list[int]) -> None:
        self._resets = resets

    def data_to_send(self, _: int) -> bytes:
        return b""

    def events(self) -> list[Any]:
        return []

    def reset_stream(self, stream_id: int, _code: int) -> None:
        self._resets.append(stream_id)


def test_what_comes_behind_the_end_of_a_connection_is_for_nobody() -> None:
    def accept(*_: object) -> Any:
        raise AssertionError("a request on a connection that is over")

    async def main() -> None:
        owner: Any = None
        connection = H2Connection(owner, Http2Settings(), accept=accept)
        request = RequestReceived(1, ((b":method", b"POST"),), end_stream=False)
        with pytest.raises(AssertionError):
            connection._take([request])
        connection.state = ConnectionState.LOST
        connection._take([request])
        connection._keepalive.stop()

    run(main)


HEAD = client_id_suffix("leg-1")


def odd(rng: random.Random) -> bytes:
    """A response as some writer of protobuf may have put it, not always well."""
    response = oe.GenerateResponse()
    token = response.token
    if rng.random() < 0.7:
        token.output_index = rng.choice([0, 1, 200])
    for _ in range(rng.choice([0, 1, 1, 1, 2, 3])):
        info = token.tokens.add(token_id=rng.choice([0, 5, 127, 128, 40_000, 2**32 - 1]))
        if rng.random() < 0.2:
            info.token = rng.choice(["a", "é", ""])
        if rng.random() < 0.1:
            info.logprob = -1.5
    if rng.random() < 0.3:
        token.text = rng.choice(["hello", "né", "x" * 100])
    data = response.SerializeToString()
    if rng.random() < 0.2:
        data += oe.GenerateResponse(usage=oe.Usage(cached_prompt_tokens=3)).SerializeToString()
    if rng.random() < 0.2:
        data += oe.GenerateResponse(
            finished=oe.GenerationFinished(output_index=0)
        ).SerializeToString()
    if rng.random() < 0.2:
        data += data
    if rng.random() < 0.3:
        at = rng.randrange(len(data) + 1)
        data = data[:at] + bytes([rng.randrange(256)]) + data[at + rng.randrange(2) :]
    return data


@pytest.mark.parametrize("seed", range(n_in(gate=1, long=20)))
def test_what_is_told_from_bytes_alone_is_what_the_parser_says(seed: int) -> None:
    rng = random.Random(seed)
    n_plain = 0
    for _ in range(20_000):
        data = odd(rng)
        n_tokens = plain_tokens(HEAD + data, len(HEAD))
        if n_tokens < 0:
            continue
        n_plain += 1
        response = oe.GenerateResponse.FromString(HEAD + data)
        assert response.WhichOneof("event") == "token", (seed, data)
        assert len(response.token.tokens) == n_tokens, (seed, data)
        assert not response.HasField("usage"), (seed, data)
        assert response.request_id == "leg-1", (seed, data)
    assert n_plain > 1000, seed


def test_mem_a_large_message_that_begins_like_a_token_is_not_looked_through() -> None:
    data = HEAD + b"\x1a\x7f" + b"\x12\x02\x08\x01" * 200_000
    tracemalloc.start()
    try:
        assert plain_tokens(data, len(HEAD)) == -1
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most_bytes < 100_000


def test_a_plain_token_is_told_from_its_bytes() -> None:
    message = one_token(40_000)
    assert plain_tokens(message, len(HEAD)) == 1
