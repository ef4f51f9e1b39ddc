"""Shapes with places and sizes, in points (1/72 inch) from the top left corner: what a picture is made of.

Nothing here draws. Text is measured by an estimate that errs on the wide side, so that a layout is the same
wherever it is made and leaves room for whichever font shows it.
"""

import unicodedata
from typing import NamedTuple

MARGIN, GAP = 18.0, 16.0
TITLE, TEXT, SMALL, TINY = 13.0, 9.0, 8.0, 7.0
"""Sizes of fonts."""

MAX_WIDTH = 1200.0
"""Of cells with names, of panels side by side, and of lines; 16 inches."""

LINE_RATIO = 1.3
"""Height of a line of text by the size of its font."""

_EM_RATIO = {"narrow": 0.45, "lower": 0.66, "upper": 0.86, "wide": 1.02}


class Box(NamedTuple):
    """A filled rectangle; with a `frame`, marked."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    hatched: bool = False
    frame: bool = False


class Line(NamedTuple):
    """A thin straight line."""

    x: float
    y: float
    to_x: float
    to_y: float


class Arrow(NamedTuple):
    """A small filled triangle that points at (`x`, `y`), down or to the left."""

    x: float
    y: float
    down: bool


class Label(NamedTuple):
    """One line of text. `x` and `y` are the point that `align` and the middle of its height refer to.

    A turned one reads upwards, and swaps the two.
    """

    x: float
    y: float
    text: str
    size: float = 9.0
    align: str = "left"  # left, center, right
    ink: str = "#000000"
    bold: bool = False
    turned: bool = False

    @property
    def width(self) -> float:
        """How long the text is at most."""
        return text_width(self.text, self.size, bold=self.bold)


Shape = Box | Line | Arrow | Label


class Scene(NamedTuple):
    """A picture."""

    width: float
    height: float
    shapes: tuple[Shape, ...]


def text_width(text: str, size: float, *, bold: bool = False) -> float:
    """How wide one line is at most, for a font of DejaVu Sans's proportions or narrower ones."""
    return sum(map(_em_ratio, text)) * size * (1.12 if bold else 1.0)


def _em_ratio(char: str) -> float:
    if char in "mwMWQ@%…—" or unicodedata.east_asian_width(char) in "WF":
        return _EM_RATIO["wide"]
    if char in "fijlrt.,:;!|'()[]/-IJ ":
        return _EM_RATIO["narrow"]
    return _EM_RATIO["upper"] if char.isupper() or char in "<>+=#&^~" else _EM_RATIO["lower"]


def wrapped(text: str, max_width: float, size: float, *, bold: bool = False) -> list[str]:
    """`text` in lines of at most `max_width`, broken behind separators, else anywhere.

    >>> wrapped("prefill-tp4-h200", 60, 9)
    ['prefill-tp4-', 'h200']
    """
    lines = []
    rest = text
    while text_width(rest, size, bold=bold) > max_width and len(rest) > 1:
        end = len(rest) - 1
        while end > 1 and text_width(rest[:end], size, bold=bold) > max_width:
            end -= 1
        breaks = [at for at in range(1, end + 1) if rest[at - 1] in "-_./: "]
        end = breaks[-1] if breaks else end
        lines.append(rest[:end])
        rest = rest[end:]
    return [*lines, rest]
