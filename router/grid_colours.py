"""A colour for each pool.

They are those of Okabe and Ito (https://jfly.uni-koeln.de/color/), which people with any colour vision tell
apart; a cell has the name or the number of its pool as well, so that none is needed to read it.
"""

from typing import NamedTuple

_BLACK, _WHITE = "#000000", "#ffffff"


class Shade(NamedTuple):
    """The colours of a pool, as #rrggbb."""

    fill: str
    ink: str
    hatched: bool  # its fill is that of a pool before it


_FILLS = (
    ("#56b4e9", _BLACK),
    ("#e69f00", _BLACK),
    ("#009e73", _BLACK),
    ("#f0e442", _BLACK),
    ("#0072b2", _WHITE),
    ("#d55e00", _BLACK),
    ("#cc79a7", _BLACK),
    ("#bbbbbb", _BLACK),
)


def shade(pool: int) -> Shade:
    """The colours of the pool with this number."""
    fill, ink = _FILLS[pool % len(_FILLS)]
    return Shade(fill, ink, pool >= len(_FILLS))
