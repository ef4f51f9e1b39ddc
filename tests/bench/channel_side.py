"""The processes of `bench.channel`.

python -m bench.channel_side serve N PACE_S
    a worker: to each request N messages of 40 bytes, one each PACE_S; its port on stdout
python -m bench.channel_side ours|aio PORT N_CALLS N_OPEN
    the gateway's side, by our channel or by grpc.aio's: CPU seconds and messages, as JSON
"""

import asyncio
import gc
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import anyio
import grpc
import grpc.aio
import uvloop

from slagate.proto.rpc.status import OK, Status
from slagate.workers.client.client import WorkerClient
from slagate.workers.worker import GENERATE
from support.http2.peer import PeerServer, PeerStream

REQUEST = bytes(2000)
MESSAGE = bytes(40)


async def serve(n_messages: int, pace_s: float) -> None:
    """Answer for ever."""
    loop = asyncio.get_running_loop()

    def answer(stream: PeerStream) -> None:
        stream.answer()
        step(stream, n_messages)

    def step(stream: PeerStream, n_left: int) -> None:
        if not n_left:
            stream.finish()
            return
        stream.say(MESSAGE)
        loop.call_later(pace_s, step, stream, n_left - 1)

    server = PeerServer(answer)
    listening = await loop.create_server(server.protocol, "127.0.0.1", 0)
    print(listening.sockets[0].getsockname()[1], flush=True)
    await anyio.sleep_forever()


class _Counter:
    """A sink that counts."""

    def __init__(self, on_end: Callable[[int], None]) -> None:
        self._n_messages = 0
        self._on_end = on_end

    def message(self, _data: bytes, /) -> None:
        self._n_messages += 1

    def finish(self, status: Status, /) -> None:
        assert status == OK, status
        self._on_end(self._n_messages)


async def call(kind: str, port: str, n_calls: int, n_open: int) -> None:
    """`n_calls` requests, `n_open` of them at a time."""
    address = f"127.0.0.1:{port}"
    ended = anyio.Event()
    n_started = n_ended = n_messages = 0

    def on_end(n_more: int) -> None:
        nonlocal n_ended, n_messages
        n_ended += 1
        n_messages += n_more
        if n_started < n_calls:
            begin()
        elif n_ended == n_calls:
            ended.set()

    async with anyio.create_task_group() as tasks, grpc.aio.insecure_channel(address) as aio:
        ours = WorkerClient(address, tasks)
        method: Any = aio.unary_stream(GENERATE)

        async def read(sink: _Counter) -> None:
            rpc = method(REQUEST, timeout=60)
            while (data := await rpc.read()) is not grpc.aio.EOF:
                sink.message(data)
            assert await rpc.code() is grpc.StatusCode.OK
            sink.finish(OK)

        def begin() -> None:
            nonlocal n_started
            n_started += 1
            sink = _Counter(on_end)
            if kind == "ours":
                ours.generate(REQUEST, (), sink, timeout_s=60)
            else:
                tasks.start_soon(read, sink)

        gc.collect()
        gc.freeze()
        before_s = time.process_time()
        for _ in range(n_open):
            begin()
        await ended.wait()
        print(json.dumps({"cpu_s": time.process_time() - before_s, "messages": n_messages}))
        ours.close()


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        uvloop.run(serve(int(sys.argv[2]), float(sys.argv[3])))
    else:
        uvloop.run(call(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
