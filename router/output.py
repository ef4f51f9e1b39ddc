"""Stdout of the commands: a write to it that fails is an error of its own, `OutputFailed`."""

import codecs
import errno
import io
import json
import sys
from typing import Any

INTERRUPTED = 130
"""The exit status of a command that Ctrl-C or SIGTERM ended before it was done."""


class OutputFailed(Exception):
    """Writing to stdout failed. `reader_left`: the reader of a pipe has closed it, which is no mistake."""

    def __init__(self, error: OSError) -> None:
        super().__init__(f"cannot write to stdout: {error.strerror}")
        self.reader_left = error.errno == errno.EPIPE


class _Stdout(io.FileIO):
    """The file descriptor. After a write that failed it drops all output, that of the flush at exit too."""

    has_failed = False

    def write(self, data: Any, /) -> int:
        if self.has_failed:
            return memoryview(data).nbytes
        try:
            return super().write(data)
        except OSError as error:
            self.has_failed = True
            raise OutputFailed(error) from error


def _escaped(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


def guard_stdout() -> None:
    """From now on a write to stdout fails with `OutputFailed` only, never because of a character.

    A character that the encoding lacks is written as a JSON escape, so that JSON stays JSON.
    """
    codecs.register_error("slagate.escaped", _escaped)
    plain = sys.stdout
    assert isinstance(plain, io.TextIOWrapper)
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(_Stdout(plain.fileno(), "w", closefd=False)),
        encoding=plain.encoding,
        errors="slagate.escaped",
        line_buffering=plain.line_buffering,
        write_through=plain.write_through,
    )
