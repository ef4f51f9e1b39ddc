"""Failures that users of such systems reported, as cases of the prefix index."""

import random
import struct
from collections.abc import Sequence
from functools import partial

import anyio
import numpy as np
import pytest

from slagate.pools.prefix.claims import DEVICE, HOST
from slagate.pools.prefix.holder import Holder
from slagate.pools.prefix.index import PrefixIndex, substituted
from slagate.pools.prefix.trie import Root

BLOCK_TOKENS = 4
BASE = Root()


def pack(*ids: int) -> bytes:
    return struct.pack(f"<{len(ids)}I", *ids)


def block(name: int) -> bytes:
    """A block's tokens, others for every name."""
    return pack(*range(name * 10, name * 10 + BLOCK_TOKENS))


def blocks(*names: int) -> bytes:
    return b"".join(block(name) for name in names)


def depths(
    index: PrefixIndex, holders: Sequence[Holder], tokens: bytes, root: Root = BASE
) -> list[int]:
    bits = np.array([holder.bit for holder in holders], np.int32)
    return index.match(tokens, root).depths(bits).tolist()


@pytest.fixture
def index() -> PrefixIndex:
    return PrefixIndex(BLOCK_TOKENS)


def test_kv_01_blocks_hang_where_their_parent_says(index: PrefixIndex) -> None:
    one, two = index.join(), index.join()
    index.stored(one, [1], None, blocks(1))
    index.stored(one, [2, 3], 1, blocks(2, 3))
    index.stored(two, [2, 3], None, blocks(2, 3))
    assert depths(index, [one, two], blocks(1, 2, 3)) == [3, 0]


def test_kv_01_the_same_prompt_again_is_nearly_all_known(index: PrefixIndex) -> None:
    holder = index.join()
    names = list(range(1, 41))
    found = []
    for _ in range(5):
        found += depths(index, [holder], blocks(*names))
        for parent, name in zip([None, *names], names, strict=False):
            index.stored(holder, [name], parent, block(name))
    assert found == [0, 40, 40, 40, 40]


def test_kv_06_a_block_that_was_announced_for_two_windows_is_one_block(index: PrefixIndex) -> None:
    """What comes of windows that are passed on by mistake: same hash, same content, one removal ends it."""
    holder = index.join()
    for _ in (512, 8192):
        index.stored(holder, [7], None, block(1))
    assert depths(index, [holder], block(1)) == [1]
    index.removed(holder, [7])
    assert depths(index, [holder], block(1)) == [0]


def test_kv_07_an_unknown_block_does_not_end_a_removal(index: PrefixIndex) -> None:
    one, two = index.join(), index.join()
    for name in (1, 2, 3):
        index.stored(one, [name], None, block(name))
    index.stored(two, [1], None, block(1))
    index.removed(one, [1, 99, 3])
    assert [depths(index, [one, two], block(name)) for name in (1, 2, 3)] == [
        [0, 1],
        [1, 0],
        [0, 0],
    ]


def test_kv_07_a_worker_joins_while_much_is_being_cleaned_up(index: PrefixIndex) -> None:
    gone = index.join()
    n_blocks = 5000
    ids = np.arange(n_blocks * BLOCK_TOKENS, dtype=np.uint32).tobytes()
    index.stored(gone, range(n_blocks), None, ids)
    index.leave(gone)
    joined = index.join()
    index.stored(joined, [1], None, ids[: BLOCK_TOKENS * 4])
    assert index.n_pairs == n_blocks + 1, "joining cleans up nothing itself"
    assert depths(index, [gone, joined], ids) == [0, 1]
    n_steps = 0
    left = index.n_pairs
    while index.sweep(100):
        n_steps += 1
        assert left - index.n_pairs <= 100 // 20 * 1024 + 1024, "one step of a bounded size"
        left = index.n_pairs
    assert n_steps >= n_blocks // 100
    assert index.n_pairs == index.trie.n_blocks == 1


def test_kv_08_clear_all_empties_all_tiers_of_its_worker_only(index: PrefixIndex) -> None:
    one, two = index.join(), index.join()
    index.stored(one, [1], None, block(1))
    index.stored(one, [2], None, block(2), tier=HOST)
    index.stored(two, [1], None, block(1))
    index.cleared(one)
    assert [depths(index, [one, two], block(name)) for name in (1, 2)] == [[0, 1], [0, 0]]
    index.stored(one, [2], None, block(2))
    assert depths(index, [one, two], block(2)) == [1, 0]


def test_kv_13_a_block_from_the_middle_of_a_prompt_is_no_prefix(index: PrefixIndex) -> None:
    one, two = index.join(), index.join()
    index.stored(one, [1], None, block(1))
    index.stored(two, [2], None, block(2))
    assert depths(index, [one, two], blocks(2, 1)) == [0, 1]


@pytest.mark.parametrize("tier", [DEVICE, HOST])
def test_kv_14_signed_and_unsigned_hashes_are_the_same(index: PrefixIndex, tier: int) -> None:
    holder = index.join()
    index.stored(holder, [2**64 - 1], None, block(1), tier=tier)
    index.stored(holder, [-2], -1, block(2), tier=tier)
    assert depths(index, [holder], blocks(1, 2)) == [2]
    index.removed(holder, np.array([-2], np.int64))
    assert depths(index, [holder], blocks(1, 2)) == [1]
    index.removed(holder, [-1], tier=tier)
    assert depths(index, [holder], block(1)) == [0]
    assert index.trie.n_runs == 0


@pytest.mark.parametrize("hash_", [2**64, -(2**63) - 1])
def test_kv_14_a_number_of_more_than_64_bits_is_refused(index: PrefixIndex, hash_: int) -> None:
    holder = index.join()
    index.stored(holder, [1], None, block(1))
    with pytest.raises(ValueError, match="64-bit"):
        index.stored(holder, [hash_], None, block(1))
    with pytest.raises(ValueError, match="64-bit"):
        index.stored(holder, [2], hash_, block(2))
    with pytest.raises(ValueError, match="64-bit"):
        index.removed(holder, [hash_])
    assert depths(index, [holder], blocks(1, 2)) == [1]


def test_kv_18_what_does_not_fill_a_block_counts_for_nothing(index: PrefixIndex) -> None:
    holder = index.join()
    prompt = blocks(1, 2) + pack(5, 6)
    index.stored(holder, [1, 2], None, blocks(1, 2))
    with pytest.raises(ValueError, match="tokens"):
        index.stored(holder, [3], 2, pack(5, 6))
    match = index.match(prompt)
    assert match.n_blocks == 2
    assert depths(index, [holder], prompt) == [2]
    assert depths(index, [holder], prompt + block(3)) == [2]


def test_kv_19_eight_tasks_of_one_loop_leave_what_their_log_says() -> None:
    """4 change it and 4 look things up: no call waits, so on the loop's thread each is one step."""
    index = PrefixIndex(BLOCK_TOKENS, max_run_blocks=2)
    holders = [index.join() for _ in range(4)]
    log: list[tuple[int, bool, int, int | None]] = []

    def apply(
        to: PrefixIndex, on: Sequence[Holder], entry: tuple[int, bool, int, int | None]
    ) -> None:
        who, stores, name, parent = entry
        if stores:
            to.stored(on[who], [name], parent, block(name % 3))
        else:
            to.removed(on[who], [name])

    async def change(who: int) -> None:
        rng = random.Random(who)
        for _ in range(300):
            entry = (who, rng.random() < 0.7, rng.randrange(9), rng.choice((None, *range(9))))
            log.append(entry)
            apply(index, holders, entry)
            await anyio.lowlevel.checkpoint()

    async def look(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(300):
            n_held = [holder.n_blocks for holder in holders]
            found = depths(index, holders, blocks(*(rng.randrange(3) for _ in range(4))))
            assert all(depth <= n for depth, n in zip(found, n_held, strict=True))
            await anyio.lowlevel.checkpoint()

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            for number in range(4):
                tasks.start_soon(change, number)
                tasks.start_soon(look, number)

    anyio.run(main)
    assert len({who for who, *_ in log[:8]}) == 4, "the tasks take turns"
    replayed = PrefixIndex(BLOCK_TOKENS, max_run_blocks=2)
    again = [replayed.join() for _ in range(4)]
    for entry in log:
        apply(replayed, again, entry)
    assert index.n_pairs == replayed.n_pairs > 0
    for number in range(3**4):
        names = (number // 27, number // 9 % 3, number // 3 % 3, number % 3)
        tokens = blocks(*names)
        assert depths(index, holders, tokens) == depths(replayed, again, tokens)


def test_secmm_04_pictures_are_told_apart_by_what_and_where_they_are() -> None:
    """64 tokens of text, 128 placeholders; the key says which picture, and where in it a block begins."""
    index = PrefixIndex(32)
    holder = index.join()
    text, placeholders = pack(*range(64)), pack(*[9999] * 128)

    def keys(picture: str, start: int = 64) -> dict[int, bytes]:
        first, last = start // 32, (start + 127) // 32
        return {at: f"{picture} {at * 32 - start}".encode() for at in range(first, last + 1)}

    index.stored(holder, range(1, 7), None, text + placeholders, keys=keys("A"))
    bits = np.array([holder.bit])

    def depth(tokens: bytes, about: dict[int, bytes] | None) -> int:
        return int(index.match(tokens, keys=about).depths(bits)[0])

    assert depth(text + placeholders, keys("A")) == 6
    assert depth(text + placeholders, keys("B")) == 2
    assert depth(text + placeholders, None) == 2
    later = text + pack(*range(16)) + placeholders + pack(*range(16))
    assert depth(later, keys("A", start=80)) == 2
    swapped = {at: keys("A")[7 - at] for at in range(2, 6)}
    assert depth(text + placeholders, swapped) == 2


def test_secmm_05_keys_differ_by_any_of_their_bits(index: PrefixIndex) -> None:
    value = 0x0123_4567_89AB_CDEF
    spellings = [
        value.to_bytes(8, "big"),
        (value ^ 1 << 63).to_bytes(8, "big"),
        (value ^ 1 << 32).to_bytes(8, "big"),
        (value ^ 1).to_bytes(8, "big"),
        f"{value:016x}".encode(),
        f"{value:064x}".encode(),
        f"{value << 192:064x}".encode(),
        b"",
    ]
    holders = []
    for key in spellings:
        holders.append(index.join())
        index.stored(holders[-1], [1], None, block(1), keys={0: key})
    for at, key in enumerate(spellings):
        match = index.match(block(1), keys={0: key})
        found = match.depths(np.array([holder.bit for holder in holders]))
        assert found.tolist() == [int(at == other) for other in range(len(spellings))]
    assert depths(index, holders, block(1)) == [0] * len(spellings)


def test_secmm_04_the_text_around_a_picture_counts_as_well(index: PrefixIndex) -> None:
    holder = index.join()
    index.stored(holder, [1], None, block(1), keys={0: b"A"})
    found = [index.match(block(name), keys={0: b"A"}) for name in (1, 2)]
    assert [int(match.depths(np.array([holder.bit]))[0]) for match in found] == [1, 0]


def test_secmm_05_what_stands_in_for_a_block_is_no_prompt_that_a_vocabulary_can_spell(
    index: PrefixIndex,
) -> None:
    content = substituted(blocks(1, 2), {1: b"picture"}, BLOCK_TOKENS * 4)
    words = np.frombuffer(content, np.uint32)
    assert content[: BLOCK_TOKENS * 4] == block(1)
    assert (words[BLOCK_TOKENS:] >= 2**31).all()


def test_secmm_06_each_adapter_matches_its_own_worker_only(index: PrefixIndex) -> None:
    roots = [Root(), Root("7"), Root("8"), Root("", "7")]
    holders = [index.join() for _ in roots]
    for root, holder in zip(roots, holders, strict=True):
        index.stored(holder, [1], None, block(1), root=root)
        # Below a parent, the parent's root counts.
        index.stored(holder, [2], 1, block(2))
    for at, root in enumerate(roots):
        wanted = [2 * (at == other) for other in range(len(roots))]
        assert depths(index, holders, blocks(1, 2), root) == wanted


@pytest.mark.parametrize("keys", [{-1: b"x"}])
def test_a_negative_block_number_is_refused(index: PrefixIndex, keys: dict[int, bytes]) -> None:
    holder = index.join()
    refused = partial(pytest.raises, ValueError, match="negative")
    with refused():
        index.stored(holder, [1], None, block(1), keys=keys)
    with refused():
        index.match(block(1), keys=keys)


def test_a_holder_that_left_takes_nothing(index: PrefixIndex) -> None:
    holder = index.join()
    index.stored(holder, [1], None, block(1))
    index.leave(holder)
    for change in (
        lambda: index.stored(holder, [1], None, block(1)),
        lambda: index.stored(holder, [2], 1, block(2)),
        lambda: index.cleared(holder),
    ):
        with pytest.raises(ValueError, match="left"):
            change()
    index.removed(holder, [1])
    assert holder.n_blocks == 0


def test_a_comb_of_runs_is_walked_to_the_hop_cap_only() -> None:
    index = PrefixIndex(1, max_hops=8)
    holder = index.join()
    for at in range(1, 20):
        # Every second one first, so that the next cannot go on in the same run.
        index.stored(holder, [1000 + at], at - 1 if at > 1 else None, pack(1000 + at))
        index.stored(holder, [at], at - 1 if at > 1 else None, pack(at))
    match = index.match(pack(*range(1, 20)))
    assert match.capped
    assert match.depths(np.array([holder.bit])).tolist() == [8]


def test_a_tail_that_a_hole_kept_goes_when_the_hole_is_filled(index: PrefixIndex) -> None:
    short, long = index.join(), index.join()
    index.stored(short, [1, 2, 3], None, blocks(1, 2, 3))
    index.stored(long, [1, 2, 3, 4, 5], None, blocks(1, 2, 3, 4, 5))
    index.removed(short, [2])
    index.removed(long, [5, 4, 3, 2, 1])
    index.stored(short, [2], 1, block(2))
    assert index.trie.n_blocks == 3


@pytest.mark.parametrize("n_holders", [3, 40, 300])
def test_every_holder_has_its_own_depth_however_many_there_are(n_holders: int) -> None:
    index = PrefixIndex(1)
    holders = [index.join() for _ in range(n_holders)]
    tokens = pack(*range(n_holders))
    for depth, holder in enumerate(holders):
        index.stored(holder, range(depth), None, tokens[: 4 * depth])
        index.stored(
            holder,
            range(depth, n_holders),
            None if not depth else depth - 1,
            tokens[4 * depth :],
            tier=HOST,
        )
    bits = np.array([holder.bit for holder in holders])
    match = index.match(tokens)
    assert match.both_depths(bits)[1].tolist() == list(range(n_holders))
    assert match.depths(bits).tolist() == [n_holders] * n_holders


def test_a_full_index_takes_no_more_until_something_is_removed() -> None:
    index = PrefixIndex(BLOCK_TOKENS, max_pairs=2)
    holder = index.join()
    index.stored(holder, [1, 2], None, blocks(1, 2))
    index.stored(holder, [3], 2, block(3))
    assert (holder.n_dropped, holder.has_gap, index.n_pairs) == (1, True, 2)
    index.removed(holder, [2], tier=DEVICE)
    index.stored(holder, [4], 1, block(4))
    assert depths(index, [holder], blocks(1, 4)) == [2]
