"""Findings of a linter: stable code, severity, place, message and advice.

The linters of engine arguments (codes E...) and of fleet files (codes G...) each have a table of their
codes, from code to title; docs/engines.md and docs/lint.md have the same tables.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple, ParamSpec

_P = ParamSpec("_P")


class Finding(NamedTuple):
    """What a linter found wrong, and advice. With an error an engine does not start or work."""

    code: str
    severity: Literal["error", "warning", "note"]
    place: str
    """A dotted key of engine arguments, as in `kv_cache_config.dtype`, or a JSON path into a fleet file."""
    message: str
    advice: str

    @property
    def is_error(self) -> bool:
        """Whether the severity is "error": an engine must not be started with it."""
        return self.severity == "error"

    def __str__(self) -> str:
        return f"{self.code} {self.place}: {self.message}; {self.advice}"


def error(code: str, place: str, message: str, advice: str) -> Finding:
    """A finding with which the engine does not start, or does not work."""
    return Finding(code, "error", place, message, advice)


def warning(code: str, place: str, message: str, advice: str) -> Finding:
    """A finding about something that works and is probably not meant."""
    return Finding(code, "warning", place, message, advice)


def note(code: str, place: str, message: str, advice: str) -> Finding:
    """A finding that is worth knowing, about something that works and may well be meant."""
    return Finding(code, "note", place, message, advice)


class FindingPlace(NamedTuple):
    """One of several places that have the same finding."""

    place: str  # the finding's, if it is reported at this place
    short: str  # names this place in a finding that is reported at another one
    message: str  # the finding's, if it is reported at this place


MAX_LISTED = 6
"""The most places that a finding names besides its own."""


class FindingPlaces:
    """Counts the places that have the same finding, and reports them in a single warning."""

    def __init__(self) -> None:
        self._described: list[FindingPlace] = []
        self._n = 0

    def count(
        self, describe: Callable[_P, FindingPlace], *args: _P.args, **kwargs: _P.kwargs
    ) -> None:
        """Count a place; `describe(*args, **kwargs)` makes it, if the warning will name it."""
        self._n += 1
        if len(self._described) <= MAX_LISTED:
            self._described.append(describe(*args, **kwargs))

    def warnings(self, code: str, advice: str) -> list[Finding]:
        """One warning at the first place, which counts the others and names some; [] if none."""
        if not self._described:
            return []
        first, *others = self._described
        message = first.message
        if others:
            listed = ", ".join(one.short for one in others)
            more = ", ..." if self._n > len(self._described) else ""
            message += f"; the same at {self._n - 1:,} more: {listed}{more}"
        return [warning(code, first.place, message, advice)]
