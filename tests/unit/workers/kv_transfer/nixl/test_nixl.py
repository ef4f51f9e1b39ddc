"""NIXL between two transports of this process: descriptors that lie, slots that are used again, damage."""

import pickle
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slagate.workers.kv_transfer.nixl import nixl as kv_nixl
from slagate.workers.kv_transfer.nixl.descriptor import (
    MAX_DESCRIPTOR_BYTES,
    NixlDescriptor,
    unpack_ack,
    unpack_descriptor,
)
from slagate.workers.kv_transfer.nixl.nixl import NixlTransport
from slagate.workers.kv_transfer.transport import KvTransferError
from support.kv.processes import (
    BLOCK_BYTES,
    Here,
    blocks_of,
    call,
    digest,
    export,
    fetch,
    is_whole,
    wait_for,
    wait_for_acks,
)
from support.limits import HANG_S


def side(name: str, *, pull_limit_s: float = HANG_S) -> Here:
    transport = NixlTransport(
        name, n_slots=32, block_bytes=BLOCK_BYTES, loopback=True, pull_limit_s=pull_limit_s
    )
    return Here(transport)


@pytest.fixture
def prefill() -> Iterator[Here]:
    here = side("prefill")
    yield here
    here.close()


@pytest.fixture
def decode() -> Iterator[Here]:
    here = side("decode")
    yield here
    here.close()


def changed(descriptor: str, **fields: object) -> str:
    """A descriptor with other fields, and a checksum that is right again: it is no secret."""
    return unpack_descriptor(bytes.fromhex(descriptor))._replace(**fields).pack().hex()  # type: ignore[arg-type]


def works(prefill: Here, decode: Here, session: int = 900) -> None:
    assert fetch(decode, export(prefill, session))["text"] == digest(blocks_of(session, 3))
    wait_for_acks(prefill, [session])


# --- integrity ---


def test_slots_used_again_give_an_error_and_never_the_other_blocks(
    prefill: Here, decode: Here
) -> None:
    descriptor = export(prefill, 7)
    call(prefill, "release", session=7)
    export(prefill, 8)
    result = fetch(decode, descriptor)
    assert result["error"] == "KvIntegrity"
    assert "another session's blocks" in result["text"]
    # The notification named session 7, so 8 is still there.
    assert call(prefill, "acks")["sessions"] == []


def test_a_slot_written_anew_is_not_what_it_was_though_its_content_is(
    prefill: Here, decode: Here
) -> None:
    """A read may find the ticket before a release and the blocks after it."""
    first = export(prefill, 7)
    call(prefill, "release", session=7)
    second = unpack_descriptor(bytes.fromhex(export(prefill, 8, seed=7)))
    assert second.slots.tolist() == unpack_descriptor(bytes.fromhex(first)).slots.tolist()
    result = fetch(decode, changed(first, tag=second.tag))
    assert result["error"] == "KvIntegrity"
    assert "another session's blocks" in result["text"]


def test_a_session_that_is_gone_is_gone_though_another_one_holds_its_blocks(
    prefill: Here, decode: Here
) -> None:
    first, second = export(prefill, 7), export(prefill, 8, seed=7)
    call(prefill, "release", session=7)
    assert "already consumed or released" in fetch(decode, first)["text"]
    assert fetch(decode, second)["text"] == digest(blocks_of(7, 3))


def test_blocks_that_changed_under_their_tag_are_thrown_away(prefill: Here, decode: Here) -> None:
    descriptor = export(prefill, 7)
    result = fetch(decode, changed(descriptor, crc=zlib.crc32(b"something else")))
    assert (result["error"], "checksum" in result["text"]) == ("KvIntegrity", True)


def test_a_wrong_session_id_frees_nothing(prefill: Here, decode: Here) -> None:
    """An acknowledgement counts only with the tag of its session."""
    descriptor = export(prefill, 7)
    export(prefill, 8)
    assert not fetch(decode, changed(descriptor, session_id=8))["error"]
    assert not fetch(prefill, descriptor)["error"]  # An agent reads its own memory as well.
    wait_for_acks(prefill, [7])
    assert call(prefill, "acks")["sessions"] == []


# --- descriptors ---


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda d: {"base": d.base + (1 << 30)}, "refuses to read there"),
        (lambda d: {"base": d.base - 1}, "refuses to read there"),
        (lambda d: {"base": 0}, "refuses to read there"),
        (lambda d: {"slots": d.slots + 30}, "refuses to read there"),
        (lambda d: {"slots": d.slots[:0]}, "no blocks"),
        (lambda d: {"block_bytes": 0}, "no blocks"),
        (lambda d: {"stride_bytes": d.block_bytes}, "overlap"),
        (lambda d: {"block_bytes": 1 << 20, "stride_bytes": 1 << 21}, "do not fit into slots"),
        (lambda d: {"agent": "somebody"}, "the metadata is of"),
    ],
)
def test_a_descriptor_that_lies_is_refused_with_the_reason(
    prefill: Here,
    decode: Here,
    change: Callable[[NixlDescriptor], dict[str, object]],
    why: str,
) -> None:
    descriptor = export(prefill, 7)
    lie = changed(descriptor, **change(unpack_descriptor(bytes.fromhex(descriptor))))
    result = fetch(decode, lie)
    assert why in result["text"]
    wait_for(decode, "state", is_whole)
    assert fetch(decode, descriptor)["text"] == digest(blocks_of(7, 3))


def test_a_pickle_is_not_opened(decode: Here, tmp_path: Path) -> None:
    """SECMM-03: no bytes from outside are ever unpickled."""
    marker = tmp_path / "marker"
    evil = pickle.dumps(_Evil(marker))
    result = fetch(decode, evil.hex())
    assert result["error"] == "KvBadDescriptor"
    body = unpack_descriptor(bytes.fromhex(export(decode, 7)))
    assert fetch(decode, body._replace(metadata=evil, agent="x").pack().hex())["error"]
    assert not marker.exists()


class _Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return Path.touch, (self.marker,)


def test_a_descriptor_that_would_be_too_long_is_not_made(decode: Here) -> None:
    wanted = unpack_descriptor(bytes.fromhex(export(decode, 7)))
    many = wanted._replace(slots=wanted.slots.repeat(MAX_DESCRIPTOR_BYTES // 4))
    with pytest.raises(KvTransferError, match="too many blocks"):
        many.pack()


def test_what_is_no_acknowledgement_is_ignored() -> None:
    assert unpack_ack(b"") is None
    assert unpack_ack(b"x" * 17) is None


# --- metadata ---


def test_damaged_metadata_replaces_the_agent_and_loses_no_session(
    prefill: Here, decode: Here
) -> None:
    """The part that describes the connection loads, the part about memory does not."""
    offered = export(decode, 5)
    descriptor = export(prefill, 7)
    metadata = unpack_descriptor(bytes.fromhex(descriptor)).metadata
    result = fetch(decode, changed(descriptor, metadata=metadata[:-30]))
    assert result["error"] == "PoisonedMetadata"
    wait_for(decode, "state", lambda state: state["n_agents"] == 2)
    # Under its former agent, even the true metadata of that peer would be refused from now on.
    works(prefill, decode)
    assert fetch(prefill, offered)["text"] == digest(blocks_of(5, 3))
    wait_for_acks(decode, [5])
    wait_for(decode, "state", is_whole)


def test_bytes_that_are_no_metadata_are_refused_and_harm_nothing(
    prefill: Here, decode: Here
) -> None:
    descriptor = export(prefill, 7)
    metadata = unpack_descriptor(bytes.fromhex(descriptor)).metadata
    for garbage in (b"", b"x", b"nonsense" * 40, metadata[:10], metadata[:60]):
        result = fetch(decode, changed(descriptor, metadata=garbage))
        assert result["error"] in {"KvBadDescriptor", "KvPeerGone", "PoisonedMetadata"}, result
    works(prefill, decode)
    wait_for(decode, "state", is_whole)


def test_other_metadata_under_a_known_name_is_refused(prefill: Here, decode: Here) -> None:
    works(prefill, decode)
    other = side("other")
    descriptor = export(prefill, 7)
    metadata = unpack_descriptor(bytes.fromhex(export(other, 7))).metadata
    result = fetch(decode, changed(descriptor, metadata=metadata))
    assert result["error"] == "KvBadDescriptor"
    assert "has sent before" in result["text"]
    other.close()


def test_a_peer_that_is_gone_is_forgotten(prefill: Here, decode: Here) -> None:
    works(prefill, decode)
    descriptor = export(prefill, 7)
    (agent,) = vars(decode.transport)["_agents"]
    assert len(vars(agent)["_peers"]) == 1
    prefill.transport.close()
    assert fetch(decode, descriptor)["error"] == "KvPeerGone"
    assert len(vars(agent)["_peers"]) == 0


# --- the pool ---


def test_a_full_pool_refuses_and_serves_again(prefill: Here, decode: Here) -> None:
    export(prefill, 7, n_blocks=30)
    too_many = {"session": 8, "n_blocks": 3, "seed": 8}
    refused = prefill.end(prefill.begin("export", **too_many))
    assert refused["text"] == "the pool is full: 4 slots wanted, 1 of 32 free"
    call(prefill, "release", session=7)
    works(prefill, decode, session=8)


def test_a_full_pool_takes_what_is_there_already(prefill: Here, decode: Here) -> None:
    export(prefill, 7, n_blocks=30)
    descriptor = export(prefill, 8, n_blocks=30, seed=7)
    assert call(prefill, "state")["n_free"] == 0
    call(prefill, "release", session=7)
    assert fetch(decode, descriptor)["text"] == digest(blocks_of(7, 30))
    wait_for_acks(prefill, [8])
    assert is_whole(call(prefill, "state"))


def test_blocks_larger_than_a_slot_are_refused(prefill: Here) -> None:
    with pytest.raises(KvTransferError, match=f"do not fit into slots of {BLOCK_BYTES}"):
        prefill.transport.export(7, blocks_of(7, 1, BLOCK_BYTES + 1))
    wait_for(prefill, "state", is_whole)


def test_smaller_blocks_than_a_slot_arrive(prefill: Here, decode: Here) -> None:
    descriptor = prefill.transport.export(7, blocks_of(7, 4, 24))
    assert fetch(decode, descriptor.hex())["text"] == digest(blocks_of(7, 4, 24))


# --- the agent's thread ---


def test_a_thread_that_ended_is_replaced(
    prefill: Here, decode: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = decode.transport
    assert isinstance(transport, NixlTransport)
    (agent,) = vars(transport)["_agents"]

    def broken() -> None:
        raise AttributeError("not one of NIXL's errors")

    monkeypatch.setattr(agent, "_check_reads", broken)
    result = fetch(decode, export(prefill, 7))
    assert result["error"] == "KvUnavailable"
    wait_for(decode, "state", lambda state: state["text"] == "the NIXL agent has ended")
    assert fetch(decode, export(prefill, 8))["error"] == "KvUnavailable"
    wait_for(decode, "state", lambda state: not state["text"])
    # Its read had begun: now and then it is done at once, and then its owner hears of it.
    call(prefill, "release", session=7)
    works(prefill, decode)


def test_a_thread_that_is_stuck_in_a_call_is_replaced_and_its_pulls_end_in_time(
    prefill: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = side("decode", pull_limit_s=0.3)
    (agent,) = vars(decode.transport)["_agents"]
    returns = threading.Event()
    monkeypatch.setattr(agent, "_check_reads", returns.wait)
    first, second = export(prefill, 7), export(prefill, 8)
    pulls = [decode.begin("pull", descriptor=each) for each in (first, second)]
    assert [decode.end(pull)["error"] for pull in pulls] == ["KvTimeout", "KvTimeout"]
    wait_for(decode, "state", lambda state: state["n_agents"] == 2)
    # Its read may be done by now, as above.
    call(prefill, "release", session=7)
    monkeypatch.setattr(decode.transport, "_pull_limit_s", HANG_S)
    works(prefill, decode, session=9)
    monkeypatch.undo()
    returns.set()
    wait_for(decode, "state", is_whole)
    assert call(decode, "state")["n_quarantined"] == 0
    decode.close()


def test_closing_ends_every_pull_once_and_leaves_no_timer(
    prefill: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One pull has run out of time, one has not."""
    decode = side("decode", pull_limit_s=0.3)
    (agent,) = vars(decode.transport)["_agents"]
    returns = threading.Event()
    monkeypatch.setattr(agent, "_check_reads", returns.wait)
    first, second, third = (export(prefill, i) for i in (7, 8, 9))
    pulls = [decode.begin("pull", descriptor=each) for each in (first, second)]
    assert [decode.end(pull)["error"] for pull in pulls] == ["KvTimeout", "KvTimeout"]
    monkeypatch.setattr(decode.transport, "_pull_limit_s", HANG_S)
    open_pull = decode.begin("pull", descriptor=third)
    returns.set()
    loop = vars(decode)["_loop"]
    decode.transport.close()
    assert [timer for timer in vars(loop)["_scheduled"] if not timer.cancelled()] == []
    assert decode.end(open_pull)["text"] == "transport is closed"
    n_answers = decode.n_answers
    decode.close()  # A second answer would fail here: its future is set.
    assert decode.n_answers == n_answers


def test_a_replaced_agent_is_joined_at_the_end_though_its_thread_still_leaves(
    prefill: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = side("decode")
    transport = decode.transport
    agents = vars(transport)["_agents"]
    (agent,) = agents
    leaves = threading.Event()
    leave = agent._end_agent
    monkeypatch.setattr(agent, "_end_agent", lambda: (leaves.wait(), leave()))
    descriptor = export(prefill, 7)
    metadata = unpack_descriptor(bytes.fromhex(descriptor)).metadata
    assert (
        fetch(decode, changed(descriptor, metadata=metadata[:-30]))["error"] == "PoisonedMetadata"
    )
    wait_for(decode, "state", lambda _: vars(transport)["_current"].agent is not agent)
    assert agent in agents
    leaves.set()
    assert agent.join(HANG_S)
    wait_for(decode, "state", is_whole)
    assert agent not in agents
    decode.close()


def test_a_start_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_nixl, "START_LIMIT_S", 0.0)
    with pytest.raises(KvTransferError, match="did not start in 0 s"):
        side("late")
