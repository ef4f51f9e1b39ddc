"""What KV events of all shapes make of the prefix index."""

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

from slagate.pools.kv_events.apply import identity
from slagate.pools.kv_events.decode import (
    MAX_EVENT_BYTES,
    PIECE_BYTES,
    PIECE_EVENTS,
    parse,
    pieces,
    read_head,
)
from slagate.pools.prefix.trie import Root
from slagate.proto import openengine_pb2 as oe
from slagate.workers.runtime.virtual_loop import run
from support.kv.followed import (
    BLOCK_TOKENS,
    CLEARED,
    SETTLE_S,
    Followed,
    batch,
    depth_of,
    followed,
    name,
    packed,
    removed,
    saying,
    stored,
    tokens_of,
)
from support.worker.fake import HANG, FakeWorker

GPU, CPU, DISK = (
    oe.STORAGE_MEDIUM_GPU,
    oe.STORAGE_MEDIUM_CPU_PINNED,
    oe.STORAGE_MEDIUM_DISK,
)


@asynccontextmanager
async def after(*events: oe.KvEvent) -> AsyncIterator[Followed]:
    """What is known after these events."""
    async with followed(saying((batch(0, CLEARED, *events),))) as of:
        yield of


def test_kv_08_a_clearing_empties_the_worker_in_all_tiers_and_no_other() -> None:
    async def main() -> None:
        one = saying((batch(0, CLEARED, stored(1), stored(2, medium=CPU)),))
        async with followed(one) as first:
            other = saying((batch(0, CLEARED, stored(1)),))
            async with followed(other, index=first.index, turns=first.turns) as second:
                one.kv_calls[0].say(batch(1, CLEARED))
                await anyio.sleep(SETTLE_S)
                assert [first.depth(n) for n in (1, 2)] == [0, 0]
                assert second.depth(1) == 1
                one.kv_calls[0].say(batch(2, stored(2)))
                await anyio.sleep(SETTLE_S)
                assert [first.depth(n) for n in (1, 2)] == [0, 1]

    run(main)


def test_kv_07_unknown_blocks_in_a_removal_do_not_save_the_others() -> None:
    async def main() -> None:
        one = saying((batch(0, CLEARED, stored(1), stored(2), stored(3), removed(1, 77, 3)),))
        async with followed(one) as first:
            other = saying((batch(0, CLEARED, stored(1)),))
            async with followed(other, index=first.index, turns=first.turns) as second:
                assert [first.depth(n) for n in (1, 2, 3)] == [0, 1, 0]
                assert second.depth(1) == 1

    run(main)


@pytest.mark.parametrize(
    ("told", "untold"),
    [
        (name(2**64 - 1), name(-1)),
        (name(b"18446744073709551615", "string"), name(b"-1", "string")),
        (name(b"18446744073709551615", "string"), name(-1)),
        (name(b"00000007", "string"), name(7)),
        (name(b"a digest of any length", "bytes"), name(b"a digest of any length", "bytes")),
        (name(b"12345678", "bytes"), name(b"12345678", "engine_specific")),
    ],
)
def test_kv_14_spellings_of_one_hash_meet(told: oe.KvBlockHash, untold: oe.KvBlockHash) -> None:
    async def main() -> None:
        chain = stored(told, 5, tokens=tokens_of(1, 2))
        async with after(chain, stored(3, after=told)) as of:
            assert of.depth(1, 2) == 2
            assert of.depth(1, 3) == 2
        async with after(chain, removed(untold)) as of:
            assert of.depth(1, 2) == 0

    run(main)


def test_hashes_of_mixed_lengths_are_told_apart_within_an_event() -> None:
    async def main() -> None:
        odd = [name(b"1234567", "bytes"), name(b"123456789", "bytes"), name(3)]
        async with after(stored(*odd, tokens=tokens_of(1, 2, 3)), removed(odd[1])) as of:
            assert (of.depth(1, 2, 3), of.events.n_blocks) == (1, 2)

    run(main)


def test_digests_are_keyed_so_that_nobody_can_aim_at_another_hash() -> None:
    async def main() -> None:
        guess = hashlib.blake2b(b"some name", digest_size=8).digest()
        async with after(
            stored(name(b"some name", "bytes"), tokens=tokens_of(1)), removed(name(guess))
        ) as of:
            assert of.depth(1) == 1

    run(main)


def test_kv_18_a_block_without_all_its_tokens_gives_no_credit_nor_does_what_follows_it() -> None:
    async def main() -> None:
        tail = tokens_of(1, 2, 3)[: 2 * BLOCK_TOKENS + 1]
        async with after(stored(1, 2, 3, tokens=tail), stored(9, after=3)) as of:
            assert of.depth(1, 2, 3) == 2
            assert (of.events.n_blocks, of.events.n_errors) == (2, 0)

    run(main)


@pytest.mark.parametrize(
    "event",
    [
        stored(1, tokens=tokens_of(1, 2)),
        stored(1, keys=[["a"], ["b"]]),
        oe.KvEvent(request_id="r"),
    ],
)
def test_kv_03_an_event_that_contradicts_itself_is_counted_and_the_next_is_applied(
    event: oe.KvEvent,
) -> None:
    async def main() -> None:
        async with after(event, stored(5)) as of:
            assert (of.depth(1), of.depth(5), of.events.n_errors) == (0, 1, 1)

    run(main)


def test_tiers_follow_the_medium_and_a_removal_without_one_is_from_everywhere() -> None:
    async def main() -> None:
        async with after(
            stored(1, medium=oe.STORAGE_MEDIUM_UNSPECIFIED),
            stored(2, after=1, medium=CPU),
            stored(3, after=2, medium=DISK),
        ) as of:
            assert (of.depth(1, 2, 3), of.depth(1, 2, 3, device=True)) == (3, 1)
            # A move: stored in the new tier, then removed from the old one.
        async with after(stored(1), stored(1, medium=CPU), removed(1, medium=GPU)) as of:
            assert (of.depth(1), of.depth(1, device=True)) == (1, 0)
        async with after(stored(1), stored(1, medium=CPU), removed(1, medium=DISK)) as of:
            assert (of.depth(1), of.depth(1, device=True)) == (1, 1)
        async with after(stored(1), stored(1, medium=CPU), removed(1)) as of:
            assert of.depth(1) == 0

    run(main)


def test_t2_6_a_move_between_two_colder_media_leaves_a_block_where_it_is() -> None:
    """It is stored in the one before it leaves the other, and both are one tier here."""

    async def main() -> None:
        down = (stored(1, medium=CPU), stored(1, medium=DISK), removed(1, medium=CPU))
        back = (stored(1, medium=CPU), removed(1, medium=DISK))
        for events, depth in (
            (down, 1),
            ((*down, removed(1, medium=DISK)), 0),
            ((*down, *back), 1),
            ((*down, *back, removed(1, medium=CPU)), 0),
            ((*down, removed(1)), 0),
            ((*down, CLEARED, stored(1, medium=CPU), removed(1, medium=CPU)), 0),
        ):
            async with after(*events) as of:
                assert (of.depth(1), of.depth(1, device=True)) == (depth, 0)

    run(main)


def test_kv_06_only_full_attention_counts() -> None:
    async def main() -> None:
        async with after(
            stored(1, kv_cache_spec_sliding_window=512),
            stored(2, group_idx=1),
            stored(3),
            removed(3, group_idx=1),
        ) as of:
            assert [of.depth(n) for n in (1, 2, 3)] == [0, 0, 1]

    run(main)


def test_kv_17_an_adapter_is_a_tree_of_its_own_however_often_it_is_named() -> None:
    async def main() -> None:
        async with after(stored(1, 2, lora_name="style-a", keys=[["style-a"], ["style-a"]])) as of:
            assert of.depth(1, 2, root=Root(lora_name="style-a")) == 2
            assert of.depth(1, 2) == 0

    run(main)


def test_an_adapter_without_a_name_is_not_the_base_model() -> None:
    async def main() -> None:
        async with after(stored(1, lora_id=3)) as of:
            assert (of.depth(1), of.events.n_blocks) == (0, 1)

    run(main)


def test_a_cache_salt_is_a_tree_of_its_own() -> None:
    async def main() -> None:
        salted = [["cache_salt=s=1"], ["cache_salt=s=1"]]
        async with after(stored(1, 2, keys=salted), stored(3, after=2, keys=salted[:1])) as of:
            assert of.depth(1, 2, 3, root=Root(cache_salt="s=1")) == 3
            assert of.depth(1, 2, 3) == 0

    run(main)


def test_other_extra_keys_stand_for_the_blocks_content() -> None:
    async def main() -> None:
        keys = [["cache_salt=s"], ["cache_salt=s", "mm=abc@1", "token_extra=7@0"], ["cache_salt=s"]]
        async with after(stored(1, 2, 3, keys=keys)) as of:
            root = Root(cache_salt="s")
            assert of.depth(1, 2, 3, root=root) == 1
            picture = {1: identity(["mm=abc@1", "token_extra=7@0"])}
            match = of.index.match(packed(1, 2, 3), root, keys=picture)
            assert depth_of(match, of.holder()) == 3

    run(main)


def test_extra_keys_stay_with_their_blocks_when_a_long_chain_is_cut() -> None:
    async def main() -> None:
        n_blocks = 3000
        blocks = list(range(1, n_blocks + 1))
        keys = [[f"mm={block}@0"] if block == 2500 else [] for block in blocks]
        async with after(stored(*blocks, keys=keys)) as of:
            assert of.depth(*blocks) == 2499
            match = of.index.match(packed(*blocks), keys={2499: identity(["mm=2500@0"])})
            assert depth_of(match, of.holder()) == n_blocks

    run(main)


def many(n_events: int) -> list[oe.KvEvent]:
    return [stored(n) for n in range(1, n_events + 1)]


@pytest.mark.parametrize("n_events", [1, PIECE_EVENTS - 1, PIECE_EVENTS, PIECE_EVENTS + 1, 1000])
def test_every_event_of_a_batch_is_applied_once_wherever_it_is_cut(n_events: int) -> None:
    async def main() -> None:
        async with after(*many(n_events)) as of:
            assert of.events.n_events == n_events + 1
            assert of.events.n_blocks == n_events
            assert all(of.depth(n) == 1 for n in range(1, n_events + 1))

    run(main)


def test_an_event_larger_than_a_piece_is_applied_whole_between_its_neighbours() -> None:
    async def main() -> None:
        blocks = list(range(10, 3000))
        big, gone = stored(*blocks), removed(*blocks[1000:])
        assert min(big.ByteSize(), gone.ByteSize()) > PIECE_BYTES
        async with after(stored(1), big, stored(2)) as of:
            assert of.events.n_blocks == len(blocks) + 2
            assert of.depth(*blocks) == len(blocks)
        async with after(stored(1), big, gone, stored(2)) as of:
            assert of.depth(*blocks) == 1000
            assert (of.depth(1), of.depth(2)) == (1, 1)

    run(main)


def test_pieces_are_whole_events_and_small_where_events_are() -> None:
    events = [
        *many(300),
        stored(*range(1000, 4000)),
        *many(3),
        *(stored(*range(at, at + 100)) for at in range(5000, 9000, 100)),
    ]
    message = batch(7, *events).SerializeToString()
    head = read_head(message)
    assert not isinstance(head, oe.EngineError)
    cut = list(pieces(message, head))
    parsed = [list(parse(message, piece)) for piece in cut]
    assert [event for part in parsed for event in part] == events
    for piece, part in zip(cut, parsed, strict=True):
        assert len(part) <= PIECE_EVENTS
        assert piece.n_bytes <= PIECE_BYTES or len(part) == 1
    assert max(map(len, parsed)) == PIECE_EVENTS


def framed(number: int, body: bytes) -> bytes:
    return bytes([number << 3 | 2]) + _varint(len(body)) + body


def _varint(value: int) -> bytes:
    out = b""
    while value >= 0x80:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


EVENT = framed(4, stored(1).SerializeToString())
NEXT = b"\x08\x01"
FIELDS_OF_A_LATER_REVISION = b"\x78\x96\x01" + framed(14, b"xyz") + b"\x7d1234" + b"\x7912345678"


def test_fields_of_a_later_revision_are_passed_over() -> None:
    async def main() -> None:
        later = FIELDS_OF_A_LATER_REVISION
        message = framed(1, b"\x08\x07" + later + EVENT + later + later)
        async with followed(saying((message,))) as of:
            assert (of.depth(1), of.events.n_errors) == (1, 0)
            assert of.events.ranks[0].next_number == 8

    run(main)


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (b"", "neither a batch nor an error"),
        (b"\xff", "neither a batch nor an error"),
        (framed(1, EVENT)[:-1], "a batch of another length than it says"),
        (framed(1, EVENT) + b"\x0a", "a batch of another length than it says"),
        (b"\x0a" + b"\xff" * 11, "a number of more than 64 bits"),
        (b"\x0a", "ends in the middle of a number"),
        (framed(1, b"\x08"), "ends in the middle of a number"),
        (framed(1, NEXT + EVENT + b"\x08\x05"), "the head of a batch behind its events"),
        (framed(1, NEXT + EVENT[:-1]), "an event of 35 bytes"),
        (framed(1, NEXT + framed(4, b"\xff")), "no KvEventBatch"),
        (framed(1, b"\x7b"), "a field of wire type 3"),
        (framed(1, b"\x7d12"), "ends in the middle of a field"),
        (framed(1, NEXT + framed(4, bytes(MAX_EVENT_BYTES + 1))), "an event of 1048577 bytes"),
        (framed(2, b"\xff"), "no SubscribeKvEventsResponse"),
    ],
)
def test_what_is_no_batch_is_counted_and_ends_the_stream(message: bytes, why: str) -> None:
    async def main() -> None:
        worker = FakeWorker(kv_scripts=[(batch(0, stored(5)), message, HANG)])
        async with followed(worker) as of:
            assert of.events.reason == f"undecodable batch: {why}"
            assert (of.events.n_errors, of.depth(5)) == (1, 0)
            assert worker.kv_calls[0].cancelled

    run(main)
