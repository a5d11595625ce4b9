"""One line per record, and the same thing said once."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.telemetry.logs import LimitedLog, LineFormatter, LogFormat, configure, fields


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """The root logger, as it was afterwards."""
    logger = logging.getLogger()
    handlers, level = list(logger.handlers), logger.level
    yield logger
    logger.handlers[:] = handlers
    logger.setLevel(level)


def record(message: str, **values: str | float | None) -> logging.LogRecord:
    """A record with fields, of a fixed moment."""
    made = logging.makeLogRecord(
        {"name": "llmgw", "msg": message, "levelno": 20, "levelname": "INFO", **fields(**values)}
    )
    made.created = 1_700_000_000.5
    return made


def test_a_text_line_reads_from_left_to_right() -> None:
    """Time, level, logger, message, then the fields."""
    line = LineFormatter(LogFormat.TEXT).format(
        record("ready", address="unix:/a b", count=3, nothing=None, empty="")
    )
    assert line == (
        "2023-11-14T22:13:20.500+00:00 info llmgw ready"
        ' address="unix:/a b" count=3 nothing=None empty=""'
    )


def test_a_json_line_is_an_object() -> None:
    """The same, for machines."""
    assert json.loads(LineFormatter(LogFormat.JSON).format(record("ready", count=3))) == {
        "time": "2023-11-14T22:13:20.500+00:00",
        "level": "info",
        "logger": "llmgw",
        "message": "ready",
        "count": 3,
    }


@given(st.text(), st.text(), st.sampled_from(LogFormat))
def test_a_line_is_one_line(message: str, value: str, log_format: LogFormat) -> None:
    """Whatever a client managed to get into a message, it cannot begin another line."""
    made = record("%s", value=value)
    made.args = (message,)
    assert len(LineFormatter(log_format).format(made).splitlines()) == 1


@pytest.mark.parametrize("log_format", LogFormat)
def test_a_traceback_is_on_the_line(log_format: LogFormat) -> None:
    """An exception is whole, and still one line."""
    made = record("failed")
    error = RuntimeError("defect")
    made.exc_info = (RuntimeError, error, None)
    line = LineFormatter(log_format).format(made)
    assert "RuntimeError: defect" in line
    assert len(line.splitlines()) == 1


def test_configuring_leaves_one_handler(root: logging.Logger) -> None:
    """Every logger writes to the given stream, from the given level, once."""
    stream = io.StringIO()
    for _ in range(2):
        configure(stream, level=logging.INFO, log_format=LogFormat.TEXT)
    logging.getLogger("llmgw.x").debug("unheard")
    logging.getLogger("llmgw.x").info("heard")
    assert len(root.handlers) == 1
    assert stream.getvalue().endswith("info llmgw.x heard\n")
    assert stream.getvalue().count("\n") == 1


class Journal:
    """A limited log with a clock, and what it wrote."""

    def __init__(self, name: str, *, max_keys: int = 1024) -> None:
        self.now = 0.0
        logger = logging.getLogger(name)
        logger.propagate = False
        self.stream = io.StringIO()
        handler = logging.StreamHandler(self.stream)
        handler.setFormatter(LineFormatter(LogFormat.JSON))
        logger.handlers[:] = [handler]
        self.lines = LimitedLog(logger, lambda: self.now, interval_seconds=10, max_keys=max_keys)

    def written(self) -> list[dict[str, object]]:
        """The lines so far."""
        return [json.loads(line) for line in self.stream.getvalue().splitlines()]


def test_the_same_thing_is_said_once_in_an_interval() -> None:
    """The next line says how many were held."""
    journal = Journal("limited.same")
    for moment in (0.0, 1.0, 9.9, 10.0, 30.0):
        journal.now = moment
        journal.lines.warning("key", "again", moment=moment)
    assert [(line["moment"], line.get("held_lines")) for line in journal.written()] == [
        (0.0, None),
        (10.0, 2),
        (30.0, None),
    ]


def test_different_things_are_all_said() -> None:
    """The key alone says what is the same."""
    journal = Journal("limited.different")
    journal.lines.warning("a", "same words")
    journal.lines.error("b", "same words", RuntimeError("defect"))
    first, second = journal.written()
    assert (first["level"], second["level"]) == ("warning", "error")
    assert "RuntimeError: defect" in str(second["traceback"])


def test_keys_are_bounded() -> None:
    """The least recently used key is forgotten, and may then be said again."""
    journal = Journal("limited.bounded", max_keys=2)
    for key in ("a", "b", "c", "a"):
        journal.lines.warning(key, key)
    assert [line["message"] for line in journal.written()] == ["a", "b", "c", "a"]
