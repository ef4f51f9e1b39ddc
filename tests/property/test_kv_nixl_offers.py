"""What is offered from a pool of slots against a model that counts by hand, and readers that come late."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slagate.workers.kv_transfer.nixl.descriptor import NixlDescriptor, tags_digest
from slagate.workers.kv_transfer.nixl.slots import Offer, Offers, SlotPool, checksum
from slagate.workers.kv_transfer.transport import Blocks, KvTransferError

N_SLOTS = 12
BLOCK_BYTES = 40

Content = Callable[[int], Blocks]


def unlike(number: int) -> Blocks:
    """A block that differs from the others in its first byte already."""
    return np.full(BLOCK_BYTES, number, np.uint8)


def alike_at_first(number: int) -> Blocks:
    """A block that differs from the others in its last byte only."""
    block = np.full(BLOCK_BYTES, 7, np.uint8)
    block[-1] = number
    return block


numbers = st.lists(st.integers(0, 5), min_size=1, max_size=6)
steps = st.lists(st.one_of(st.tuples(st.just("add"), numbers), st.tuples(st.just("withdraw"))))


def descriptor(pool: SlotPool, offer: Offer, blocks: Blocks) -> NixlDescriptor:
    return NixlDescriptor(
        session_id=1,
        tag=offer.tag,
        tags_digest=tags_digest(pool.tags(offer.slots[1:])),
        base=0,
        block_bytes=BLOCK_BYTES,
        stride_bytes=pool.stride_bytes,
        crc=checksum(blocks),
        agent="",
        metadata=b"",
        slots=offer.slots,
    )


@pytest.mark.parametrize("content", [unlike, alike_at_first])
@given(steps=steps, data=st.data())
@settings(max_examples=150, deadline=None)
def test_slots_are_counted_as_by_hand(
    content: Content, steps: list[tuple[str, list[int]]], data: st.DataObject
) -> None:
    """A slot is taken while somebody has its content; blocks that begin alike may have more than one."""
    pool = SlotPool(N_SLOTS, BLOCK_BYTES)
    offers = Offers(pool)
    live: list[tuple[Offer, list[int]]] = []
    for step in steps:
        if step[0] == "add":
            blocks = np.stack([content(i) for i in step[1]])
            there = {i for _, owned in live for i in owned}
            fits = len({*step[1]} - there) + 1 <= pool.n_free
            before = pool.memory.copy()
            try:
                live.append((offers.offer_blocks(blocks), step[1]))
            except KvTransferError:
                assert not fits or content is alike_at_first
                assert (pool.memory == before).all()
            else:
                assert fits
        elif live:
            offers.withdraw(live.pop(data.draw(st.integers(0, len(live) - 1)))[0])
        n_contents = len({i for _, owned in live for i in owned})
        n_blocks = sum(len(owned) for _, owned in live)
        n_taken = N_SLOTS - pool.n_free - len(live)
        if content is unlike:
            assert n_taken == n_contents
        assert n_contents <= n_taken <= n_blocks
        tickets = [int(offer.slots[0]) for offer, _ in live]
        shared = {int(slot) for offer, _ in live for slot in offer.slots[1:]}
        assert len({*tickets} | shared) == len(tickets) + len(shared) == N_SLOTS - pool.n_free
        for offer, owned in live:
            blocks = np.stack([content(i) for i in owned])
            read = pool.read(offer.slots, descriptor(pool, offer, blocks))
            assert (read == blocks).all()
    for offer, _ in live:
        offers.withdraw(offer)
    assert pool.n_free == N_SLOTS
    assert not pool.tags(np.arange(N_SLOTS, dtype=np.uint32)).any()
    assert not offers._slot_of
    assert not offers._key_of


@given(
    first=numbers,
    changes=st.lists(st.one_of(numbers, st.just([])), max_size=6),
    cut=st.integers(0, 6),
    seed=st.integers(0, 1 << 20),
)
@settings(max_examples=200, deadline=None)
def test_a_read_torn_by_changes_gives_the_blocks_or_an_error(
    first: list[int], changes: list[list[int]], cut: int, seed: int
) -> None:
    """Some slots are copied before sessions come and go, the others after it: never other blocks."""
    rng = np.random.default_rng(seed)
    pool, here = SlotPool(N_SLOTS, BLOCK_BYTES), SlotPool(N_SLOTS, BLOCK_BYTES)
    offers = Offers(pool)
    blocks = np.stack([unlike(i) for i in first])
    offer = offers.offer_blocks(blocks)
    wanted = descriptor(pool, offer, blocks)
    into = here.take_slots(len(offer.slots))
    early = rng.permutation(len(into)) < cut
    here.memory[into[early]] = pool.memory[offer.slots[early]]
    live = [offer]
    for change in changes:
        if change:
            try:
                live.append(offers.offer_blocks(np.stack([unlike(i) for i in change])))
            except KvTransferError:
                continue
        elif live:
            offers.withdraw(live.pop(int(rng.integers(len(live)))))
    here.memory[into[~early]] = pool.memory[offer.slots[~early]]
    try:
        read = here.read(into, wanted)
    except KvTransferError:
        assert offer not in live, "still offered"
    else:
        assert (read == blocks).all()
