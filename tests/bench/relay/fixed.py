"""The relay with a fixed choice: our front, channel and relay, and nothing between them.

python -m bench.relay.fixed WORKER...    each HOST:PORT, taken in turn; prints its own port

A request is parsed and checked once, as in the gateway, goes to the next worker with an id of ours, and
its answer is relayed to the client. No policy, no leases, no receipts, no metrics, no log.
"""

import gc
import itertools
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing

import anyio
import uvloop

from slagate.pools.grid.grid import Stage
from slagate.proto.http2.interfaces import Http2Settings
from slagate.proto.rpc.address import Address
from slagate.proto.rpc.connection_pool import ConnectionPool, dial_unix
from slagate.proto.rpc.status import OK
from slagate.router.app import YOUNG_OBJECTS
from slagate.router.front.client_stream import Serve
from slagate.router.front.server import serve_front
from slagate.router.legs.relay import Relay
from slagate.router.receipts.record import StreamStats
from slagate.router.request.call import ClientCall
from slagate.router.request.errors import GatewayError
from slagate.router.request.request import parse_request
from slagate.router.request.settings import Settings
from slagate.workers.client.client import WorkerClient
from slagate.workers.legs import agg_leg
from slagate.workers.runtime.clock import monotonic_s
from slagate.workers.runtime.listen import listen_on


class FixedChoice:
    """In the place of the gateway: what a front needs to serve a call."""

    def __init__(self, channels: list[WorkerClient]) -> None:
        self._channels = itertools.cycle(channels)
        self._numbers: Iterator[int] = itertools.count()
        self.settings = Settings()

    async def serve(self, call: ClientCall) -> None:
        """One request from its arrival to its end, or until its client leaves."""
        call.running.start()
        try:
            await self._serve(call)
        finally:
            call.running.finish()

    async def _serve(self, call: ClientCall) -> None:
        try:
            if call.refusal is not None:
                raise call.refusal
            request = parse_request(call.data, max_bytes=self.settings.max_request_bytes)
        except GatewayError as error:
            call.out.finish(error.status())
            return
        # As long as the gateway's own.
        leg_id = f"0123456789abcdef-{next(self._numbers)}"
        relay = Relay(
            Stage.AGG,
            call.out,
            leg_id=leg_id,
            client_id=request.id,
            stats=StreamStats(),
            max_buffer_bytes=self.settings.max_buffer_bytes,
            stuck_s=self.settings.stuck_s,
            now_s=monotonic_s,
            on_token=_nothing,
            on_answered=call.running.answered,
        )
        leg = next(self._channels).generate(
            agg_leg(request.data, leg_id, max_tokens=None),
            (),
            relay,
            timeout_s=self.settings.default_timeout_s,
        )
        try:
            await relay.ended(60.0)
        finally:
            leg.cancel()
        failure = relay.failure()
        call.out.finish(OK if failure is None else failure.status())


def _nothing() -> None:
    pass


@asynccontextmanager
async def channels_to(workers: list[str]) -> AsyncIterator[list[WorkerClient]]:
    """A channel to each, for the time of the block."""
    async with anyio.create_task_group() as connecting:
        channels = [WorkerClient(worker, connecting) for worker in workers]
        try:
            yield channels
        finally:
            for channel in channels:
                channel.close()
            connecting.cancel_scope.cancel()


@asynccontextmanager
async def fronted(serving: Serve) -> AsyncIterator[None]:
    """A front for clients that has nothing behind it but Generate; prints its port when it serves."""
    async with anyio.create_task_group() as connecting:
        nobody = ConnectionPool("", connecting, settings=Http2Settings(), dial=dial_unix)
        with closing(listen_on(Address("127.0.0.1", 0))) as listening:
            async with serve_front(serving, listening, nobody, Settings()):
                # As the gateway does once it serves.
                gc.collect()
                gc.freeze()
                gc.set_threshold(YOUNG_OBJECTS)
                print(listening.getsockname()[1], flush=True)
                yield


async def main(workers: list[str]) -> None:
    """Relay until the process is ended."""
    async with channels_to(workers) as channels, fronted(FixedChoice(channels).serve):
        await anyio.sleep_forever()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1:]))
