"""The receipts of a gateway of several processes, as one stream."""

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import anyio
import grpc.aio

from slagate.proto import gateway_pb2 as gw
from slagate.router.supervisor import Child, Supervisor

LOOK_AGAIN_S = 0.5
"""For the process that takes the place of one that has ended."""

Write = Callable[[gw.WatchReceiptsResponse], Awaitable[None]]


async def watch_all(supervisor: Supervisor, request: gw.WatchReceiptsRequest, write: Write) -> None:
    """Write what `WatchReceipts` of each process gives.

    Kept receipts come in the order in which their requests ended. A follower goes on with the process that
    takes the place of one that has ended, and the receipts which that one had not sent are lost.
    """
    children = list(supervisor.running.values())
    out = _Out(write)
    followers = [_Follower(supervisor, out, child) for child in children if request.follow]
    try:
        # Before the kept ones are asked for, so that none falls between the two.
        for follower in followers:
            await follower.begin()
        kept: list[tuple[int, gw.WatchReceiptsResponse]] = []
        for child in children:
            kept += [(child.number, each) for each in await _kept(child, request)]
        receipts = [(number, each) for number, each in kept if each.HasField("receipt")]
        receipts.sort(key=lambda each: each[1].receipt.unix_s)
        if request.HasField("limit"):
            receipts = receipts[len(receipts) - min(len(receipts), request.limit) :]
        for _, each in kept:
            if each.HasField("config"):
                await out.write(each)
        for _, each in receipts:
            await out.write(each)
        newest = {number: each.receipt.number for number, each in kept if each.HasField("receipt")}
        async with anyio.create_task_group() as tasks:
            for follower in followers:
                tasks.start_soon(follower.run, newest.get(follower.number, 0))
    finally:
        for follower in followers:
            follower.cancel()


class _Out:
    """One writer at a time, and each configuration once.

    A reader that is too slow keeps the processes from sending: they count what it missed.
    """

    def __init__(self, write: Write) -> None:
        self._write = write
        self._told: set[str] = set()
        self._one_at_a_time = anyio.Lock()

    async def write(self, each: gw.WatchReceiptsResponse) -> None:
        if each.HasField("config"):
            if each.config.version in self._told:
                return
            self._told.add(each.config.version)
        async with self._one_at_a_time:
            await self._write(each)


class _Follower:
    """Passes on what one process sends, and those in its place after it."""

    def __init__(self, supervisor: Supervisor, out: _Out, child: Child) -> None:
        self.number = child.number
        self._supervisor = supervisor
        self._out = out
        self._child = child
        self._call = child.gateway.WatchReceipts(gw.WatchReceiptsRequest(follow=True, limit=0))

    async def begin(self) -> None:
        """Wait until the process has it."""
        head = await _read(self._call)
        if head is not None:
            await self._out.write(head)

    async def run(self, newest: int) -> None:
        """Go on until all processes stop; `newest` is the number of a receipt that was sent already."""
        while True:
            while (each := await _read(self._call)) is not None:
                if each.HasField("config") or each.receipt.number > newest:
                    await self._out.write(each)
            while (child := self._supervisor.running.get(self.number)) in (None, self._child):
                if self._supervisor.stopping.is_set():
                    return
                with anyio.move_on_after(LOOK_AGAIN_S):
                    await self._supervisor.stopping.wait()
            assert child is not None
            self._child = child
            self._call = child.gateway.WatchReceipts(gw.WatchReceiptsRequest(follow=True))

    def cancel(self) -> None:
        """Nobody reads any more."""
        self._call.cancel()


async def _kept(child: Child, request: gw.WatchReceiptsRequest) -> list[gw.WatchReceiptsResponse]:
    asked = gw.WatchReceiptsRequest()
    if request.HasField("limit"):
        asked.limit = request.limit
    call = child.gateway.WatchReceipts(asked)
    found = []
    try:
        while (each := await _read(call)) is not None:
            found.append(each)
    finally:
        call.cancel()
    return found


async def _read(call: Any) -> gw.WatchReceiptsResponse | None:
    """The next one; None: there is none, or the process has ended."""
    with suppress(grpc.aio.AioRpcError):
        each = await call.read()
        return None if each is grpc.aio.EOF else each
    return None
