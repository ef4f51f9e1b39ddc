"""Logs: one JSON object a line on stderr, because stdout belongs to the ready line and to output."""

import json
import logging
import sys
from collections.abc import Mapping
from types import MappingProxyType

_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """Time (UTC seconds), level, event, and whatever the call passed as `extra`.

    `about` is in every line.
    """

    def __init__(self, about: Mapping[str, object] = MappingProxyType({})) -> None:
        super().__init__()
        self._about = about

    def format(self, record: logging.LogRecord) -> str:
        """One line; values that JSON cannot hold are shown as text."""
        line = {
            "ts": round(record.created, 3),
            "level": record.levelname,
            "event": record.getMessage(),
            "logger": record.name,
        }
        line |= self._about
        line |= {k: v for k, v in record.__dict__.items() if k not in _STANDARD}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def log_to_stderr(level: str, **about: object) -> None:
    """Set up logging for a process, with `about` in each line. Raises `ValueError` for an unknown level."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(about))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
