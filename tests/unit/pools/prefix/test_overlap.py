"""What is cached of a prompt: by events, by what was just sent, and never mixed up."""

import random

import numpy as np
import pytest

from slagate.pools.fleet.pool import Pool
from slagate.pools.grid.grid import Stage
from slagate.pools.inflight.engine_queue import Work
from slagate.pools.prefix.index import DEVICE, HOST
from slagate.pools.prefix.overlap import _FEW_EXPECTED, CONFIRM_S, HISTORY_S, Prompt
from slagate.pools.prefix.trie import Root
from slagate.proto import openengine_pb2 as oe
from support.builders import MODEL, model_info, profiled

BLOCK = 32


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def pool(n: int = 2, *, clock: Clock | None = None, stage: Stage = Stage.PREFILL) -> Pool:
    made = Pool(
        "pool",
        stage=stage,
        index=0,
        estimator=profiled(),
        now_s=clock or Clock(),
    )
    for number in range(n):
        made.join(f"w{number}:1")
    for member in made.members.values():
        member.set_models({MODEL: model_info()})
        member.probe_ok()
    return made


def prompt(n_tokens: int, *, first: int = 0, root: Root | None = None) -> Prompt:
    tokens = np.arange(first, first + n_tokens, dtype="<u4").tobytes()
    return Prompt(tokens, root or Root())


def follow(of: Pool, row: int, n_tokens: int, *, tier: int = DEVICE, first: int = 0) -> None:
    """A row with events, that has stored the first tokens of `prompt`."""
    assert of.overlaps is not None
    index = of.overlaps.index_of(BLOCK)
    holder = index.join()
    of.overlaps.set_holder(row, holder, block_tokens=BLOCK)
    tokens = prompt(n_tokens, first=first).tokens
    index.stored(holder, range(1, n_tokens // BLOCK + 1), None, tokens, tier=tier)


def cached(of: Pool, asked: Prompt | None) -> list[tuple[int, int]]:
    view = of.snapshot(asked)
    return list(
        zip(view.cached.device_tokens.tolist(), view.cached.host_tokens.tolist(), strict=True)
    )


def test_events_count_full_blocks_and_never_the_last_token() -> None:
    of = pool()
    follow(of, 0, 64)
    assert cached(of, prompt(100)) == [(64, 0), (0, 0)]
    assert cached(of, prompt(65)) == [(64, 0), (0, 0)]
    assert cached(of, prompt(64)) == [(63, 0), (0, 0)]
    assert cached(of, prompt(63)) == [(32, 0), (0, 0)]
    assert cached(of, prompt(1)) == [(0, 0), (0, 0)]
    assert cached(of, prompt(100, first=1)) == [(0, 0), (0, 0)]
    assert cached(of, prompt(100, root=Root("adapter"))) == [(0, 0), (0, 0)]
    assert cached(of, None) == [(0, 0), (0, 0)]


def test_what_lies_on_the_host_is_told_apart() -> None:
    of = pool(1)
    follow(of, 0, 64, tier=HOST)
    assert cached(of, prompt(100)) == [(0, 64)]
    # A whole prompt on the host: still the last token is computed.
    assert cached(of, prompt(64)) == [(0, 63)]


def test_a_row_that_was_cleared_or_has_no_events_has_nothing() -> None:
    of = pool()
    assert of.overlaps is not None
    follow(of, 0, 64)
    index = of.overlaps.index_of(BLOCK)
    (holder,) = of.overlaps._holders.values()
    assert cached(of, prompt(100)) == [(64, 0), (0, 0)]
    index.cleared(holder)
    # Another one has the bit that it had, and the row is not told.
    other = index.join()
    index.stored(other, range(1, 3), None, prompt(64).tokens)
    assert cached(of, prompt(100)) == [(0, 0), (0, 0)]
    index.leave(other)
    # The bit that it had is another row's by now.
    follow(of, 1, 64)
    assert cached(of, prompt(100)) == [(0, 0), (64, 0)]
    index.stored(holder, [7], None, prompt(32).tokens)
    assert cached(of, prompt(100)) == [(32, 0), (64, 0)]
    of.overlaps.set_holder(1, None, block_tokens=BLOCK)
    assert cached(of, prompt(100)) == [(32, 0), (0, 0)]


def test_rows_of_different_block_sizes_each_count_by_their_own() -> None:
    of = pool()
    assert of.overlaps is not None
    follow(of, 0, 96)
    wide = of.overlaps.index_of(64)
    holder = wide.join()
    of.overlaps.set_holder(1, holder, block_tokens=64)
    wide.stored(holder, [1], None, prompt(64).tokens)
    assert cached(of, prompt(100)) == [(96, 0), (64, 0)]


@pytest.mark.parametrize(("events", "keep_s"), [(True, CONFIRM_S), (False, HISTORY_S)])
def test_what_was_sent_is_expected_for_a_while(*, events: bool, keep_s: float) -> None:
    clock = Clock()
    of = pool(clock=clock)
    if events:
        follow(of, 0, 0)
    asked = prompt(100)
    lease = of.lease(0, Work(100, 0.1, 0), asked)
    assert cached(of, asked) == [(96, 0), (0, 0)]
    clock.now_s += 30  # it waits in the worker's queue
    lease.prefill_done()
    lease.release()
    clock.now_s += keep_s - 0.5
    assert cached(of, asked) == [(96, 0), (0, 0)]
    clock.now_s += 1
    assert cached(of, asked) == [(0, 0), (0, 0)]


def test_what_was_sent_and_not_processed_is_expected_no_more() -> None:
    of = pool()
    of.lease(0, Work(100, 0.1, 0), prompt(100)).release()
    assert cached(of, prompt(100)) == [(0, 0), (0, 0)]


def test_a_restart_forgets_what_was_sent() -> None:
    of = pool()
    of.lease(0, Work(100, 0.1, 0), prompt(100))
    of.lease(1, Work(100, 0.1, 0), prompt(100))
    of.members["w0:1"].set_server_info(oe.ServerInfo())
    of.worker_replaced(of.members["w0:1"])
    assert cached(of, prompt(100)) == [(0, 0), (96, 0)]


def test_no_more_is_expected_of_a_worker_than_its_cache_holds() -> None:
    of = pool()
    member = of.members["w0:1"]
    capacity = oe.DeploymentCapacity(total_kv_blocks=6, kv_block_size=BLOCK)
    member.set_server_info(oe.ServerInfo(capacity=capacity))
    of.worker_replaced(member)
    for first in (0, 1000, 2000):
        of.lease(0, Work(100, 0.1, 0), prompt(100, first=first)).prefill_done()
    shown = [cached(of, prompt(100, first=first))[0] for first in (0, 1000, 2000)]
    assert shown == [(0, 0), (96, 0), (96, 0)]


def test_what_is_expected_no_more_takes_no_memory_though_nobody_asks() -> None:
    clock = Clock()
    of = pool(clock=clock)
    assert of.overlaps is not None
    for first in range(0, 10_000, 100):
        of.lease(0, Work(100, 0.1, 0), prompt(100, first=first)).prefill_done()
    (cache,) = of.overlaps._caches.values()
    assert len(cache.predictions) == 100
    clock.now_s += HISTORY_S + 1
    of.expire_predictions()
    assert (len(cache.predictions), cache.predictions.trie.n_runs) == (0, 0)


def test_the_deeper_of_event_and_expectation_counts() -> None:
    of = pool(1)
    follow(of, 0, 64)
    of.lease(0, Work(100, 0.1, 0), prompt(40))
    assert cached(of, prompt(200)) == [(64, 0)]
    of.lease(0, Work(100, 0.1, 0), prompt(130))
    assert cached(of, prompt(200)) == [(128, 0)]
    # I6: the index itself knows nothing of it.
    assert of.overlaps is not None
    assert of.overlaps.index_of(BLOCK).n_pairs == 2


def test_a_decode_pool_and_one_without_prefix_know_of_no_cache() -> None:
    assert pool(stage=Stage.DECODE).overlaps is None
    of = Pool("p", stage=Stage.AGG, index=0, estimator=profiled(), prefix=False)
    of.join("w:1")
    assert of.overlaps is None
    assert cached(of, prompt(100)) == [(0, 0)]


@pytest.mark.parametrize("few", [_FEW_EXPECTED, 0])
def test_a_row_has_the_deeper_of_its_events_and_of_what_is_expected(
    few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the rows with something expected are looked at one by one or all together."""
    monkeypatch.setattr("slagate.pools.prefix.overlap._FEW_EXPECTED", few)
    seed = random.randrange(10**6)
    chance = random.Random(seed)
    for _ in range(150):
        of = pool(6)
        on_device, anywhere = [0] * 6, [0] * 6
        for row in range(4):
            held, tier = BLOCK * chance.randrange(6), chance.choice([DEVICE, HOST])
            follow(of, row, held, tier=tier)
            on_device[row], anywhere[row] = held if tier == DEVICE else 0, held
        for _ in range(chance.randrange(5)):
            row, sent = chance.randrange(6), BLOCK * chance.randrange(1, 6)
            of.lease(row, Work(), prompt(sent + chance.randrange(2)))
            on_device[row] = max(sent, on_device[row])
            anywhere[row] = max(sent, anywhere[row])
        n_asked = BLOCK * chance.randrange(1, 6) + chance.randrange(2)
        found = of.snapshot(prompt(n_asked)).cached
        assert found.device_tokens.tolist() == shown_of(on_device, n_asked), seed
        assert found.cached_tokens.tolist() == shown_of(anywhere, n_asked), seed
        depths = [found.depths[at] for at in found.places]
        assert depths == found.cached_tokens.tolist(), seed
        assert list(found.depths) == sorted(set(depths)), seed
        assert found.has_host == bool(found.host_tokens.any()), seed


def shown_of(tokens: list[int], n_asked: int) -> list[int]:
    """What rows with so many tokens have of a prompt of `n_asked`: full blocks, never all of it."""
    return [min(n, n_asked // BLOCK * BLOCK, n_asked - 1) for n in tokens]


def test_answers_that_are_kept_are_nobodys_to_change_and_end_with_what_they_came_from() -> None:
    of = pool()
    follow(of, 0, 64)
    first = of.snapshot(prompt(100)).cached
    assert of.snapshot(prompt(100)).cached is first
    with pytest.raises(ValueError, match="read-only"):
        first.cached_tokens[0] = 1
    assert cached(of, prompt(64)) == [(63, 0), (0, 0)]
    assert cached(of, prompt(100)) == [(64, 0), (0, 0)]
    assert of.overlaps is not None
    of.overlaps.set_holder(0, None, block_tokens=BLOCK)
    assert cached(of, prompt(100)) == [(0, 0), (0, 0)]
