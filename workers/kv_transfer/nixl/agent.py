"""A NIXL agent, its peers, and the thread that makes every call of the agent."""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from slagate.workers.kv_transfer.nixl.descriptor import (
    TAG_BYTES,
    Ack,
    NixlDescriptor,
    Slots,
    unpack_ack,
)
from slagate.workers.kv_transfer.nixl.slots import SlotPool
from slagate.workers.kv_transfer.nixl.ucx import Nixl, error_text, load_nixl, make_agent
from slagate.workers.kv_transfer.transport import (
    Blocks,
    KvBadDescriptor,
    KvPeerGone,
    KvTransferError,
    KvUnavailable,
)

log = logging.getLogger(__name__)

# How long the thread rests between polls. A pull on one host takes 0.5 ms, so the first polls follow each
# other closely; the end of a pull that was abandoned is not urgent.
PULL_POLL_MIN_S = 0.0001
PULL_POLL_MAX_S = 0.005
OFFER_POLL_S = 0.02
UNAIDED_POLL_S = 0.001
ABANDONED_POLL_S = 0.1

# UCX aborts the process if it ends right after a failed transfer, so it gets some time to clean up.
N_LEAVE_POLLS = 10
LEAVE_POLL_S = 0.005

Settled = Callable[[Blocks | KvTransferError], None]

MAX_PEERS = 64
"""Connections that are kept: more than the number of workers that one pulls from at a time."""


class PoisonedMetadata(KvBadDescriptor):
    """Damaged metadata, after which NIXL refuses its peer's name as long as the agent lives."""


@dataclass(slots=True)
class Peer:
    """An agent to read from, and the number of reads that use it now."""

    name: str
    metadata_hash: bytes
    n_reads: int = 0
    gone: bool = False


class Peers:
    """The agents that an agent is connected to; used on its thread. Processes never share a name."""

    def __init__(self, nixl: Nixl, agent: Any, own_name: str) -> None:
        self._nixl = nixl
        self._agent = agent
        self._own_name = own_name
        self._peers: dict[str, Peer] = {}  # by name, in order of last use

    def __len__(self) -> int:
        return len(self._peers)

    def find_peer(self, wanted: NixlDescriptor) -> Peer:
        """The peer that a descriptor names, which is connected to the first time.

        Raises `KvPeerGone`, `KvBadDescriptor` or `PoisonedMetadata`.
        """
        metadata_hash = blake2b(wanted.metadata, digest_size=16).digest()
        peer = self._peers.pop(wanted.agent, None)
        if peer is None:
            if wanted.agent != self._own_name:  # An agent can read its own memory.
                self._connect(wanted)
            peer = Peer(wanted.agent, metadata_hash)
        self._peers[peer.name] = peer
        self._forget_oldest()
        if peer.metadata_hash != metadata_hash:
            raise KvBadDescriptor(f"the metadata is not what {peer.name} has sent before")
        if peer.gone:
            raise KvPeerGone(f"{peer.name} has dropped the connection")
        return peer

    def read_ended(self, peer: Peer) -> None:
        """Count one read less; a peer that is gone is forgotten after its last one."""
        peer.n_reads -= 1
        if peer.gone and not peer.n_reads:
            self._drop(peer)

    def disconnect_all(self) -> None:
        """Disconnect from every peer."""
        for peer in list(self._peers.values()):
            self._drop(peer)

    def _connect(self, wanted: NixlDescriptor) -> None:
        errors = self._nixl.bindings
        try:
            name = self._agent.add_remote_agent(wanted.metadata)
        except (errors.nixlNotFoundError, errors.nixlInvalidParamError) as error:
            raise PoisonedMetadata(f"the metadata is damaged: {error_text(error)}") from error
        except errors.nixlMismatchError as error:
            raise KvBadDescriptor(f"the metadata is not NIXL's: {error_text(error)}") from error
        except self._nixl.errors as error:
            raise KvPeerGone(f"cannot connect to {wanted.agent}: {error_text(error)}") from error
        # NIXL annotates it as text, and returns bytes.
        found = name.decode(errors="replace") if isinstance(name, bytes) else str(name)
        if found != wanted.agent:
            if found not in self._peers:
                self._remove(found)
            raise KvBadDescriptor(f"the metadata is of {found}, not of {wanted.agent}")

    def _forget_oldest(self) -> None:
        *others, _ = self._peers.values()
        idle = [peer for peer in others if not peer.n_reads]
        for peer in idle[: max(0, len(self._peers) - MAX_PEERS)]:
            self._drop(peer)

    def _drop(self, peer: Peer) -> None:
        del self._peers[peer.name]
        if peer.name != self._own_name:
            self._remove(peer.name)

    def _remove(self, name: str) -> None:
        try:
            self._agent.remove_remote_agent(name)
        except self._nixl.errors as error:
            log.info("kv_transfer.peer_kept %s: %s", name, error_text(error))


@dataclass(slots=True, eq=False)
class ReadOrder:
    """Blocks of a peer's session, to be read into slots of the own pool.

    `settled` is called once, with the blocks or an error, on the agent's thread; the slots are not
    written to after that.
    """

    wanted: NixlDescriptor
    slots: Slots
    settled: Settled
    abandoned: bool = False  # Set by the caller when it does not want the blocks any more.
    started: bool = False  # Set by the agent when it reaches this order.


@dataclass(slots=True)
class _Read:
    order: ReadOrder
    peer: Peer
    transfer: Any


class NixlAgent:
    """A NIXL agent on a thread of its own, with a pool of slots registered for peers to read.

    The thread polls for the ends of transfers while there are any, and for acknowledgements while
    sessions are offered; otherwise it sleeps. If the start failed, `failure` says why at `ready`.
    """

    def __init__(self, name: str, pool: SlotPool, *, loopback: bool) -> None:
        self.name = name
        self.pool = pool
        self.acks: SimpleQueue[Ack] = SimpleQueue()
        self.ready = threading.Event()
        self.failure: KvTransferError | None = None
        self.metadata = b""
        self._loopback = loopback
        self._n_offers = 0
        self._orders: SimpleQueue[ReadOrder | None] = SimpleQueue()
        self._closing = False
        self._reads: list[_Read] = []
        self._thread = threading.Thread(target=self._run, name=f"nixl {name}", daemon=True)
        self._thread.start()

    # --- called by the owner ---

    def read(self, order: ReadOrder) -> None:
        """Have the thread read blocks; the order's `settled` gets the result."""
        self._orders.put(order)

    def expect_acks(self, n_offers: int) -> None:
        """Set how many sessions are offered, for which acknowledgements may come."""
        wake = not self._n_offers
        self._n_offers = n_offers
        if wake and n_offers:
            self._orders.put(None)

    def close(self) -> None:
        """Begin to end the agent, for which `join` waits; open reads are settled with an error."""
        self._closing = True
        self._orders.put(None)

    def join(self, limit_s: float) -> bool:
        """Wait for the thread's end, at most `limit_s`. Returns whether it has ended."""
        self._thread.join(limit_s)
        return not self._thread.is_alive()

    @property
    def alive(self) -> bool:
        """Whether the thread runs and takes orders."""
        return self._thread.is_alive() and not self._closing

    # --- on the thread ---

    def _run(self) -> None:
        try:
            self._nixl = load_nixl(loopback=self._loopback)
            self._open()
        except KvUnavailable as error:
            self.failure = error
        except Exception as error:  # noqa: BLE001
            # Another version, or a broken installation, may raise anything; the owner of this agent gets
            # it.
            self.failure = KvUnavailable(f"NIXL agent cannot start: {error_text(error)}")
        if self.failure is not None:
            self.ready.set()
            return
        self.ready.set()
        try:
            self._serve()
        except Exception:
            log.exception("kv_transfer.agent_failed %s", self.name)
        finally:
            self._end_agent()

    def _open(self) -> None:
        self._agent, self._progresses = make_agent(self._nixl, self.name)
        region = (self.pool.start_address, self.pool.memory.nbytes, 0, "")
        self._region = self._agent.register_memory([region], "DRAM")
        # The metadata lists the regions that are registered already.
        self.metadata = bytes(self._agent.get_agent_metadata())
        self._peers = Peers(self._nixl, self._agent, self.name)

    def _serve(self) -> None:
        poll_s = PULL_POLL_MIN_S
        while not self._closing:
            try:
                order = self._orders.get(timeout=self._rest_s(poll_s))
            except Empty:
                order = None
            if order is not None:
                poll_s = PULL_POLL_MIN_S
                self._start(order)
            if self._n_offers or not self._progresses:
                self._collect_acks()
            self._check_reads()
            poll_s = min(poll_s * 1.5, PULL_POLL_MAX_S)

    def _rest_s(self, poll_s: float) -> float | None:
        if any(not read.order.abandoned for read in self._reads):
            return poll_s
        if self._n_offers:
            return OFFER_POLL_S if self._progresses else UNAIDED_POLL_S
        return ABANDONED_POLL_S if self._reads else None

    def _start(self, order: ReadOrder) -> None:
        order.started = True
        if order.abandoned:
            order.settled(KvTransferError("given up before it began"))
            return
        try:
            peer = self._peers.find_peer(order.wanted)
            read = _Read(order, peer, self._transfer(order, peer))
        except KvTransferError as error:
            order.settled(error)
            return
        peer.n_reads += 1
        self._reads.append(read)
        try:
            self._agent.transfer(read.transfer)
        except self._nixl.errors as error:
            self._end_read(read, self._reason(error, read))

    def _transfer(self, order: ReadOrder, peer: Peer) -> Any:
        wanted = order.wanted
        here = self._rows(self.pool.start_address, order.slots, self.pool.stride_bytes, wanted)
        there = self._rows(wanted.base, wanted.slots, wanted.stride_bytes, wanted)
        try:
            return self._agent.initialize_xfer(
                "READ",
                self._agent.get_xfer_descs(here, "DRAM"),
                self._agent.get_xfer_descs(there, "DRAM"),
                peer.name,
                notif_msg=wanted.ack(),
            )
        except self._nixl.errors as error:
            # Nothing was sent, as the peer has not registered memory at these addresses.
            raise KvBadDescriptor(f"NIXL refuses to read there: {error_text(error)}") from error

    @staticmethod
    def _rows(base: int, slots: Slots, stride_bytes: int, wanted: NixlDescriptor) -> Any:
        rows = np.zeros((len(slots), 3), dtype=np.uint64)  # u64[n, 3]: address, length, device
        rows[:, 0] = np.uint64(base) + slots.astype(np.uint64) * np.uint64(stride_bytes)
        rows[0, 1] = TAG_BYTES  # The ticket.
        rows[1:, 1] = TAG_BYTES + wanted.block_bytes
        return rows

    def _collect_acks(self) -> None:
        try:
            notices = self._agent.get_new_notifs()
        except self._nixl.errors as error:
            log.warning("kv_transfer.notices_lost %s", error_text(error))
            return
        for messages in notices.values():
            for ack in map(unpack_ack, messages):
                if ack is not None:
                    self.acks.put(ack)

    def _check_reads(self) -> None:
        for read in list(self._reads):
            try:
                state = self._agent.check_xfer_state(read.transfer)
            except self._nixl.errors as error:
                self._end_read(read, self._reason(error, read))
                continue
            if state == "DONE":
                self._end_read(read, None)
            elif state != "PROC":
                self._end_read(read, KvTransferError(f"NIXL reports state {state}"))

    def _end_read(self, read: _Read, failure: KvTransferError | None) -> None:
        """Settle a read of which NIXL has reported the end."""
        order, peer = read.order, read.peer
        self._reads.remove(read)
        self._release(read)
        peer.gone |= isinstance(failure, KvPeerGone)
        self._peers.read_ended(peer)
        if failure is None and not order.abandoned:
            try:
                blocks = self.pool.read(order.slots, order.wanted)
            except KvTransferError as error:
                failure = error
            else:
                order.settled(blocks)
                return
        order.settled(failure or KvTransferError("arrived after it was given up"))

    def _reason(self, error: Exception, read: _Read) -> KvTransferError:
        if isinstance(error, self._nixl.bindings.nixlRemoteDisconnectError):
            return KvPeerGone(f"{read.peer.name} has dropped the connection")
        return KvTransferError(f"NIXL cannot read from {read.peer.name}: {error_text(error)}")

    def _release(self, read: _Read) -> None:
        try:
            self._agent.release_xfer_handle(read.transfer)
        except self._nixl.errors as error:
            log.warning("kv_transfer.release_failed %s", error_text(error))

    def _end_agent(self) -> None:
        """End the agent, then settle open reads: until the end they may write to the pool."""
        self._closing = True
        for read in self._reads:
            self._release(read)
        if self._peers:
            for _ in range(N_LEAVE_POLLS):
                self._collect_acks()
                threading.Event().wait(LEAVE_POLL_S)
        self._peers.disconnect_all()
        try:
            self._agent.deregister_memory(self._region)
        except self._nixl.errors as error:
            log.info("kv_transfer.region_kept %s", error_text(error))
        orders = [read.order for read in self._reads]
        self._reads.clear()
        del self._region, self._peers, self._agent
        while not self._orders.empty():
            order = self._orders.get()
            if order is not None:
                orders.append(order)
        for order in orders:
            order.settled(KvUnavailable("the NIXL agent has ended"))
