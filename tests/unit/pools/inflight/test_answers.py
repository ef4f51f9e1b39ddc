"""How short answers are, by class."""

import random

import pytest

from slagate.pools.inflight.answers import FIRST_SHARE, FIRST_TOKENS, N_FIRST, AnswerLengths


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
