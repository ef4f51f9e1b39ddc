"""Findings of a linter: stable code, severity, place, message and advice.

The linters of engine arguments (codes E...) and of fleet files (codes G...) each have a table of their
codes, from code to title; docs/engines.md and docs/lint.md have the same tables.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple, ParamSpec

_P = ParamSpec("_P")


class Finding(NamedTuple):
    """One finding. With an error an engine does not start, or does not work."""

    code: str
    severity: Literal["error", "warning"]
    place: str
    """A dotted key of engine arguments, as in `kv_cache_config.dtype`, or a JSON path into a fleet file."""
    message: str
    advice: str

    @property
    def is_error(self) -> bool:
        """Whether an engine must not be started with it."""
        return self.severity == "error"

    def __str__(self) -> str:
        return f"{self.code} {self.place}: {self.message}; {self.advice}"


def error(code: str, place: str, message: str, advice: str) -> Finding:
    """A finding with which the engine does not start, or does not work."""
    return Finding(code, "error", place, message, advice)


def warning(code: str, place: str, message: str, advice: str) -> Finding:
    """A finding about something that works and is probably not meant."""
    return Finding(code, "warning", place, message, advice)


class Occurrence(NamedTuple):
    """One of several places with the same finding; `short` names it in a list of them."""

    place: str
    short: str
    message: str


MAX_LISTED = 6
"""As many further places are named in a finding that is about several."""


class Occurrences:
    """The places with the same finding, of which only as many are put in words as the finding names."""

    def __init__(self) -> None:
        self._described: list[Occurrence] = []
        self._n = 0

    def count(
        self, describe: Callable[_P, Occurrence], *args: _P.args, **kwargs: _P.kwargs
    ) -> None:
        """Add a place; `describe` is called with the other arguments at once, or never."""
        self._n += 1
        if len(self._described) <= MAX_LISTED:
            self._described.append(describe(*args, **kwargs))

    def warnings(self, code: str, advice: str) -> list[Finding]:
        """One warning at the first place that names and counts the others; none without a place."""
        if not self._described:
            return []
        first, *others = self._described
        message = first.message
        if others:
            listed = ", ".join(one.short for one in others)
            more = ", ..." if self._n > len(self._described) else ""
            message += f"; the same at {self._n - 1:,} more: {listed}{more}"
        return [warning(code, first.place, message, advice)]
