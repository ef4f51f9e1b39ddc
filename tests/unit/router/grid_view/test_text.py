"""Names on one line."""

import pytest

from slagate.pools.grid.grid import number_text
from slagate.router.grid_view.view import percent, printable


@pytest.mark.parametrize("text", ["a\nb", "\x1b[2J", "\ud800", "\u202e", "\x00", "tab\tbed"])
def test_what_does_not_print_is_escaped(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    assert "\\" in shown


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 40, 500])
def test_long_names_keep_both_ends(length: int) -> None:
    text = "".join(chr(97 + at % 26) for at in range(length))
    shown = printable(text, 16)
    assert len(shown) == min(length, 16)
    assert (shown[:7], shown[-8:]) == (text[:7], text[-8:])
    assert ("…" in shown) == (length > 16)


def test_different_numbers_look_different() -> None:
    values = [0, 0.5, 1, 1000, 1000.5, 1e14, 1e15, 1e300, -3, -0.25]
    assert len({number_text(value) for value in values}) == len(values)


def test_large_numbers_have_all_their_digits() -> None:
    for value, text in (
        (1028806.584362, "1,028,807"),
        (999_999.7, "1,000,000"),
        (99_999.97, "100,000"),
        (-2.5e9 - 0.25, "-2,500,000,000"),
        (-0.0, "0"),
    ):
        assert number_text(value) == text


def test_a_percentage_below_the_mark_never_reads_as_the_mark() -> None:
    for whole in (7, 100, 999, 10_000):
        for part in range(whole + 1):
            if part < 0.95 * whole:
                assert percent(part, whole) != "95%"
            assert (percent(part, whole) == "0%") == (part == 0)
            assert (percent(part, whole) == "100%") == (part == whole)
