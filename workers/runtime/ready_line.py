"""The line on stdout with which a process says that it serves, and where."""

import json
import sys

MAX_READY_LINE_BYTES = 64 << 10
"""What a parent reads at most of a child's stdout before that line ends."""


def ready_line(**fields: str | int | list[int]) -> None:
    """Print the one line on stdout that says the process serves, and where."""
    sys.stdout.write(json.dumps({"event": "ready"} | fields) + "\n")
    sys.stdout.flush()
