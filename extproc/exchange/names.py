"""Which texts can be a model's name: one rule for headers, metadata, queries and bodies."""

from __future__ import annotations

from typing import Final

from extproc.errors import Rejection
from extproc.exchange.refusals import model_invalid

MAX_NAME_CHARS: Final = 256


def checked_name(name: str) -> str | Rejection:
    """`name` itself when it can name a model.

    A name is 1 to 256 printable characters, not all blank, and is never trimmed. Control
    characters, lone surrogates and separators other than the blank are not printable.
    """
    if not name or name.isspace():
        return model_invalid("is empty")
    if len(name) > MAX_NAME_CHARS:
        return model_invalid(f"is longer than {MAX_NAME_CHARS} characters")
    if not name.isprintable():
        return model_invalid("has a character that is not printable")
    return name


def decoded_name(raw: bytes) -> str | Rejection:
    """The model's name that `raw` holds as UTF-8."""
    if len(raw) > 4 * MAX_NAME_CHARS:  # a character takes at most four bytes
        return model_invalid(f"is longer than {MAX_NAME_CHARS} characters")
    try:
        return checked_name(raw.decode())
    except UnicodeDecodeError:
        return model_invalid("is not valid UTF-8")
