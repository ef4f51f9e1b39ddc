"""A relay on grpc.aio with a fixed choice: how the gateway carried Generate before it had a relay.

python -m bench.relay.aio_reference WORKER...    prints its port

As little as such a relay can do: serialised messages in and out, the request parsed once, an id of ours
appended to it and the client's to each message. The gateway's own had its sinks, buffers and watchers on
top, so it took more than this.
"""

import gc
import itertools
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import uvloop

from slagate.proto import openengine_pb2 as oe
from slagate.router.request.request import parse_request
from slagate.router.request.settings import Settings
from slagate.workers.client.control import CHANNEL_OPTIONS
from slagate.workers.legs import agg_leg, client_id_suffix
from slagate.workers.server import SERVER_OPTIONS
from slagate.workers.worker import GENERATE


async def main(workers: list[str]) -> None:
    """Relay until the process is ended."""
    channels = [grpc.aio.insecure_channel(worker, options=CHANNEL_OPTIONS) for worker in workers]
    methods: Any = itertools.cycle([channel.unary_stream(GENERATE) for channel in channels])
    numbers = itertools.count()
    settings = Settings()

    async def generate(data: bytes, _context: Any) -> AsyncIterator[bytes]:
        request = parse_request(data, max_bytes=settings.max_request_bytes)
        leg_id = f"0123456789abcdef-{next(numbers)}"
        leg = next(methods)(agg_leg(data, leg_id, max_tokens=None), timeout=60)
        suffix = client_id_suffix(request.id)
        async for message in leg:
            response = oe.GenerateResponse.FromString(message)
            assert response.request_id == leg_id
            yield message + suffix

    handler: Any = grpc.unary_stream_rpc_method_handler(generate)
    server = grpc.aio.server(options=SERVER_OPTIONS)
    service, method = GENERATE.strip("/").split("/")
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {method: handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    gc.collect()
    gc.freeze()
    print(port, flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1:]))
