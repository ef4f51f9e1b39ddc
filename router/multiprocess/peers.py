"""The other processes of a gateway: what each has in flight is in memory that all of them map.

No request takes a worker that an older one waits for, in whichever process that is: each process shows
since when its oldest request waits for a pool. A process that gives something back wakes the ones with
waiting requests, by a datagram that says no more than to look again. An abort is sent to each by gRPC.
"""

import asyncio
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import grpc.aio
from prometheus_client import values
from typing_extensions import override

from slagate.pools.inflight.shared_counts import GATEWAY, GatewayCell, SharedCounts
from slagate.pools.inflight.shared_table import SharedTable
from slagate.pools.inflight.table import LoadTable
from slagate.proto import process_pb2 as ps
from slagate.proto import process_pb2_grpc as ps_grpc
from slagate.router.multiprocess.child import METRICS_FOLDER, ProcessSlot
from slagate.router.scheduling.peers import PeerGateways

BEAT_S = 0.25
STALE_S = 1.5
"""A process with waiting requests shows every `BEAT_S` that it is alive. If it has not for `STALE_S`, the
others do not wait for it."""

ABORT_LIMIT_S = 1.0


class PeerProcesses(PeerGateways):
    """The other processes of this gateway, as the shared memory of `counts` shows them."""

    def __init__(
        self,
        counts: SharedCounts,
        *,
        wake: Callable[[int], None],
        now_s: Callable[[], float],
        admin_path: Callable[[int], Path],
    ) -> None:
        """`wake` wakes the process of a number; `admin_path` gives the socket that it answers on."""
        super().__init__()
        assert counts.number is not None, "the parent has no peers"
        self.n_peers = counts.n_processes - 1
        self._number = counts.number
        self._counts = counts
        self._wake = wake
        self._now_s = now_s
        self._admin_path = admin_path
        self._slot = counts.claim_slot(GATEWAY)
        self._n_receipts_before = counts.get(self._slot, GatewayCell.RECEIPTS)
        self._tables: dict[str, SharedTable] = {}
        self._n_waiting = 0
        self._beat: asyncio.TimerHandle | None = None

    @override
    def load_table(self, pool: str) -> LoadTable:
        self._tables = {name: each for name, each in self._tables.items() if not each.is_freed}
        made = self._tables[pool] = SharedTable(pool, self._counts)
        return made

    @property
    @override
    def n_running(self) -> int:
        return sum(n for _, n in self._counts.each_other(self._slot, GatewayCell.RUNNING))

    @property
    @override
    def n_waiting(self) -> int:
        return sum(n for _, n in self._counts.each_other(self._slot, GatewayCell.WAITING))

    @property
    @override
    def n_relegated(self) -> int:
        return sum(n for _, n in self._counts.each_other(self._slot, GatewayCell.RELEGATED))

    @override
    def show_running(self, n_requests: int) -> None:
        self._counts.set(self._slot, GatewayCell.RUNNING, n_requests)

    @override
    def show_waiting(self, n_requests: int, n_last: int, oldest_s: Mapping[str, float]) -> None:
        if not n_requests and not self._n_waiting:
            return
        self._n_waiting = n_requests
        self._counts.set(self._slot, GatewayCell.WAITING, n_requests)
        self._counts.set(self._slot, GatewayCell.RELEGATED, n_last)
        if self._beat is None:
            self._say_alive()
        # A list, as each table is to be told: `any` of a generator would stop early.
        news = [table.set_oldest_s(oldest_s.get(pool, 0.0)) for pool, table in self._tables.items()]
        if any(news):
            self.wake()
            # The others may have given something back before they could know that a request waits here.
            asyncio.get_running_loop().call_soon(self.on_change)

    @override
    def waited_for(self, since_s: float) -> Set[str]:
        alive = self._waiting_alive()
        if not alive:
            return frozenset()
        return {
            pool
            for pool, table in self._tables.items()
            if any(
                number in alive and 0.0 < oldest_s < since_s
                for number, oldest_s in table.oldest_elsewhere()
            )
        }

    @override
    def wake(self) -> None:
        for number, n_waiting in self._counts.each_other(self._slot, GatewayCell.WAITING):
            if n_waiting:
                self._wake(number)

    @override
    async def abort(self, peer: str, request_id: str) -> bool:
        request = ps.AbortInProcessRequest(peer=peer, request_id=request_id)
        found: list[bool] = []

        async def ask(number: int) -> None:
            async with grpc.aio.insecure_channel(f"unix:{self._admin_path(number)}") as channel:
                stub: Any = ps_grpc.ProcessStub(channel)
                # A process that does not answer has no requests, or not for long.
                with suppress(grpc.aio.AioRpcError):
                    answer = await stub.Abort(request, timeout=ABORT_LIMIT_S)
                    found.append(answer.found)

        async with anyio.create_task_group() as tasks:
            for number in range(self._counts.n_processes):
                if number != self._number:
                    tasks.start_soon(ask, number)
        return any(found)

    @override
    def receipt_number(self, place: int) -> int:
        """A number of this process alone: with N processes each has every N-th, also after a crash."""
        place += self._n_receipts_before
        self._counts.set(self._slot, GatewayCell.RECEIPTS, place)
        return (place - 1) * self._counts.n_processes + self._number + 1

    def stop_beat(self) -> None:
        """Stop showing that this process is alive: no request waits here any more."""
        if self._beat is not None:
            self._beat.cancel()

    def _waiting_alive(self) -> set[int]:
        """Other processes that are alive; empty where no request waits in any."""
        if not self.n_waiting:
            return set()
        limit_s = self._now_s() - STALE_S
        seen = self._counts.each_other_s(self._slot, GatewayCell.SEEN_S)
        return {number for number, seen_s in seen if seen_s > limit_s}

    def _say_alive(self) -> None:
        self._counts.set_s(self._slot, GatewayCell.SEEN_S, self._now_s())
        self._beat = asyncio.get_running_loop().call_later(BEAT_S, self._say_alive_again)

    def _say_alive_again(self) -> None:
        self._beat = None
        if self._n_waiting:
            self._say_alive()
            self.on_change()


@contextmanager
def joined_peers(
    place: ProcessSlot | None, *, now_s: Callable[[], float]
) -> Iterator[PeerGateways]:
    """Within the `with`, be the process of `place` among its peers, which it yields (None: no peers)."""
    if place is None:
        yield PeerGateways()
        return
    # Counters are in a file that the parent sums up, and that the next process in this place goes on with.
    os.environ[METRICS_FOLDER] = place.folder
    values.ValueClass = values.MultiProcessValue(lambda: place.number)  # type: ignore[no-untyped-call]
    counts = SharedCounts(place.counts, place.number, n_processes=place.n_processes)
    wakes = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    with closing(counts), closing(wakes):
        peers = PeerProcesses(
            counts,
            wake=lambda number: send_wake(wakes, place.path("wake", number=number)),
            now_s=now_s,
            admin_path=lambda number: place.path("admin", number=number),
        )

        def woken() -> None:
            with suppress(BlockingIOError):
                while True:
                    wakes.recv(1)
            peers.on_change()

        path = place.path("wake")
        path.unlink(missing_ok=True)  # left by the process that was in this place
        wakes.settimeout(0)
        wakes.bind(str(path))
        loop = asyncio.get_running_loop()
        loop.add_reader(wakes, woken)
        try:
            yield peers
        finally:
            loop.remove_reader(wakes)
            peers.stop_beat()


def send_wake(sender: socket.socket, path: Path) -> None:
    """Wake the process whose socket is at `path`. Errors are ignored: it is gone, or has wakes to read."""
    with suppress(OSError):
        sender.sendto(b"!", str(path))
