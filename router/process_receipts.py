"""The receipts of a gateway of several processes, as one stream."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import grpc.aio
from anyio.abc import ObjectReceiveStream, ObjectSendStream
from anyio.lowlevel import checkpoint

from slagate.proto import gateway_pb2 as gw
from slagate.router.supervisor import Child, Supervisor

LOOK_AGAIN_S = 0.5
"""For the process that takes the place of one that has ended."""


@asynccontextmanager
async def watch_all(
    supervisor: Supervisor, request: gw.WatchReceiptsRequest
) -> AsyncIterator[AsyncIterator[gw.WatchReceiptsResponse]]:
    """What `WatchReceipts` of each process gives, for the time of the block.

    Kept receipts come in the order in which their requests ended. A follower goes on with the process that
    takes the place of one that has ended, and the receipts which that one had not sent are lost.
    """
    # No room: a reader that is too slow keeps the processes from sending, and they count what it missed.
    send, receive = anyio.create_memory_object_stream[gw.WatchReceiptsResponse](0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_send_all, supervisor, request, send)
        async with receive:
            yield _each_config_once(receive)
        tasks.cancel_scope.cancel()


async def _each_config_once(
    receive: ObjectReceiveStream[gw.WatchReceiptsResponse],
) -> AsyncIterator[gw.WatchReceiptsResponse]:
    told: set[str] = set()
    async for each in receive:
        if each.HasField("config"):
            if each.config.version in told:
                continue
            told.add(each.config.version)
        yield each


async def _send_all(
    supervisor: Supervisor,
    request: gw.WatchReceiptsRequest,
    send: ObjectSendStream[gw.WatchReceiptsResponse],
) -> None:
    children = list(supervisor.running.values())
    # Before the kept ones are asked for, so that none falls between the two.
    live = {
        child.number: child.gateway.WatchReceipts(gw.WatchReceiptsRequest(follow=True, limit=0))
        for child in children
        if request.follow
    }
    heads: list[gw.WatchReceiptsResponse] = []
    kept: list[gw.WatchReceiptsResponse] = []
    newest: dict[int, int] = {}
    for number, call in live.items():
        head = await _read(call)
        if head is not None:
            heads.append(head)
        newest[number] = 0
    for child in children:
        asked = gw.WatchReceiptsRequest()
        if request.HasField("limit"):
            asked.limit = request.limit
        call = child.gateway.WatchReceipts(asked)
        while (each := await _read(call)) is not None:
            if each.HasField("config"):
                heads.append(each)
            else:
                kept.append(each)
                newest[child.number] = each.receipt.number
    kept.sort(key=lambda each: each.receipt.unix_s)
    if request.HasField("limit"):
        kept = kept[len(kept) - min(len(kept), request.limit) :]
    async with send, anyio.create_task_group() as tasks:
        for each in [*heads, *kept]:
            await send.send(each)
        if request.follow:
            for child in children:
                follower = _Follower(supervisor, send, child.number, newest[child.number])
                tasks.start_soon(follower.run, child, live[child.number])


class _Follower:
    """Passes on what one process sends, and those in its place after it."""

    def __init__(
        self,
        supervisor: Supervisor,
        send: ObjectSendStream[gw.WatchReceiptsResponse],
        number: int,
        newest: int,
    ) -> None:
        self._supervisor = supervisor
        self._send = send
        self._number = number
        self._newest = newest  # number of the newest receipt that was sent

    async def run(self, child: Child, call: Any) -> None:
        while True:
            while (each := await _read(call)) is not None:
                if each.HasField("config") or each.receipt.number > self._newest:
                    self._newest = max(self._newest, each.receipt.number)
                    await self._send.send(each)
            before = child
            while (found := self._supervisor.running.get(self._number)) in (None, before):
                if self._supervisor.stopping.is_set():
                    return
                with anyio.move_on_after(LOOK_AGAIN_S):
                    await self._supervisor.stopping.wait()
            assert found is not None
            child = found
            call = child.gateway.WatchReceipts(gw.WatchReceiptsRequest(follow=True))


async def _read(call: Any) -> gw.WatchReceiptsResponse | None:
    """The next one; None: there is none, or the process has ended."""
    await checkpoint()
    try:
        each = await call.read()
    except grpc.aio.AioRpcError:
        return None
    return None if each is grpc.aio.EOF else each
