"""What is wrong with a configuration, collected so that all of it is told at once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from extproc.config.values import ConfigWarning
from extproc.errors import ConfigError

MAX_SHOWN_CHARS: Final = 60
MAX_SHOWN_ERRORS: Final = 50

_PLAIN_KEY: Final = re.compile(r"[A-Za-z0-9_/-]{1,60}", re.ASCII)


class ConfigErrors(ConfigError):  # noqa: N818 - a plural: it holds them
    """A configuration is refused for every one of `errors`.

    There is at least one; `file`, `line`, `key`, `problem` and `expected` are the first one's. The
    text has one error a line, the first 50 of them.
    """

    def __init__(self, errors: Sequence[ConfigError]) -> None:
        first = errors[0]
        super().__init__(first.file, first.line, first.key, first.problem, first.expected)
        self.errors = tuple(errors)

    def __str__(self) -> str:
        lines = [str(error) for error in self.errors[:MAX_SHOWN_ERRORS]]
        if len(self.errors) > MAX_SHOWN_ERRORS:
            lines.append(f"and {len(self.errors) - MAX_SHOWN_ERRORS} more")
        return "\n".join(lines)


class Problems:
    """The errors and warnings of one file, in the order of its lines."""

    def __init__(self, file: str) -> None:
        self.file = file
        self._errors: list[ConfigError] = []
        self._warnings: list[ConfigWarning] = []

    def error(self, line: int, key: str, problem: str, expected: str) -> None:
        """One more mistake is known."""
        self._errors.append(ConfigError(self.file, line, key, problem, expected))

    def warn(self, line: int, key: str, text: str) -> None:
        """One more warning is known."""
        self._warnings.append(ConfigWarning(line, key, text))

    def raise_if_any(self) -> None:
        """Nothing is wrong so far.

        Raises:
            ConfigErrors: all that is.
        """
        if self._errors:
            # The same place may be read twice, once by itself and once beside others.
            different = {str(error): error for error in self._errors}
            raise ConfigErrors(sorted(different.values(), key=lambda error: error.line))

    @property
    def warnings(self) -> tuple[ConfigWarning, ...]:
        """The warnings in the order of their lines."""
        return tuple(sorted(self._warnings, key=lambda warning: warning.line))


def shown(text: str) -> str:
    """`text` as an error may show it: quoted, in ASCII, at most 60 characters."""
    return ascii(text if len(text) <= MAX_SHOWN_CHARS else text[: MAX_SHOWN_CHARS - 3] + "...")


def joined(parent: str, name: str) -> str:
    """The dotted key of `name` inside `parent`, quoted where it would read as several."""
    part = name if _PLAIN_KEY.fullmatch(name) else shown(name)
    return f"{parent}.{part}" if parent else part
