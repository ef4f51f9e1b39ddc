"""Names and shares of a grid as short text on one line."""

import math

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


def percent(part: int, whole: int) -> str:
    """A part of a whole, rounded down to a tenth, so that a mark for "below" never contradicts the figure.

    >>> percent(9499, 10000), percent(1, 1), percent(1, 3000)
    ('94.9%', '100%', '<0.1%')
    """
    tenths = math.floor(1000 * part / whole)
    if part and not tenths:
        return "<0.1%"
    return f"{tenths / 10:g}%"
