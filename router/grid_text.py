"""Names and numbers of a grid as short text on one line."""

import math

from slagate.pools.axis import Number

MAX_NAME = 60


def printable(text: str, most: int = MAX_NAME) -> str:
    r"""`text` on one line and at most so long, what does not print escaped, the middle left out.

    >>> printable("a\x1b[31m"), printable("prefill-pool-of-the-fast-tier", 16)
    ('a\\x1b[31m', 'prefill…ast-tier')
    """
    escaped = "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )
    if len(escaped) <= most:
        return escaped
    return f"{escaped[: (most - 1) // 2]}…{escaped[-(most // 2) :]}"


def number_text(value: Number) -> str:
    """A number of tokens or milliseconds, to six digits where it is no whole number.

    >>> number_text(16384.0), number_text(1333.333333333), number_text(1e300)
    ('16,384', '1,333.33', '1e+300')
    """
    if abs(value) < 1e15 and value == int(value):
        return f"{int(value):,}"
    return f"{value:,.6g}"


def percent(part: int, whole: int) -> str:
    """A part of a whole, rounded down to a tenth, so that a mark for "below" never contradicts the figure.

    >>> percent(9499, 10000), percent(1, 1), percent(1, 3000)
    ('94.9%', '100%', '<0.1%')
    """
    tenths = math.floor(1000 * part / whole)
    if part and not tenths:
        return "<0.1%"
    return f"{tenths / 10:g}%"
