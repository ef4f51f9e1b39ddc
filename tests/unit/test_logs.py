import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from slagate.workers.logs import JsonFormatter, log_to_stderr


@pytest.fixture(autouse=True)
def _restored_root() -> Iterator[None]:
    """Setting up logging is for a whole process: undo it."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def line(message: str, *args: object, level: int = logging.INFO, **extra: object) -> dict[str, Any]:
    logger = logging.getLogger("slagate.test")
    record = logger.makeRecord("slagate.test", level, "f.py", 1, message, args, None, extra=extra)
    text = JsonFormatter().format(record)
    assert "\n" not in text
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


def test_hostile_values_stay_on_one_line() -> None:
    assert line("x", request_id='a\n{"level": "ERROR"}\u2028')["request_id"].startswith("a\n{")


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
