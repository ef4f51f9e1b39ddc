"""The other agents that one agent is connected to; used on that agent's thread only."""

import logging
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from slagate.workers.kv_transfer.nixl.descriptor import NixlDescriptor
from slagate.workers.kv_transfer.nixl.ucx import Nixl, error_text
from slagate.workers.kv_transfer.transport import KvBadDescriptor, KvPeerGone

log = logging.getLogger(__name__)

MAX_PEERS = 64
"""Connections kept; more than the workers of a fleet that one worker pulls from at a time."""


class PoisonedMetadata(KvBadDescriptor):
    """Metadata loaded by half, after which NIXL refuses that peer's name for as long as the agent lives."""


@dataclass(slots=True)
class Peer:
    """An agent to read from, and how many reads use it now."""

    name: str
    metadata_hash: bytes
    n_reads: int = 0
    gone: bool = False


class Peers:
    """By name, the one used last at the end. An agent's name is never used by another process."""

    def __init__(self, nixl: Nixl, agent: Any, own_name: str) -> None:
        self._nixl = nixl
        self._agent = agent
        self._own_name = own_name
        self._peers: dict[str, Peer] = {}

    def __len__(self) -> int:
        return len(self._peers)

    def find(self, wanted: NixlDescriptor) -> Peer:
        """The peer a descriptor names; its metadata is loaded the first time only.

        Raises `KvPeerGone`, `KvBadDescriptor` or `PoisonedMetadata`.
        """
        metadata_hash = blake2b(wanted.metadata, digest_size=16).digest()
        peer = self._peers.pop(wanted.agent, None)
        if peer is None:
            if wanted.agent != self._own_name:  # An agent reaches its own memory without more ado.
                self._connect(wanted)
            peer = Peer(wanted.agent, metadata_hash)
        self._peers[peer.name] = peer
        self._forget_oldest()
        if peer.metadata_hash != metadata_hash:
            raise KvBadDescriptor(f"the metadata is not what {peer.name} has sent before")
        if peer.gone:
            raise KvPeerGone(f"{peer.name} has dropped the connection")
        return peer

    def ended(self, peer: Peer) -> None:
        """Count one read less; a peer that is gone is forgotten with its last one."""
        peer.n_reads -= 1
        if peer.gone and not peer.n_reads:
            self._drop(peer)

    def close(self) -> None:
        """Disconnect from every one."""
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
        # Annotated as text, but bytes.
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
