"""What requests to come will need: how long their answers are, and room for protected classes."""

import math
import random

import pytest

from slagate.pools.inflight.demand import (
    BURST,
    FIRST_SHARE,
    FIRST_TOKENS,
    LEAST_SHARE,
    N_FIRST,
    OWN_PROMPTS,
    SPAN_S,
    AnswerLengths,
    KeptRoom,
    RoomKeeper,
)

N_ROWS = 10


def test_without_a_protected_request_nothing_is_kept() -> None:
    assert RoomKeeper().kept(5.0, N_ROWS) is None


def keeper(busy_s: float, seconds: int = 60, *, each_s: float = 0.1) -> RoomKeeper:
    """The keeper of a pool in which so many seconds of rows were protected in each second."""
    room = RoomKeeper()
    for at in range(int(seconds / each_s)):
        room.add_busy(busy_s * each_s, at * each_s)
    return room


@pytest.mark.parametrize(
    ("busy_s", "n_rows"), [(0.1, 0), (0.2, 1), (0.6, 2), (1.0, 3), (3.0, 9), (9.0, 10)]
)
def test_room_is_kept_on_some_times_the_rows_that_are_busy(busy_s: float, n_rows: int) -> None:
    kept = keeper(busy_s).kept(60.0, N_ROWS)
    assert kept == (KeptRoom(n_rows, math.inf, math.inf) if n_rows else None)
    assert abs(n_rows - BURST * busy_s) <= 0.5 or n_rows == N_ROWS


def test_a_first_request_is_no_flood() -> None:
    room = RoomKeeper()
    room.add_busy(0.3, 100.0)
    assert room.kept(100.0, N_ROWS) is None
    room.add_busy(0.5, 100.0)
    assert room.kept(100.0, N_ROWS) == KeptRoom(1, math.inf, math.inf)


def test_what_is_kept_is_given_back_when_no_more_of_them_come() -> None:
    room = keeper(1.0)
    rows = [room.kept(60.0 + more_s, N_ROWS) for more_s in (0.0, 0.5 * SPAN_S, SPAN_S, 2 * SPAN_S)]
    assert [each and each.n_rows for each in rows] == [3, 2, 1, None]


def test_a_queue_leaves_room_for_three_of_four_of_them() -> None:
    room = keeper(1.0)
    for at in range(1000):
        own_s = (0.1, 0.2, 0.3, 0.4)[at * 7 % 4]
        room.note_ttft(2.0, own_s)
        room.note_itl((0.010, 0.020, 0.030, 0.040)[at * 7 % 4], 0.009)
    kept = room.kept(60.0, N_ROWS)
    assert kept is not None
    assert 2.0 - OWN_PROMPTS * 0.45 < kept.ttft_s < 2.0 - OWN_PROMPTS * 0.25
    assert 0.009 < kept.itl_s < 0.025


def test_a_prompt_that_cannot_be_in_time_there_asks_for_no_room() -> None:
    room = keeper(1.0)
    room.note_ttft(1.0, 0.1)
    for _ in range(100):
        room.note_ttft(1.0, 1.5)
    kept = room.kept(60.0, N_ROWS)
    assert kept is not None
    assert kept.ttft_s == pytest.approx(1.0 - OWN_PROMPTS * 0.1)
    for _ in range(100):
        room.note_ttft(1.0, 0.9)
    kept = room.kept(60.0, N_ROWS)
    assert kept is not None
    assert kept.ttft_s == pytest.approx(LEAST_SHARE * 0.1, rel=0.1)


def test_answers_that_cannot_be_in_time_there_ask_for_no_room() -> None:
    room = keeper(1.0)
    room.note_itl(0.030, 0.012)
    for _ in range(100):
        room.note_itl(0.011, 0.012)
    assert room.kept(60.0, N_ROWS) == KeptRoom(3, math.inf, 0.030)


def lengths_of(*listed: str) -> AnswerLengths:
    answers = AnswerLengths()
    answers.listed = listed
    return answers


def test_the_first_answers_are_told_to_be_shorter_than_is_guessed_the_same_in_every_class() -> None:
    answers = lengths_of("a")
    for _ in range(N_FIRST):
        told = [answers.short_tokens(name) for name in ("", "a")]
        assert told[0] == told[1] <= FIRST_SHARE * FIRST_TOKENS
        answers.observe("", 1)
    assert answers.short_tokens("a") == answers.short_tokens("") > FIRST_SHARE * told[0]


def test_each_class_is_learnt_and_one_without_answers_is_as_all_together() -> None:
    answers = lengths_of("short", "long", "new")
    for _ in range(300):
        answers.observe("short", 10)
        answers.observe("long", 1000)
    assert answers.short_tokens("short") == pytest.approx(10, rel=0.1)
    assert answers.short_tokens("long") == pytest.approx(1000, rel=0.1)
    assert 9 < answers.short_tokens("new") < 1000
    assert answers.short_tokens("new") == answers.short_tokens("") == answers.short_tokens("x")


def test_about_a_quarter_of_the_answers_are_shorter_than_told() -> None:
    answers, rng = lengths_of("a"), random.Random(1)
    lengths = [1 + int(rng.expovariate(1 / 200)) for _ in range(4000)]
    told = []
    for n_tokens in lengths:
        told.append(answers.short_tokens("a"))
        answers.observe("a", n_tokens)
    n_shorter = sum(n < short for n, short in zip(lengths[500:], told[500:], strict=True))
    assert n_shorter / 3500 == pytest.approx(0.25, abs=0.03)


def test_names_that_clients_make_up_are_one_class_and_take_no_place_of_a_listed_one() -> None:
    answers = lengths_of("listed")
    for at in range(2000):
        answers.observe(f"made up {at}", 10)
    for _ in range(300):
        answers.observe("listed", 500)
    assert len(answers._by_class) == 2
    assert answers.short_tokens("listed") == pytest.approx(500, rel=0.1)
    for name in ("made up 7", "never seen", ""):
        assert answers.short_tokens(name) == pytest.approx(10, rel=0.1)
