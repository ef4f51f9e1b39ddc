"""Which metadata is loaded, and when a peer is forgotten."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from slagate.workers.kv_transfer.nixl.agent import MAX_PEERS, Peers, PoisonedMetadata
from slagate.workers.kv_transfer.nixl.descriptor import NixlDescriptor
from slagate.workers.kv_transfer.nixl.ucx import Nixl
from slagate.workers.kv_transfer.transport import KvBadDescriptor, KvPeerGone


class NotFoundError(Exception):
    pass


class InvalidParamError(Exception):
    pass


class MismatchError(Exception):
    pass


class BackendError(Exception):
    pass


BINDINGS = SimpleNamespace(
    nixlNotFoundError=NotFoundError,
    nixlInvalidParamError=InvalidParamError,
    nixlMismatchError=MismatchError,
)


class FakeAgent:
    """Connects to whom the metadata names; `failure` is what the next loading raises."""

    def __init__(self) -> None:
        self.loaded: list[bytes] = []
        self.removed: list[str] = []
        self.failure: Exception | None = None

    def add_remote_agent(self, metadata: bytes) -> bytes:
        if self.failure is not None:
            raise self.failure
        self.loaded.append(metadata)
        return metadata.split(b" ")[0]

    def remove_remote_agent(self, name: str) -> None:
        self.removed.append(name)
        if name.endswith("stubborn"):
            raise NotFoundError(name)


@pytest.fixture
def agent() -> FakeAgent:
    return FakeAgent()


@pytest.fixture
def peers(agent: FakeAgent) -> Peers:
    errors = (NotFoundError, InvalidParamError, MismatchError, BackendError)
    return Peers(Nixl(None, BINDINGS, errors), agent, "me")


def wanted(name: str, metadata: bytes | None = None) -> NixlDescriptor:
    fields: dict[str, Any] = {"session_id": 1, "tag": b"t" * 8, "tags_digest": b"d" * 8}
    return NixlDescriptor(
        **fields,
        base=0,
        crc=0,
        block_bytes=1,
        stride_bytes=9,
        agent=name,
        metadata=name.encode() + b" at home" if metadata is None else metadata,
        slots=np.zeros(2, np.uint32),
    )


def test_metadata_is_loaded_once(peers: Peers, agent: FakeAgent) -> None:
    assert peers.find_peer(wanted("a")) is peers.find_peer(wanted("a"))
    peers.find_peer(wanted("b"))
    assert agent.loaded == [b"a at home", b"b at home"]


def test_an_agent_does_not_load_its_own(peers: Peers, agent: FakeAgent) -> None:
    assert peers.find_peer(wanted("me")).name == "me"
    peers.disconnect_all()
    assert (agent.loaded, agent.removed) == ([], [])


def test_a_peer_that_is_gone_is_forgotten_with_its_last_read(
    peers: Peers, agent: FakeAgent
) -> None:
    peer = peers.find_peer(wanted("a"))
    peer.n_reads = 2
    peer.gone = True
    peers.read_ended(peer)
    with pytest.raises(KvPeerGone, match="a has dropped"):
        peers.find_peer(wanted("a"))
    assert agent.removed == []
    peers.read_ended(peer)
    assert agent.removed == ["a"]
    assert peers.find_peer(wanted("a")) is not peer


def test_the_peer_unused_for_longest_is_forgotten_but_none_in_use(
    peers: Peers, agent: FakeAgent
) -> None:
    names = [f"p{i}" for i in range(MAX_PEERS)]
    for name in names:
        peers.find_peer(wanted(name))
    peers.find_peer(wanted("p1")).n_reads = 1
    peers.find_peer(wanted("p0"))
    peers.find_peer(wanted("one-more"))
    peers.find_peer(wanted("another"))
    assert agent.removed == ["p2", "p3"]
    assert len(peers) == MAX_PEERS


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (NotFoundError(), PoisonedMetadata),
        (InvalidParamError(), PoisonedMetadata),
        (MismatchError(), KvBadDescriptor),
        (BackendError(), KvPeerGone),
    ],
)
def test_each_failure_to_connect_says_what_to_do_about_it(
    peers: Peers, agent: FakeAgent, failure: Exception, expected: type[Exception]
) -> None:
    agent.failure = failure
    with pytest.raises(expected) as caught:
        peers.find_peer(wanted("a"))
    assert caught.type is expected
    assert len(peers) == 0
    agent.failure = None
    peers.find_peer(wanted("a"))


def test_metadata_of_another_name_does_not_stay_and_does_not_disturb(
    peers: Peers, agent: FakeAgent
) -> None:
    peers.find_peer(wanted("a"))
    for other, removed in ((b"b elsewhere", ["b"]), (b"a elsewhere", ["b"])):
        with pytest.raises(KvBadDescriptor, match="the metadata is of"):
            peers.find_peer(wanted("c", other))
        assert agent.removed == removed
    peers.find_peer(wanted("a"))


def test_a_peer_that_nixl_does_not_let_go_is_no_error(peers: Peers, agent: FakeAgent) -> None:
    peers.find_peer(wanted("stubborn"))
    peers.disconnect_all()
    assert (agent.removed, len(peers)) == (["stubborn"], 0)
