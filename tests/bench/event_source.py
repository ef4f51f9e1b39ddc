"""The other end of `bench.event_burst`, in processes of its own.

python -m bench.event_source burst N    a worker with N events to tell, and one with none; as JSON their
                                        addresses, then the burst begins with a line on stdin, and there is
                                        one on stdout when all of it is sent
python -m bench.event_source arrivals   200 times a second the monotonic clock in ns, 8 bytes each
"""

import json
import os
import random
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import grpc

from slagate.pools.kv_events.decode import BatchHeader, read_head
from slagate.workers.kv_events.changes import Block, Change, Removed, Stored
from slagate.workers.kv_events.feed import HEARTBEAT_S
from slagate.workers.kv_events.log import RankLog
from slagate.workers.kv_events.wire import CLEARED_EVENT, response, token_field
from slagate.workers.worker import SUBSCRIBE_KV_EVENTS

BLOCK_TOKENS = 32
N_STREAMS = 32
CAPACITY_BLOCKS = 20_000
STREAM_BLOCKS = 150
POLL_EVENTS = 256
"""Of one poll of a busy engine, and so of one batch."""

ARRIVALS_PER_S = 200
MAX_CALLS = 80


class Engine:
    """A full cache of interleaved decode streams: each block that one adds evicts another's last."""

    def __init__(self) -> None:
        self._rng = random.Random(1)
        self._streams: list[list[int]] = [[] for _ in range(N_STREAMS)]
        self._finished: deque[list[int]] = deque()  # the one that ended longest ago first
        self._n_cached = 0

    def changes(self) -> Iterator[Change]:
        """For ever."""
        while True:
            for at, stream in enumerate(self._streams):
                if self._n_cached == CAPACITY_BLOCKS:
                    yield Removed(0, (self._evict(),))
                parent = stream[-1] if stream else None
                stream.append(self._rng.getrandbits(64))
                ids = self._rng.choices(range(128_000), k=BLOCK_TOKENS)
                block = Block(stream[-1], token_field(ids), ())
                self._n_cached += 1
                yield Stored(0, parent, (block,), 0, "", "")
                if len(stream) == STREAM_BLOCKS:
                    self._finished.append(stream)
                    self._streams[at] = []

    def _evict(self) -> int:
        self._n_cached -= 1
        oldest = self._finished[0]
        if len(oldest) == 1:
            self._finished.popleft()
        return oldest.pop()


def payloads(n_events: int) -> tuple[list[bytes], list[bytes]]:
    """Of the batches that fill the cache, and of those of so many events more, one block each."""
    # Encoded beforehand: a worker cannot do that as fast as they are sent here.
    log = RankLog(0, block_tokens=BLOCK_TOKENS, history_batches=1 << 40, history_bytes=1 << 50)
    changes = Engine().changes()
    parts: list[list[bytes]] = []
    for n_left in (CAPACITY_BLOCKS, n_events):
        first = log.newest + 1
        while n_left:
            n_polled = min(n_left, POLL_EVENTS)
            log.apply([next(changes) for _ in range(n_polled)], 0)
            n_left -= n_polled
        parts.append([_payload(log.batch(at)) for at in range(first, log.newest + 1)])
    return parts[0], parts[1]


def _payload(message: bytes) -> bytes:
    """The events of a message, less what the log put around them."""
    head = read_head(message)
    assert isinstance(head, BatchHeader)
    return message[head.events_at :]


def _serve(told: Any) -> str:
    """A worker that tells all its subscribers this; its address."""
    server = grpc.server(ThreadPoolExecutor(MAX_CALLS), options=[("grpc.so_reuseport", 0)])
    _, service, method = SUBSCRIBE_KV_EVENTS.split("/")
    handler = grpc.unary_stream_rpc_method_handler(told)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {method: handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    _SERVERS.append(server)
    return f"127.0.0.1:{port}"


_SERVERS: list[grpc.Server] = []  # a server ends with its last reference


def _nothing(_request: bytes, _context: Any) -> Iterator[bytes]:
    """Heartbeats."""
    yield response(CLEARED_EVENT, number=0, unix_nanos=time.time_ns(), rank=0)
    number = 1
    while True:
        time.sleep(HEARTBEAT_S)
        yield response(b"", number=number, unix_nanos=time.time_ns(), rank=0)
        number += 1


def _burst(
    _request: bytes,
    _context: Any,
    *,
    parts: tuple[list[bytes], list[bytes]],
    begin: threading.Event,
) -> Iterator[bytes]:
    """What is cached, and when told so the rest as fast as it is taken."""
    filling, burst = parts
    number = 0
    for payload in [CLEARED_EVENT, *filling]:
        yield response(payload, number=number, unix_nanos=time.time_ns(), rank=0)
        number += 1
    while not begin.wait(HEARTBEAT_S):
        yield response(b"", number=number, unix_nanos=time.time_ns(), rank=0)
        number += 1
    for payload in burst:
        yield response(payload, number=number, unix_nanos=time.time_ns(), rank=0)
        number += 1
    print("sent", flush=True)
    while True:
        time.sleep(HEARTBEAT_S)
        yield response(b"", number=number, unix_nanos=time.time_ns(), rank=0)
        number += 1


def _arrivals() -> None:
    due_s = time.monotonic()
    while True:
        due_s += 1 / ARRIVALS_PER_S
        time.sleep(max(0.0, due_s - time.monotonic()))
        os.write(1, time.monotonic_ns().to_bytes(8, "little"))


def _main() -> None:
    if sys.argv[1] == "arrivals":
        _arrivals()
    begin = threading.Event()
    parts = payloads(int(sys.argv[2]))
    addresses = {
        "burst": _serve(partial(_burst, parts=parts, begin=begin)),
        "quiet": _serve(_nothing),
        "n_bytes": sum(map(len, parts[1])),
        "n_batches": len(parts[1]),
    }
    print(json.dumps(addresses), flush=True)
    sys.stdin.readline()
    begin.set()
    sys.stdin.read()
    # Streams that wait would keep the process.
    os._exit(0)


if __name__ == "__main__":
    _main()
