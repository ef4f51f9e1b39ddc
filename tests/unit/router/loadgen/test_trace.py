"""The request trace: its format, its prompts, its arrivals, and the packaged sample."""

import json
import random
from collections import Counter
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slagate.pools.fleet_file.load import load_config
from slagate.router.loadgen.trace import (
    SLA_CLASSES,
    Arrival,
    TraceError,
    TraceRequest,
    arrivals,
    load_trace,
    prompt_tokens,
    splitmix64,
)

VOCAB_SIZE = 128_256
SAMPLE = load_trace()


def request(timestamp_ms: float, isl_tokens: int, *hash_ids: int) -> TraceRequest:
    return TraceRequest(timestamp_ms, isl_tokens, 10, hash_ids)


# --- the sample ------------------------------------------------------------------------------------


def block_reuse_ratio(trace: list[TraceRequest]) -> float:
    """Share of prompt blocks that are part of a prefix of an earlier request."""
    seen: set[int] = set()
    n_blocks = n_reused = 0
    for one in trace:
        known = [h in seen for h in one.hash_ids]
        n_reused += [*known, False].index(False)
        n_blocks += len(known)
        seen.update(one.hash_ids)
    return n_reused / n_blocks


@pytest.mark.parametrize("count", [300, len(SAMPLE)])
def test_sample_reuses_a_quarter_of_its_prompt_blocks(count: int) -> None:
    assert count <= len(SAMPLE)
    assert block_reuse_ratio(SAMPLE[:count]) >= 0.25


def test_sample_page_states_what_is_in_the_file() -> None:
    page = (files("slagate.configs") / "traces" / "README.md").read_text()
    words = " ".join(page.split())
    isl, osl = ([one[at] for one in SAMPLE] for at in (1, 2))
    for fact in (
        f"{len(SAMPLE)} requests, {len({one.conversation for one in SAMPLE})} whole conversations",
        f"{sum(isl):,} prompt tokens, {sum(osl):,} output tokens",
        f"(longest prompt {max(isl):,}, longest output {max(osl)})",
        f"{block_reuse_ratio(SAMPLE):.1%}".replace("%", " %"),
    ):
        assert fact in words


def test_sample_keeps_to_the_rule_it_was_chosen_by() -> None:
    conversations: dict[int, list[TraceRequest]] = {}
    for one in SAMPLE:
        conversations.setdefault(one.conversation, []).append(one)
    for turns in conversations.values():
        assert 2 <= len(turns) <= 8
        assert max(turn.isl_tokens for turn in turns) <= 16_384
        assert sum(turn.osl_tokens for turn in turns) <= 350 * len(turns)
    assert max(one.timestamp_ms for one in SAMPLE) <= 1_200_000


@pytest.mark.parametrize("count", [300, len(SAMPLE)])
@pytest.mark.parametrize("seed", range(3))
def test_each_demo_pool_gets_a_tenth_of_the_sample(count: int, seed: int) -> None:
    stages = load_config(str(files("slagate.configs") / "grids" / "demo.json")).stages
    chosen: Counter[str] = Counter()
    for one in list(arrivals(SAMPLE, compression=1, rng=random.Random(seed)))[:count]:
        asked = {
            "isl": one.trace.isl_tokens,
            "context_length": one.trace.isl_tokens,
            "ttft_ms": one.sla.ttft_ms,
            "itl_ms": one.sla.itl_ms,
        }
        chosen.update(grid.pool_names[grid.select(asked).pool] for grid in stages.values())
    names = {name for grid in stages.values() for name in grid.pool_names}
    assert {name for name in names if chosen[name] * 10 >= count} == names


# --- prompts ---------------------------------------------------------------------------------------


def test_splitmix64_gives_the_published_outputs() -> None:
    assert splitmix64([0, 1234567], 3).tolist() == [
        [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F],
        [6457827717110365317, 3203168211198807973, 9817491932198370423],
    ]


def test_prompt_is_pinned() -> None:
    """Every machine must build the same prompts: figures of two runs could not be compared otherwise."""
    tokens = prompt_tokens(request(0, 514, 0, 2**64 - 1), VOCAB_SIZE)
    assert tokens.dtype == np.uint32
    assert tokens[:2].tolist() == [0xE220A8397B1DCDAF % VOCAB_SIZE, 0x6E789E6AA1B965F4 % VOCAB_SIZE]
    assert tokens[512:].tolist() == [n % VOCAB_SIZE for n in splitmix64([2**64 - 1], 2)[0].tolist()]


@settings(max_examples=60)
@given(
    ids=st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=5, unique=True),
    cut=st.integers(0, 511),
    shared=st.integers(0, 4),
    vocab_size=st.integers(1_000, 2**32),
)
def test_equal_leading_ids_are_equal_tokens_and_no_more(
    ids: list[int], cut: int, shared: int, vocab_size: int
) -> None:
    isl_tokens = 512 * len(ids) - cut
    tokens = prompt_tokens(request(0, isl_tokens, *ids), vocab_size)
    assert tokens.shape == (isl_tokens,)
    assert int(tokens.max()) < vocab_size
    n_shared = min(shared, len(ids))
    other_ids = [*ids[:n_shared], *((h + 1) % 2**64 for h in ids[n_shared:])]
    other = prompt_tokens(request(0, isl_tokens, *other_ids), vocab_size)
    same = 512 * n_shared
    assert np.array_equal(tokens[:same], other[:same])
    # A few equal tokens are chance in the smallest vocabulary, a run of equal ones is not.
    assert isl_tokens - same < 8 or not np.array_equal(
        tokens[same : same + 8], other[same : same + 8]
    )


# --- arrivals --------------------------------------------------------------------------------------


def test_arrivals_start_at_zero_and_are_compressed() -> None:
    trace = [request(6000, 600, 0, 1), request(6000, 600, 0, 2), request(18_000, 600, 0, 1)]
    replay = list(arrivals(trace, compression=4, rng=random.Random(1)))
    assert [(one.arrival_s, one.trace) for one in replay] == list(
        zip((0, 0, 3), trace, strict=True)
    )


def test_turns_of_a_conversation_are_of_one_class() -> None:
    classes: dict[int, set[str]] = {}
    for one in arrivals(SAMPLE, compression=1, rng=random.Random(7)):
        classes.setdefault(one.trace.conversation, set()).add(one.sla.name)
    assert {len(names) for names in classes.values()} == {1}


def test_classes_share_the_conversations_evenly_and_follow_the_seed() -> None:
    trace = [request(0, 600, 0, n) for n in range(1, 31)]

    def drawn(seed: int) -> list[Arrival]:
        return list(arrivals(trace, compression=1, rng=random.Random(seed)))

    assert Counter(one.sla for one in drawn(1)) == dict.fromkeys(SLA_CLASSES, 10)
    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


def test_a_one_block_prompt_is_a_conversation_of_its_block() -> None:
    assert request(0, 512, 7).conversation == 7
    assert request(0, 513, 7, 8).conversation == 8


# --- errors ----------------------------------------------------------------------------------------

GOOD = {"timestamp": 1, "input_length": 513, "output_length": 2, "hash_ids": [0, 1]}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"timestamp": None}, "timestamp: must be a number of ms"),
        ({"timestamp": True}, "timestamp: must be a number of ms"),
        ({"timestamp": float("nan")}, "timestamp: must be finite and not negative (got nan)"),
        ({"timestamp": -1}, "timestamp: must be finite and not negative (got -1)"),
        ({"timestamp": 0}, "timestamp: is before that of the line above"),
        ({"input_length": 0}, "input_length: must be a positive integer (got 0)"),
        ({"input_length": 5.0}, "input_length: must be a positive integer (got 5.0)"),
        ({"output_length": None}, "output_length: must be a positive integer (got null)"),
        ({"output_length": True}, "output_length: must be a positive integer (got true)"),
        ({"hash_ids": 3}, "hash_ids: must be a list of integers"),
        ({"hash_ids": [0, -1]}, "hash_ids: must be a list of integers"),
        ({"hash_ids": [0, 2**64]}, "hash_ids: must be a list of integers"),
        ({"hash_ids": [0]}, "hash_ids: 513 prompt tokens have 2 blocks (got 1 ids)"),
    ],
)
def test_an_error_names_line_and_field(
    tmp_path: Path, change: dict[str, object], said: str
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n{json.dumps(GOOD | change)}\n")
    with pytest.raises(TraceError) as caught:
        load_trace(path)
    assert str(caught.value).startswith(f"{path}:2: {said}")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "holds no request"),
        (b"\xff\n", "is not UTF-8 (byte 0)"),
        (b"{\n", "1: is not JSON"),
        (b"[]\n", "1: must be an object"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(content)
    with pytest.raises(TraceError) as caught:
        load_trace(path)
    assert said in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"none\.jsonl: No such file"):
        load_trace(tmp_path / "none.jsonl")
