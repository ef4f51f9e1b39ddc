"""What the commands that tell of findings have in common."""

import textwrap

EXIT_FINDINGS = 1
COLUMNS = 100


def indented(text: str) -> list[str]:
    """The text in lines of a page's width, below what it is about."""
    indent = " " * 6
    return textwrap.wrap(
        text,
        width=COLUMNS,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
