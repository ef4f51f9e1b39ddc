"""The file that rows go into, and from which a run that was interrupted goes on."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from slagate.workers.runtime.usage import UsageError

Row = dict[str, Any]

TIMES = ("requests_per_cpu_s", "wall_s")
"""What differs between two runs of the same."""


class RowKey(NamedTuple):
    """Which run a row is of. Of a search for a `find_rate` the load is what is looked for: None."""

    trace: str
    fleet: str
    policy: str
    load: float | None
    seed: int
    find_rate: float | None = None


def key_of(row: Row) -> RowKey:
    """Which run a row is of."""
    key = RowKey(*(row[name] for name in RowKey._fields))
    return key if key.find_rate is None else key._replace(load=None)


class OutFile:
    """Rows on disk, each of them as soon as it is there: those of `keys` in that order, then others.

    `setup` is what all rows have in common, `traces` has a digest of each trace. Rows that the file has
    already are kept if theirs are the same; those of a policy with other `parameters` than now are dropped.
    Raises `UsageError` for a file of another set-up, or one that cannot be read.
    """

    def __init__(
        self,
        path: Path,
        keys: Sequence[RowKey],
        *,
        setup: Mapping[str, Any],
        parameters: Mapping[str, Mapping[str, Any]],
        traces: Mapping[str, str],
    ) -> None:
        self._path = path
        self._keys = keys
        self._setup = setup
        self._parameters = parameters
        self._traces = dict(traces)
        self._rows: dict[RowKey, Row] = {}
        if path.exists():
            self._read()

    def __contains__(self, key: RowKey) -> bool:
        return key in self._rows

    def __getitem__(self, key: RowKey) -> Row:
        return self._rows[key]

    @property
    def rows(self) -> list[Row]:
        """The rows of the keys that are there, in their order."""
        return [self._rows[key] for key in self._keys if key in self._rows]

    def put(self, key: RowKey, row: Row) -> None:
        """Add a row, and write the file; an interruption leaves the file before or behind it."""
        self._rows[key] = row
        draft = self._path.with_name(f"{self._path.name}.part")
        draft.write_text("".join(self._text()), encoding="utf-8")
        os.replace(draft, self._path)

    def _text(self) -> Iterator[str]:
        yield f'{{"setup": {json.dumps(self._setup)},\n"traces": {json.dumps(self._traces)},\n"rows": [\n'
        others = [row for key, row in self._rows.items() if key not in set(self._keys)]
        yield ",\n".join(json.dumps(row) for row in [*self.rows, *others])
        yield "\n]}\n"

    def _read(self) -> None:
        try:
            content = json.loads(self._path.read_text(encoding="utf-8"))
            setup, traces = dict(content["setup"]), dict(content.get("traces", {}))
            self._rows = {
                key_of(row): row
                for row in content["rows"]
                if row["parameters"] == self._parameters.get(row["policy"], {})
            }
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise UsageError(f"--out {self._path}: is no file of rows: {error}") from error
        wanted = json.loads(json.dumps(self._setup))
        changed = sorted(name for name in wanted if setup.get(name) != wanted[name])
        self._traces = traces | self._traces
        changed += [f"trace {name}" for name in traces if traces[name] != self._traces[name]]
        if changed:
            raise UsageError(
                f"--out {self._path}: has rows of another set-up ({', '.join(changed)}):"
                " name another file, or remove it"
            )
