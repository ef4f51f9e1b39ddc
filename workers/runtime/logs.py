"""Logs as lines of JSON on stderr; stdout is for the ready line and for output."""

import asyncio
import json
import logging
import sys
from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import TextIO

import msgspec
from typing_extensions import override

from slagate.workers.runtime.clock import unix_s

FLUSH_S = 0.1
"""How long a line below WARNING may wait, to be written together with others."""

PIECE_BYTES = 4096
"""Linux writes so much to a pipe as a whole (PIPE_BUF), so lines of several processes do not mix."""

_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}

_NOWHERE = vars(logging.makeLogRecord({"levelno": logging.INFO, "levelname": "INFO"}))

_encode = msgspec.json.Encoder(enc_hook=str).encode


class Event(logging.LogRecord):
    """A record of level INFO, made fast: without looking up the line of code and the thread."""

    __slots__ = ("fields",)

    def __init__(self, logger: str, event: str, fields: Mapping[str, object]) -> None:
        self.fields = fields
        # A formatter with a template reads all attributes of a record from here.
        about = _NOWHERE.copy()
        about["name"], about["msg"], about["created"] = logger, event, unix_s()
        about |= fields
        self.__dict__ = about


def note(log: logging.Logger, event: str, fields: Mapping[str, object]) -> None:
    """A cheaper `log.info(event, extra=fields)`, for the lines that every request writes."""
    if log.isEnabledFor(logging.INFO):
        log.handle(Event(log.name, event, fields))


class JsonFormatter(logging.Formatter):
    """Formats a record as JSON: Unix time, level, event, logger, `about`, the call's `extra`."""

    def __init__(self, about: Mapping[str, object] = MappingProxyType({})) -> None:
        super().__init__()
        self._about = about

    def format(self, record: logging.LogRecord) -> str:
        """The record as a line of JSON; values that JSON cannot express become text."""
        line: dict[str, object] = {
            "ts": round(record.created, 3),
            "level": record.levelname,
            "event": record.getMessage(),
            "logger": record.name,
        }
        line |= self._about
        if isinstance(record, Event):
            line |= record.fields
        else:
            line |= {k: v for k, v in record.__dict__.items() if k not in _STANDARD}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return _json(line)


class LineHandler(logging.Handler):
    """Writes a line for each record to a text stream; where an event loop runs, several lines at once.

    A line waits for at most `FLUSH_S`; one from WARNING on is written at once, with all before it. Without
    an event loop no line waits. At the end of the process `logging` flushes its handlers.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._lines: list[str] = []
        self._n_bytes = 0
        # When a timer will flush. If that is in the past, there is no timer, or its loop has ended.
        self._due_s = 0.0

    @override
    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
            if self._n_bytes + len(line) >= PIECE_BYTES:
                self.flush()
            self._lines.append(line)
            self._n_bytes += len(line) + 1
            if record.levelno >= logging.WARNING or not self._is_due(record.created):
                self.flush()
        except Exception:  # noqa: BLE001 - as in logging: an error here must not end the caller
            self.handleError(record)

    def flush(self) -> None:
        """Write the lines that wait. Raises what the stream raises, and then they are lost."""
        self.acquire()
        try:
            lines, self._lines, self._n_bytes = self._lines, [], 0
            if lines:
                self._stream.write("\n".join(lines) + "\n")
                self._stream.flush()
        finally:
            self.release()

    def _is_due(self, now_s: float) -> bool:
        """Whether a timer will flush; sets one where an event loop runs."""
        if now_s >= self._due_s:
            try:
                loop = asyncio.get_running_loop()
            except RuntimeError:
                return False
            loop.call_later(FLUSH_S, self._flush_in_time)
            self._due_s = now_s + FLUSH_S
        return True

    def _flush_in_time(self) -> None:
        self._due_s = 0.0
        with suppress(OSError, ValueError):
            self.flush()


def log_to_stderr(level: str, **about: object) -> None:
    """Set up the logs of a process, with `about` in each line. Raises `ValueError` for an unknown level."""
    handler = LineHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(about))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def _json(line: Mapping[str, object]) -> str:
    """A line in ASCII, as readers differ in which other characters end a line."""
    try:
        data = _encode(line)
    except UnicodeEncodeError:  # half a surrogate pair
        return json.dumps(line, default=str)
    return data.decode() if data.isascii() else json.dumps(line, default=str)
