import asyncio
import io
import json
import logging
import subprocess
import sys
from typing import Any

import anyio
import pytest

from slagate.workers.runtime.logs import (
    FLUSH_S,
    PIECE_BYTES,
    JsonFormatter,
    LineHandler,
    log_to_stderr,
    note,
)
from slagate.workers.runtime.virtual_loop import run
from support.limits import HANG_S


def line(message: str, *args: object, level: int = logging.INFO, **extra: object) -> dict[str, Any]:
    logger = logging.getLogger("slagate.test")
    record = logger.makeRecord("slagate.test", level, "f.py", 1, message, args, None, extra=extra)
    text = JsonFormatter().format(record)
    assert len(text.splitlines()) == 1
    assert text.isascii()
    parsed: dict[str, Any] = json.loads(text)
    return parsed


def test_a_line_has_the_event_and_what_was_passed_with_it() -> None:
    parsed = line("request.done", outcome="completed", ttft_s=None, workers=["w:1"])
    assert parsed.pop("ts") > 0
    assert parsed == {
        "level": "INFO",
        "event": "request.done",
        "logger": "slagate.test",
        "outcome": "completed",
        "ttft_s": None,
        "workers": ["w:1"],
    }


@pytest.mark.parametrize(
    "text", ['a\n{"level": "ERROR"}', "a\u2028b", "a\x85b", "\ud800", "\U0001f600"]
)
def test_hostile_values_stay_on_one_line(text: str) -> None:
    assert line("x", request_id=text)["request_id"] == text


def test_what_json_cannot_hold_is_shown_as_text() -> None:
    assert line("x", kind=ValueError)["kind"] == "<class 'ValueError'>"


def test_arguments_are_put_into_the_event() -> None:
    assert line("%d of %s", 3, "four")["event"] == "3 of four"


def test_a_traceback_comes_along() -> None:
    try:
        raise ValueError("boom")
    except ValueError as error:
        info = (ValueError, error, error.__traceback__)
    record = logging.LogRecord("l", logging.ERROR, "f", 1, "bug", (), info)
    parsed = json.loads(JsonFormatter().format(record))
    assert "ValueError: boom" in parsed["traceback"]


def test_logging_goes_to_stderr_from_the_level_on(capsys: pytest.CaptureFixture[str]) -> None:
    log_to_stderr("warning")
    logging.getLogger("slagate.x").info("quiet")
    logging.getLogger("slagate.x").warning("loud", extra={"n": 1})
    captured = capsys.readouterr()
    assert captured.out == ""
    (only,) = captured.err.splitlines()
    assert json.loads(only)["event"] == "loud"


@pytest.mark.parametrize("level", ["loud", "", "inf"])
def test_an_unknown_level_is_refused(level: str) -> None:
    with pytest.raises(ValueError, match="Unknown level"):
        log_to_stderr(level)


class Pieces(io.StringIO):
    """A stream that remembers what it was given at once."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = []

    def write(self, text: str, /) -> int:
        self.pieces.append(text)
        return super().write(text)

    def events(self) -> list[list[str]]:
        """Of each piece."""
        return [[json.loads(line)["event"] for line in piece.splitlines()] for piece in self.pieces]


def logger_to(stream: Pieces, level: int = logging.INFO) -> logging.Logger:
    handler = LineHandler(stream)
    handler.setFormatter(JsonFormatter())
    made = logging.Logger("slagate.test", level)
    made.addHandler(handler)
    return made


def test_a_note_is_of_the_level_info() -> None:
    stream = Pieces()
    note(logger_to(stream, level=logging.WARNING), "quiet", {})
    note(logger_to(stream, level=logging.INFO), "loud", {})
    assert stream.events() == [["loud"]]


def test_without_a_loop_each_line_is_written_at_once() -> None:
    stream = Pieces()
    log = logger_to(stream)
    note(log, "one", {})
    note(log, "two", {})
    assert stream.events() == [["one"], ["two"]]


def test_in_a_loop_lines_are_written_together_and_in_time() -> None:
    stream = Pieces()

    async def main() -> None:
        log = logger_to(stream)
        for _ in range(2):
            note(log, "one", {})
            log.info("two")
            await anyio.sleep(FLUSH_S * 0.9)
            note(log, "three", {})
            assert stream.events() == [["one", "two", "three"]] * len(stream.pieces)
            await anyio.sleep(FLUSH_S * 0.2)

    run(main)
    assert stream.events() == [["one", "two", "three"]] * 2


def test_a_warning_is_written_at_once_behind_all_before_it() -> None:
    stream = Pieces()

    async def main() -> None:
        log = logger_to(stream)
        note(log, "one", {})
        log.warning("two")
        assert stream.events() == [["one", "two"]]

    run(main)


def test_pieces_are_no_larger_than_a_pipe_takes_as_one() -> None:
    stream = Pieces()

    async def main() -> None:
        log = logger_to(stream)
        for _ in range(200):
            note(log, "one", {})
        note(log, "long", {"request_id": "i" * PIECE_BYTES})
        await anyio.sleep(FLUSH_S)

    run(main)
    *several, last = stream.pieces
    assert PIECE_BYTES * 0.95 < max(map(len, several)) <= PIECE_BYTES
    assert sum(map(len, stream.events())) == 201
    assert stream.events()[-1] == ["long"]
    assert len(last) > PIECE_BYTES


def test_lines_of_a_loop_that_has_ended_come_with_the_next_or_with_a_flush() -> None:
    stream = Pieces()
    log = logger_to(stream)

    async def main() -> None:
        note(log, "one", {})

    run(main)
    assert stream.events() == []
    late = log.makeRecord(log.name, logging.INFO, "f.py", 1, "two", (), None)
    late.created += 2 * FLUSH_S
    log.handle(late)
    assert stream.events() == [["one", "two"]]
    run(main)
    log.handlers[0].flush()
    assert stream.events()[1:] == [["one"]]


def test_a_stream_that_is_closed_ends_nothing() -> None:
    stream = Pieces()
    failed: list[object] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, about: failed.append(about))
        log = logger_to(stream)
        note(log, "one", {})
        stream.close()
        await anyio.sleep(FLUSH_S)

    run(main)
    assert failed == []


@pytest.mark.parametrize("end", ["pass", "sys.exit(3)", "raise ValueError"])
def test_a_process_ends_with_nothing_left_to_write(end: str) -> None:
    program = f"""
import asyncio, logging, sys
from slagate.workers.runtime.logs import log_to_stderr, note
async def main():
    log_to_stderr("info")
    note(logging.getLogger("x"), "one", {{}})
    {end}
asyncio.run(main())
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=HANG_S
    )
    (event,) = [json.loads(each) for each in ended.stderr.splitlines() if each.startswith("{")]
    assert event["event"] == "one"


def test_a_note_is_what_info_logs(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("slagate.test")
    fields = {"request_id": "r", "workers": ["w:1"], "ttft_s": None}
    with caplog.at_level(logging.INFO):
        log.info("request.done", extra=fields)
        note(log, "request.done", fields)
    by_info, by_note = [json.loads(JsonFormatter().format(each)) for each in caplog.records]
    assert abs(by_info.pop("ts") - by_note.pop("ts")) < 60
    assert by_info == by_note
    assert by_note["level"] == "INFO"
