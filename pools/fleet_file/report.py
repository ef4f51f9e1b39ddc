"""Collects the problems of a fleet file while it is being checked, each with its place in the file.

The checks see one spelling of each key, that of `models`. Messages have the spelling, and the file, that a
value came from.
"""

from collections.abc import Iterable
from typing import Any

from slagate.pools.grid.errors import Problem
from slagate.pools.grid.json_text import short_path, shown

Path = tuple[str | int, ...]
ABSENT = object()
"""The value of a key that is not there, for `ConfigReport.refuse`."""


class ConfigReport:
    """The problems, warnings and ignored keys that are found in `content`."""

    def __init__(self) -> None:
        self.content: Any = None
        self.warnings: list[str] = []
        self.ignored: list[str] = []
        self._found: list[tuple[Path, str]] = []
        self._bad: set[Path] = set()
        self._places: dict[Path, tuple[str, Path]] = {}  # the file it is from, and the path there
        self._derived: set[Path] = set()

    def place(self, path: Path) -> str:
        """Where the value at `path` was given, for people: a file or option, and a path in it."""
        for at in range(len(path), 0, -1):
            if path[:at] in self._places:
                prefix, start = self._places[path[:at]]
                return prefix + short_path((*start, *path[at:]))
        return short_path(path)

    def written(self, *path: str | int) -> str:
        """The last key of `path`, as it is spelled where the value was given."""
        _, there = self._places.get(path, ("", path))
        return str(there[-1])

    def move(self, path: Path, there: Path, *, prefix: str = "") -> None:
        """Note that the value at `path` was given at `there`, in the source named by `prefix`."""
        self._places[path] = prefix, there

    def derive(self, path: Path, value: object) -> None:
        """Add a top-level key that the file does not have; problems at it are not reported."""
        self.content[path[0]] = value
        self._derived.add(path)

    def warn(self, path: Path, message: str) -> None:
        """Add a warning about the value at `path`, which loads all the same."""
        self.warnings.append(f"{self.place(path)}: {message}")

    def ignore(self, path: Path) -> None:
        """Warn of an unknown key that is left out."""
        self.ignored.append(self.place(path))
        self.warn(path, "unknown key, ignored")

    def refuse(self, path: Path, reason: str, got: object) -> None:
        """Add a problem: `got`, or that nothing is there (`ABSENT`), is not valid at `path`."""
        self._bad.add(path)
        if path not in self._derived:
            self._found.append(
                (path, f"{reason} (got {'nothing' if got is ABSENT else shown(got)})")
            )

    def get(self, *path: str | int) -> Any:
        """The value at `path`; None when it is absent, or it or a parent of it was refused.

        Parts of the value may have been refused.
        """
        value = self.content
        for depth, part in enumerate(path):
            if path[:depth] in self._bad:
                return None
            if isinstance(value, dict):
                value = value.get(part)
            elif isinstance(value, list | tuple) and isinstance(part, int) and part < len(value):
                value = value[part]
            else:
                return None
        return None if path in self._bad else value

    def problems(self) -> list[Problem]:
        """All problems, in the order in which they were found, each once."""
        return list(dict.fromkeys(Problem(self.place(path), text) for path, text in self._found))


def dicts_in(value: object) -> Iterable[tuple[str | int, dict[str, Any]]]:
    """(key or position, entry) for the entries of a list or object that are objects."""
    entries: Iterable[tuple[str | int, object]] = ()
    if isinstance(value, list | tuple):
        entries = enumerate(value)
    elif isinstance(value, dict):
        entries = value.items()
    return ((key, entry) for key, entry in entries if isinstance(entry, dict))
