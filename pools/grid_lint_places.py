"""Where the parts of one stage are in the text of a fleet file, as JSON paths."""

import json
from collections.abc import Mapping
from typing import Any

from slagate.pools.grid_config import FleetConfig
from slagate.pools.grid_keys import EPP_KEYS, OVERRIDES, STAGES, AxisKeys, form_of
from slagate.pools.json_text import json_path

_EPP_NAMES = {keys: name for name, keys in EPP_KEYS.items()}


class Places:
    """JSON paths into one file for one stage, in the spelling that the file uses."""

    def __init__(self, config: FleetConfig, stage: str) -> None:
        content: Mapping[str, Any] = json.loads(config.text)
        self._content = content
        self._keys = STAGES[config.mode][stage]
        short = self._keys.short_names
        self._names = short if short in content else self._keys.names
        self._axes = {axis.field: axis for axis in self._keys.axes}
        self._epp = stage == "prefill" and form_of(content).epp
        self._strategy: Mapping[str, Any] = content if self._epp else content[self._keys.strategy]

    def _path(self, keys: tuple[str, ...], *rest: int) -> str:
        if self._epp and keys in _EPP_NAMES:
            keys = (_EPP_NAMES[keys],)
        return json_path((*keys, *rest))

    def cell(self, index: tuple[int, ...]) -> str:
        """A cell of the mapping; no index is all of it."""
        return self._path((self._keys.strategy, self._keys.mapping), *index)

    def bands(self, field: str) -> str:
        """What cuts an axis into bands: its edges, or its resolution."""
        axis = self._axes[field]
        key = axis.edges if axis.edges in self._strategy else axis.resolution
        return self._path((self._keys.strategy, key))

    def end(self, field: str, *, last: bool) -> str:
        """The first or the last edge of an axis."""
        axis: AxisKeys = self._axes[field]
        if axis.edges in self._strategy:
            at = len(self._strategy[axis.edges]) - 1 if last else 0
            return self._path((self._keys.strategy, axis.edges), at)
        return self._path((self._keys.strategy, axis.high if last else axis.low))

    def rule(self, at: int) -> str:
        """A priority override."""
        return self._path((self._keys.strategy, OVERRIDES), at)

    def pool(self, at: int) -> str:
        """The name of a pool in the list of them."""
        return self._path((self._names,), at)

    def priorities(self) -> str:
        """The pool priorities of the stage; without any, the list of names, whose order they are."""
        if self._keys.priorities in self._content:
            return json_path((self._keys.priorities,))
        return self._path((self._names,))
