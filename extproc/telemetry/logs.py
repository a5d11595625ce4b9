"""One line per log record, and a limit on how often the same thing is said."""

from __future__ import annotations

import json
import logging
import traceback
from collections import OrderedDict
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from enum import StrEnum
from typing import Final, TextIO

FieldValue = str | int | float | bool | None
_FIELDS: Final = "llmgw_fields"


class LogFormat(StrEnum):
    """How a line looks."""

    TEXT = "text"
    JSON = "json"


class LineFormatter(logging.Formatter):
    """Renders a record as exactly one line, whatever its message and fields contain."""

    def __init__(self, log_format: LogFormat) -> None:
        super().__init__()
        self._format = log_format

    def format(self, record: logging.LogRecord) -> str:
        """The line of `record`: time (UTC), level, logger, message, fields, traceback."""
        entry: dict[str, FieldValue] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry.update(_fields(record))
        if record.exc_info is not None:
            entry["traceback"] = "".join(traceback.format_exception(*record.exc_info))
        if self._format is LogFormat.JSON:
            return json.dumps(entry, ensure_ascii=True)
        head = f"{entry.pop('time')} {entry.pop('level')} {entry.pop('logger')}"
        message = _one_line(str(entry.pop("message")))
        return " ".join([head, message, *(f"{key}={_quoted(entry[key])}" for key in entry)])


def _fields(record: logging.LogRecord) -> Mapping[str, FieldValue]:
    """The fields that `fields` attached to `record`."""
    attached = getattr(record, _FIELDS, None)
    return attached if isinstance(attached, dict) else {}


def _one_line(text: str) -> str:
    """`text` with everything escaped that does not print, line breaks of all kinds included."""
    return text if text.isprintable() else json.dumps(text)[1:-1]


def _quoted(value: FieldValue) -> str:
    """`value`, in quotes where it would not read as one word."""
    text = str(value)
    is_word = text.isprintable() and not set(text) & set(' "=')
    return text if is_word and text else json.dumps(text, ensure_ascii=not text.isprintable())


def fields(**values: FieldValue) -> dict[str, dict[str, FieldValue]]:
    """The `extra` of a log call that attaches `values` to the line."""
    return {_FIELDS: values}


def configure(stream: TextIO, *, level: int, log_format: LogFormat) -> None:
    """Every logger writes lines to `stream` from `level` upwards, and nowhere else."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LineFormatter(log_format))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)


class LimitedLog:
    """Says the same thing at most once in `interval_seconds`; the next time, how often it was held.

    What "the same" is, is the caller's `key`; the least recently used of more than `max_keys` is
    forgotten.
    """

    def __init__(
        self,
        logger: logging.Logger,
        clock: Callable[[], float],
        *,
        interval_seconds: float = 10.0,
        max_keys: int = 1024,
    ) -> None:
        self._logger = logger
        self._clock = clock
        self._interval_seconds = interval_seconds
        self._max_keys = max_keys
        self._said: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def warning(self, key: str, message: str, **values: FieldValue) -> None:
        """A warning with fields, unless `key` was logged lately."""
        self._log(logging.WARNING, key, message, values, None)

    def error(
        self, key: str, message: str, error: BaseException | None = None, **values: FieldValue
    ) -> None:
        """An error with fields and `error`'s traceback, unless `key` was logged lately."""
        self._log(logging.ERROR, key, message, values, error)

    def _log(
        self,
        level: int,
        key: str,
        message: str,
        values: dict[str, FieldValue],
        error: BaseException | None,
    ) -> None:
        """The line is written, or counted as held."""
        now = self._clock()
        said_at, held = self._said.get(key, (-float("inf"), 0))
        if now - said_at < self._interval_seconds:
            self._said[key] = (said_at, held + 1)
            return
        self._said[key] = (now, 0)
        self._said.move_to_end(key)
        if len(self._said) > self._max_keys:
            self._said.popitem(last=False)
        if held:
            values["held_lines"] = held
        self._logger.log(level, "%s", message, exc_info=error, extra=fields(**values))
