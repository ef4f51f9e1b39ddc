"""Where a gateway's configuration comes from: a fleet file, and what options put over it."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slagate.pools.fleet_file.load import FleetConfig, load_config


@dataclass(frozen=True, slots=True)
class FleetSource:
    """The files and options that `slagate serve` was given: a reload reads the files again."""

    path: Path
    lenient: bool
    pools: Path | None
    workers: Mapping[str, Sequence[str]]

    def read(self) -> FleetConfig:
        """The configuration as the files say it now. Raises `ConfigError`."""
        return self._load(None)

    def parse(self, text: str) -> FleetConfig:
        """The configuration with another fleet file's text. Raises `ConfigError`."""
        return self._load(text)

    def stamp(self) -> object:
        """Something that is different once a file was written; never raises."""
        return [_stamp(path) for path in (self.path, self.pools) if path is not None]

    def _load(self, text: str | None) -> FleetConfig:
        return load_config(
            self.path,
            lenient=self.lenient,
            pools=self.pools,
            workers=self.workers,
            serving=True,
            text=text,
        )


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
