"""The expected length of answers, by class."""

import pytest

from slagate.pools.estimator.answers import FIRST_TOKENS, MAX_CLASSES, AnswerLengths


def test_before_anything_ended_every_class_is_the_same() -> None:
    answers = AnswerLengths()
    assert [answers.expected(name) for name in ("", "a")] == [FIRST_TOKENS, FIRST_TOKENS]


def test_each_class_is_learnt_and_an_unknown_one_is_as_the_mean_of_all() -> None:
    answers = AnswerLengths()
    for _ in range(300):
        answers.observe("short", 10)
        answers.observe("long", 1000)
    assert answers.expected("short") == pytest.approx(10, rel=0.01)
    assert answers.expected("long") == pytest.approx(1000, rel=0.01)
    assert 400 < answers.expected("unknown") < 600


def test_a_client_that_makes_up_classes_takes_no_more_memory_than_so_many() -> None:
    answers = AnswerLengths()
    answers.observe("known", 256)
    for at in range(2 * MAX_CLASSES):
        answers.observe(f"class {at}", 10)
    assert len(answers._by_class) == MAX_CLASSES
    for _ in range(300):
        answers.observe("known", 500)
    assert answers.expected("known") == pytest.approx(500, rel=0.01)
    assert answers.expected("class 1999") == answers.expected("never seen")
