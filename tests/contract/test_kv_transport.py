"""What holds for every KV transport, between two sides in one process or in two."""

import itertools
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from slagate.workers.kv_transfer.memory import MemoryExchange
from slagate.workers.kv_transfer.nixl.nixl import NixlTransport
from slagate.workers.kv_transfer.shm import SharedMemoryTransport
from slagate.workers.kv_transfer.transport import KvTransferError, KvTransport
from support.kv.processes import (
    BLOCK_BYTES,
    Here,
    Side,
    blocks_of,
    call,
    digest,
    export,
    fetch,
    is_whole,
    started,
    wait_for,
    wait_for_acks,
)
from support.limits import HANG_S

KINDS = ["SHM", "MEMORY", "NIXL", "NIXL in two processes", "NIXL without a progress thread"]
GONE = "already consumed or released"

# Never twice, also across tests: the sides are shared by the tests of this module.
numbers = itertools.count(1)


class Pair(NamedTuple):
    kind: str
    prefill: Side
    decode: Side


def nixl(name: str) -> NixlTransport:
    return NixlTransport(
        name, n_slots=64, block_bytes=BLOCK_BYTES, loopback=True, pull_limit_s=HANG_S
    )


def transports(kind: str, folder: Path) -> list[KvTransport]:
    if kind == "SHM":
        return [SharedMemoryTransport(folder), SharedMemoryTransport(folder)]
    if kind == "MEMORY":
        exchange = MemoryExchange()
        return [exchange.transport(), exchange.transport()]
    return [nixl("prefill"), nixl("decode")]


@pytest.fixture(scope="module", params=KINDS)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    kind: str = request.param
    with ExitStack() as stack:
        if kind in KINDS[3:]:
            unaided = kind == KINDS[4]
            prefill, decode = stack.enter_context(
                started("prefill", "decode", pull_limit_s=HANG_S, unaided=unaided)
            )
            yield Pair(kind, prefill, decode)
            assert (prefill.finish(), decode.finish()) == (0, 0)
        else:
            sides = [Here(each) for each in transports(kind, tmp_path_factory.mktemp("kv"))]
            for side in sides:
                stack.callback(side.close)
            yield Pair(kind, *sides)


def test_blocks_arrive_and_the_owner_hears_of_it_once(pair: Pair) -> None:
    session = next(numbers)
    descriptor = export(pair.prefill, session)
    assert call(pair.prefill, "acks")["sessions"] == []
    assert fetch(pair.decode, descriptor) | {"number": 0} == {
        "number": 0,
        "error": "",
        "text": digest(blocks_of(session, 3)),
    }
    wait_for_acks(pair.prefill, [session])
    assert call(pair.prefill, "acks")["sessions"] == []


def test_many_sessions_at_once_keep_apart(pair: Pair) -> None:
    """DISAGG-08: also when nothing was set up between the two before."""
    sessions = [next(numbers) for _ in range(16)]
    descriptors = [export(pair.prefill, i, n_blocks=1 + i % 4) for i in sessions]
    pulls = [pair.decode.begin("pull", descriptor=each) for each in descriptors]
    results = [pair.decode.end(each)["text"] for each in pulls]
    assert results == [digest(blocks_of(i, 1 + i % 4)) for i in sessions]
    wait_for_acks(pair.prefill, sessions)


@pytest.mark.parametrize("owner_knows", [False, True])
def test_a_second_pull_is_refused(pair: Pair, owner_knows: bool) -> None:  # noqa: FBT001
    session = next(numbers)
    descriptor = export(pair.prefill, session)
    fetch(pair.decode, descriptor)
    if owner_knows:
        wait_for_acks(pair.prefill, [session])
    again = fetch(pair.decode, descriptor)
    assert (again["error"], again["text"]) == ("KvTransferError", f"session {session}: {GONE}")
    if not owner_knows:
        wait_for_acks(pair.prefill, [session])


def test_a_released_session_cannot_be_pulled_and_is_not_acknowledged(pair: Pair) -> None:
    session, other = next(numbers), next(numbers)
    descriptor = export(pair.prefill, session)
    beside = export(pair.prefill, other)
    for released in (session, session, next(numbers)):
        call(pair.prefill, "release", session=released)
    result = fetch(pair.decode, descriptor)
    assert (result["error"], result["text"]) == ("KvTransferError", f"session {session}: {GONE}")
    assert fetch(pair.decode, beside)["text"] == digest(blocks_of(other, 3))
    wait_for_acks(pair.prefill, [other])


def test_a_session_is_not_exported_twice(pair: Pair) -> None:
    session = next(numbers)
    export(pair.prefill, session)
    request = {"session": session, "n_blocks": 1, "seed": 0}
    again = pair.prefill.end(pair.prefill.begin("export", **request))
    assert again["text"] == f"session {session} is already exported"
    call(pair.prefill, "release", session=session)


def test_each_byte_of_a_descriptor_counts(pair: Pair) -> None:
    session = next(numbers)
    descriptor = bytes.fromhex(export(pair.prefill, session))
    for i in range(len(descriptor)):
        altered = bytearray(descriptor)
        altered[i] ^= 1 << i % 8
        result = fetch(pair.decode, altered.hex())
        assert result["error"] == "KvBadDescriptor", f"byte {i}: {result}"
    assert fetch(pair.decode, descriptor.hex())["text"] == digest(blocks_of(session, 3))
    wait_for_acks(pair.prefill, [session])


def test_a_descriptor_of_another_length_is_refused(pair: Pair) -> None:
    session = next(numbers)
    descriptor = bytes.fromhex(export(pair.prefill, session))
    cut = [descriptor[:n] for n in range(len(descriptor))]
    longer = [descriptor + b"\0", descriptor * 2, descriptor + bytes(1 << 20)]
    for each in [*cut, *longer]:
        result = fetch(pair.decode, each.hex())
        assert result["error"] == "KvBadDescriptor", f"{len(each)} bytes: {result}"
    call(pair.prefill, "release", session=session)


def test_sessions_that_begin_alike_share_what_the_pool_has(pair: Pair) -> None:
    """Unshared, the pool would hold two of them; pulls wait for each other's room."""
    sessions = [next(numbers) for _ in range(15)]
    n_common = 25
    descriptors = {i: export(pair.prefill, i, n_blocks=1, n_common=n_common) for i in sessions}
    released, *others = sessions
    call(pair.prefill, "release", session=released)
    # While others are on offer: without a progress thread an owner of nothing rests, and does not answer.
    assert fetch(pair.decode, descriptors[released])["error"] == "KvTransferError"
    pulls = {i: pair.decode.begin("pull", descriptor=descriptors[i]) for i in others}
    for i, pull in pulls.items():
        whole = np.concatenate([blocks_of(0, n_common), blocks_of(i, 1)])
        assert pair.decode.end(pull)["text"] == digest(whole)
    wait_for_acks(pair.prefill, others)
    if pair.kind.startswith("NIXL"):
        for side in (pair.prefill, pair.decode):
            wait_for(side, "state", is_whole)


def test_released_and_pulled_sessions_leave_room(pair: Pair) -> None:
    """DISAGG-09: four times what fits, half of it collected."""
    for _ in range(20):
        collected, stranded = next(numbers), next(numbers)
        descriptor = export(pair.prefill, collected, n_blocks=6)
        export(pair.prefill, stranded, n_blocks=6)
        assert not fetch(pair.decode, descriptor)["error"]
        wait_for_acks(pair.prefill, [collected])
        call(pair.prefill, "release", session=stranded)


@pytest.fixture(params=KINDS[:3])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_it_says_its_name_and_has_no_problem(kind: str, tmp_path: Path) -> None:
    for transport in transports(kind, tmp_path):
        assert (transport.name, transport.problem()) == (kind, "")
        assert transport.acks() == []
        transport.close()


def test_a_closed_transport_does_nothing(kind: str, tmp_path: Path) -> None:
    prefill, decode = (Here(each) for each in transports(kind, tmp_path))
    offered = export(decode, 8)
    for transport in (prefill.transport, decode.transport):
        transport.close()
        transport.close()
        assert "closed" in transport.problem()
        with pytest.raises(KvTransferError, match="closed"):
            transport.export(7, blocks_of(7, 1))
        transport.release(7)
        assert transport.acks() == []
    assert "closed" in fetch(prefill, offered)["text"]
    prefill.close()
    decode.close()


def test_only_blocks_are_exported(kind: str, tmp_path: Path) -> None:
    prefill, decode = transports(kind, tmp_path)
    for wrong in (
        np.zeros((0, 16), np.uint8),
        np.zeros((2, 0), np.uint8),
        np.zeros(16, np.uint8),
        np.zeros((2, 16), np.uint16),
    ):
        with pytest.raises(KvTransferError, match="blocks must be"):
            prefill.export(7, wrong)  # type: ignore[arg-type]
    prefill.close()
    decode.close()


def test_a_descriptor_of_another_transport_is_refused(kind: str, tmp_path: Path) -> None:
    prefill, decode = (Here(each) for each in transports(kind, tmp_path))
    for other in {*KINDS[:3]} - {kind}:
        strangers = [Here(each) for each in transports(other, tmp_path)]
        assert fetch(decode, export(strangers[0], 7))["error"] == "KvBadDescriptor"
        for stranger in strangers:
            stranger.close()
    prefill.close()
    decode.close()
