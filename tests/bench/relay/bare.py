"""The least that relays Generate over `ngh2` in Python: the floor under ours.

python -m bench.relay.bare WORKER...    each HOST:PORT, taken in turn; prints its own port

The request is parsed, and each message gets the client's id. No limits, no deadlines, no back-pressure, no
errors, no counts, no task for a request: what a relay costs above this is what it does besides.
"""

import asyncio
import gc
import itertools
import sys
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import uvloop
from ngh2 import (
    Configuration,
    Connection,
    DataReceived,
    RequestReceived,
    ResponseReceived,
    Role,
    Setting,
    StreamClosed,
    TrailersReceived,
)

from slagate.proto import openengine_pb2 as oe
from slagate.proto.rpc.frames import PREFIX_BYTES, framed, prefix
from slagate.router.app import YOUNG_OBJECTS
from slagate.workers.legs import client_id_suffix

REQUEST = [
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/openengine.v1.Inference/Generate"),
    (b":authority", b"worker"),
    (b"te", b"trailers"),
    (b"content-type", b"application/grpc"),
    (b"grpc-timeout", b"60S"),
]
ANSWER = [(b":status", b"200"), (b"content-type", b"application/grpc")]


class End(asyncio.Protocol):
    """One connection, of a client or to a worker. Writes what a read has led to at the end of it."""

    def __init__(self, role: Role, bare: "Bare") -> None:
        self.engine = Connection(role, Configuration())
        self.streams: dict[int, Any] = {}
        self._bare = bare
        self._is_server = role is Role.SERVER

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """As `asyncio.Protocol`."""
        self._transport = cast("asyncio.Transport", transport)
        self.engine.initiate_connection({Setting.INITIAL_WINDOW_SIZE: 1 << 20})
        self.engine.set_local_window_size(16 << 20)
        self.flush()

    def data_received(self, data: bytes) -> None:
        """As `asyncio.Protocol`."""
        self.engine.receive_data(data)
        for event in self.engine.events():
            if self._is_server:
                self._from_client(event)
            else:
                self._from_worker(event)
        written, self._bare.written = self._bare.written, {self: None}
        for end in written:
            end.flush()

    def flush(self) -> None:
        """Write what there is."""
        data = self.engine.data_to_send()
        if data:
            self._transport.write(data)
        for event in self.engine.events():
            if type(event) is StreamClosed:
                self.streams.pop(event.stream_id, None)

    def _from_client(self, event: Any) -> None:
        kind = type(event)
        if kind is RequestReceived:
            self.streams[event.stream_id] = []
        elif kind is DataReceived:
            parts = self.streams[event.stream_id]
            parts.append(event.data)
            if event.end_stream:
                self._bare.forward(b"".join(parts), self, event.stream_id)
        elif kind is StreamClosed:
            self.streams.pop(event.stream_id, None)

    def _from_worker(self, event: Any) -> None:
        kind = type(event)
        if kind is DataReceived:
            client, stream_id, suffix = self.streams[event.stream_id]
            found = [message + suffix for message in _messages(event.data)]
            client.engine.send_data(stream_id, framed(found))
        elif kind is ResponseReceived:
            client, stream_id, _ = self.streams[event.stream_id]
            client.engine.send_response(stream_id, ANSWER)
        elif kind is TrailersReceived:
            client, stream_id, _ = self.streams.pop(event.stream_id)
            client.engine.send_trailers(stream_id, event.headers)
        else:
            return
        self._bare.written[client] = None


class Bare:
    """What the connections share: the workers, and who has something to write."""

    def __init__(self) -> None:
        self.workers: Iterator[End] = iter(())
        self.written: dict[End, None] = {}
        self._numbers = itertools.count()

    def forward(self, body: bytes, client: End, stream_id: int) -> None:
        """A request to the next worker."""
        message = oe.GenerateRequest.FromString(body[PREFIX_BYTES:])
        np.asarray(message.token_ids.ids, np.uint32).tobytes()
        # As long as the gateway's own.
        leg_id = f"0123456789abcdef-{next(self._numbers)}"
        leg = body[PREFIX_BYTES:] + client_id_suffix(leg_id)
        worker = next(self.workers)
        leg_stream = worker.engine.send_request(REQUEST)
        worker.engine.send_data(leg_stream, prefix(leg) + leg, end_stream=True)
        worker.streams[leg_stream] = client, stream_id, client_id_suffix(message.request_id)
        self.written[worker] = None


def _messages(data: bytes) -> Iterator[bytes]:
    """The backends' frames hold whole messages."""
    at = 0
    while at < len(data):
        end = at + PREFIX_BYTES + int.from_bytes(data[at + 1 : at + PREFIX_BYTES], "big")
        yield data[at + PREFIX_BYTES : end]
        at = end


async def main(workers: list[str]) -> None:
    """Relay until the process is ended."""
    loop = asyncio.get_running_loop()
    bare = Bare()
    ends = []
    for worker in workers:
        host, _, port = worker.rpartition(":")
        _, end = await loop.create_connection(lambda: End(Role.CLIENT, bare), host, int(port))
        ends.append(end)
    bare.workers = itertools.cycle(ends)
    server = await loop.create_server(lambda: End(Role.SERVER, bare), "127.0.0.1", 0)
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1:]))
