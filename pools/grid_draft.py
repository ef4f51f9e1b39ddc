"""A fleet file while it is being checked: its content under one spelling, and all that was found wrong.

Dynamo renamed the latency keys once, and slagate has shorter names for the pool lists. Every later step
sees the current long names; messages show what the operator wrote.
"""

from collections.abc import Mapping
from typing import Any

from slagate.pools.errors import Problem
from slagate.pools.grid_file import STAGES, StageKeys
from slagate.pools.json_text import json_path, shown

Path = tuple[str | int, ...]
ABSENT = object()
"""The value of a key that is not there, for `Draft.refuse`."""


class Draft:
    """Content, warnings, and problems by the path of the place (in current key names)."""

    def __init__(self, content: object) -> None:
        self.warnings: list[str] = []
        self._found: list[tuple[Path, str]] = []
        self._bad: set[Path] = set()
        self._written: dict[Path, str] = {}
        self.content = self._respelled(content)

    def refuse(self, path: Path, reason: str, got: object) -> None:
        """Note that `got` cannot stay at `path`."""
        self._bad.add(path)
        self._found.append((path, f"{reason} (got {'nothing' if got is ABSENT else shown(got)})"))

    def get(self, *path: str | int) -> Any:
        """The value at `path`; None when it is absent, or refused itself or as a part of something.

        The parts of what comes back may have been refused.
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

    def written(self, *path: str | int) -> str:
        """The last key of `path` as the file spells it."""
        return self._written.get(path, str(path[-1]))

    def problems(self) -> list[Problem]:
        """All problems, in the order in which they were found."""
        return [Problem(self._place(path), message) for path, message in self._found]

    def _place(self, path: Path) -> str:
        return json_path([self._written.get(path[: at + 1], part) for at, part in enumerate(path)])

    def _respelled(self, content: object) -> object:
        if not isinstance(content, dict):
            return content
        content = dict(content)
        for stages in STAGES.values():
            for keys in stages.values():
                self._rename_pool_list(content, keys)
                if isinstance(content.get(keys.strategy), dict):
                    content[keys.strategy] = dict(content[keys.strategy])
                    self._rename_latencies(content[keys.strategy], keys)
        return content

    def _rename_pool_list(self, content: dict[str, object], keys: StageKeys) -> None:
        if keys.short_names not in content:
            return
        value = content.pop(keys.short_names)
        if keys.names in content:
            self.refuse(
                (keys.short_names,), f"is a second spelling of {keys.names}, keep one", value
            )
        else:
            content[keys.names] = value
            self._written[(keys.names,)] = keys.short_names

    def _rename_latencies(self, strategy: dict[str, object], keys: StageKeys) -> None:
        for old, new in deprecated_keys(keys).items():
            if old not in strategy:
                continue
            value = strategy.pop(old)
            if new in strategy:
                fate = f"ignored, {new} is there too"
            else:
                fate = f"deprecated, write {new}"
                strategy[new] = value
                self._written[(keys.strategy, new)] = old
            self.warnings.append(f"{keys.strategy}.{old}: {fate}")


def deprecated_keys(keys: StageKeys) -> Mapping[str, str]:
    """Old key to current key, for the latency bounds of this stage's strategy."""
    bounds = [key for axis in keys.axes for key in (axis.low, axis.high) if key.endswith("_ms")]
    return {key.removesuffix("_ms"): key for key in bounds}
