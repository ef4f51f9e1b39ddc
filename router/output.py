"""How commands end: what cannot be written to stdout is told apart from every other error."""

import codecs
import errno
import io
import json
import sys
from typing import Any

INTERRUPTED = 130
"""The exit status of a command that Ctrl-C or SIGTERM ended before it was done."""


class OutputFailed(Exception):
    """stdout takes no more. `reader_left`: whoever read the pipe has enough, which is no error."""

    def __init__(self, error: OSError) -> None:
        super().__init__(f"cannot write to stdout: {error.strerror}")
        self.reader_left = error.errno == errno.EPIPE


class _Stdout(io.FileIO):
    """The descriptor. After a write that failed it drops what comes: there is a last flush at exit."""

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
    """From now on a write to stdout fails with `OutputFailed` only, and for no character.

    One that its encoding has not is written as in JSON, so that what is JSON stays so.
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
