"""Errors of fleet files and build specs, and of requests whose numbers select no cell."""

from collections.abc import Sequence
from typing import NamedTuple


class Problem(NamedTuple):
    """One error at one place of a JSON document."""

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"


class ConfigError(ValueError):
    """A file that cannot be used, with all of its problems."""

    def __init__(self, source: str, problems: Sequence[Problem]) -> None:
        self.source = source
        self.problems = tuple(problems)
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__("\n".join([f"{source}: {count}", *(f"  {line}" for line in problems)]))


class SelectError(ValueError):
    """A request whose numbers select no cell; `field` names the one to correct."""

    def __init__(self, field: str, reason: str) -> None:
        self.field = field
        super().__init__(f"{field}: {reason}")
