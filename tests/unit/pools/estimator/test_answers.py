"""How short answers are, by class."""

import random

import pytest

from slagate.pools.estimator.answers import (
    FIRST_SHARE,
    FIRST_TOKENS,
    MAX_CLASSES,
    N_FIRST,
    AnswerLengths,
)


def test_the_first_answers_are_told_to_be_shorter_than_is_guessed_the_same_in_every_class() -> None:
    answers = AnswerLengths()
    for _ in range(N_FIRST):
        told = [answers.short_tokens(name) for name in ("", "a")]
        assert told[0] == told[1] <= FIRST_SHARE * FIRST_TOKENS
        answers.observe("", 1)
    assert answers.short_tokens("a") == answers.short_tokens("") > FIRST_SHARE * told[0]


def test_each_class_is_learnt_and_an_unknown_one_is_as_all_together() -> None:
    answers = AnswerLengths()
    for _ in range(300):
        answers.observe("short", 10)
        answers.observe("long", 1000)
    assert answers.short_tokens("short") == pytest.approx(10, rel=0.1)
    assert answers.short_tokens("long") == pytest.approx(1000, rel=0.1)
    assert 9 < answers.short_tokens("unknown") < 1000


def test_about_a_quarter_of_the_answers_are_shorter_than_told() -> None:
    answers, rng = AnswerLengths(), random.Random(1)
    lengths = [1 + int(rng.expovariate(1 / 200)) for _ in range(4000)]
    told = []
    for n_tokens in lengths:
        told.append(answers.short_tokens("a"))
        answers.observe("a", n_tokens)
    n_shorter = sum(n < short for n, short in zip(lengths[500:], told[500:], strict=True))
    assert n_shorter / 3500 == pytest.approx(0.25, abs=0.03)


def test_a_client_that_makes_up_classes_takes_no_more_memory_than_so_many() -> None:
    answers = AnswerLengths()
    answers.observe("known", 256)
    for at in range(2 * MAX_CLASSES):
        answers.observe(f"class {at}", 10)
    assert len(answers._by_class) == MAX_CLASSES
    for _ in range(300):
        answers.observe("known", 500)
    assert answers.short_tokens("known") == pytest.approx(500, rel=0.1)
    assert answers.short_tokens("class 1999") == answers.short_tokens("never seen")
