"""Numbers of a fleet file as people read them."""

from slagate.pools.axis import Number


def number_text(value: Number) -> str:
    """A number of tokens or milliseconds, to six digits or more where it is no whole number.

    >>> number_text(16384.0), number_text(1333.333333333), number_text(1028806.58), number_text(1e300)
    ('16,384', '1,333.33', '1,028,807', '1e+300')
    """
    if abs(value) < 1e15 and (value == int(value) or abs(value) >= 1e5):
        return f"{round(value):,}"
    return f"{value:,.6g}"
