"""Which KV transport a worker uses."""

import logging
from typing import NamedTuple

from slagate.workers.kv_transfer.nixl.nixl import NixlTransport, self_check
from slagate.workers.kv_transfer.shm import SharedMemoryTransport
from slagate.workers.kv_transfer.transport import KvTransferError, KvTransport, KvUnavailable

log = logging.getLogger(__name__)

TRANSPORTS = ("auto", "nixl", "shm")

N_SLOTS = 16_384
"""A hundred parked prompts of 5,000 tokens in blocks of 32: 64 MiB where those have 4 KiB each.

Slots that are never used cost no memory.
"""


class OpenedTransport(NamedTuple):
    """A transport, and why it is not NIXL, or ""."""

    transport: KvTransport | None
    why_not_nixl: str


def open_transport(
    wanted: str,
    *,
    worker_name: str,
    loopback: bool,
    block_bytes: int,
    pull_limit_s: float,
    n_slots: int = N_SLOTS,
) -> OpenedTransport:
    """Open one of `TRANSPORTS`; "auto" is NIXL where it works, else shared memory.

    `loopback` keeps NIXL off every other network device. `block_bytes` is the largest block to move.
    Raises `KvUnavailable`: for "nixl" when NIXL does not work, and when nothing does.
    """
    if wanted == "shm":
        return OpenedTransport(SharedMemoryTransport(), "shared memory was asked for")
    try:
        nixl = NixlTransport(
            worker_name,
            n_slots=n_slots,
            block_bytes=block_bytes,
            loopback=loopback,
            pull_limit_s=pull_limit_s,
        )
        try:
            self_check(nixl, loopback=loopback)
        except KvTransferError as error:
            nixl.close()
            raise KvUnavailable(str(error)) from error
    except KvUnavailable as error:
        if wanted == "nixl":
            raise
        log.warning("kv_transfer.not_nixl %s", error)
        return OpenedTransport(SharedMemoryTransport(), str(error))
    return OpenedTransport(nixl, "")
