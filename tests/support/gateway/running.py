"""A request that is listed as running, in the way in which `generate` has it."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from slagate.router.request.running import CancelHandle, RunningRequests


@contextmanager
def listed(live: RunningRequests, peer: str, request_id: str) -> Iterator[None]:
    """For the time of the block. Raises the error that it was ended by."""
    one = CancelHandle()
    one.start()
    live.register(peer, request_id, one)
    try:
        yield
    except asyncio.CancelledError:
        ended_by = one.absorb()
        if ended_by is None:
            raise
        raise ended_by from None
    finally:
        one.finish()
        live.unregister(peer, request_id, one)
