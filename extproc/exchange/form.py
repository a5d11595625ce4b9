"""The small text fields of a multipart/form-data body, found without reading its files.

The body is never copied: a part is found by searching for the delimiter, so that a 25 MB recording
before the field costs one search. What two readers could take differently is refused: a preamble,
bare line feeds, folded headers, padding after a delimiter, escapes in a field's name, a form
without its last delimiter.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

_MAX_PARTS: Final = 1_000
_MAX_HEADER_BYTES: Final = 4_096
# RFC 2046 §5.1.1: 1 to 70 of these, no blank at the end.
_BOUNDARY: Final = re.compile(r"[0-9A-Za-z'()+_,./:=? -]{0,69}[0-9A-Za-z'()+_,./:=?-]")
_WORD: Final = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
# RFC 9110 §5.6.6, lenient in what stands unquoted.
_PARAMETER: Final = re.compile(
    rf'[ \t]*;[ \t]*({_WORD})=("(?:[^"\\]|\\.)*"|[^\s";,]+)[ \t]*', re.DOTALL
)
_HEADER: Final = re.compile(rf"({_WORD}):[ \t]*([^\r\n\0]*)")
_PLAIN_TRANSFER: Final = frozenset({"", "7bit", "8bit", "binary"})


class FormError(ValueError):
    """A form cannot be read; the text is a whole sentence."""


@dataclass(frozen=True, slots=True)
class Field:
    """One field's value as a span of the body; `is_text` is false for a file."""

    name: str
    start: int
    end: int
    is_text: bool


def boundary_of(content_type: str) -> bytes:
    """The boundary that a multipart `content_type` declares.

    Raises:
        FormError: there is none, there are two, or it is not one that RFC 2046 allows.
    """
    found = [value for name, value in _parameters(content_type) if name == "boundary"]
    if len(found) != 1 or not _BOUNDARY.fullmatch(found[0]):
        raise FormError("The form's content-type has no usable boundary.")
    return found[0].encode("ascii")


def fields(body: bytes, boundary: bytes, wanted: frozenset[str]) -> list[Field]:
    """The fields whose name is in `wanted`, in order, repeated ones included.

    Raises:
        FormError: the body is not a complete form of at most 1,000 parts.
    """
    delimiter = b"\r\n--" + boundary
    # The line end before the first delimiter may be missing.
    if body.startswith(delimiter[2:]):
        position = len(delimiter) - 2
    elif body.startswith(delimiter):
        position = len(delimiter)
    else:
        raise FormError("The form does not begin with its boundary.")
    found: list[Field] = []
    for _ in range(_MAX_PARTS + 1):
        if body.startswith(b"--", position):
            return found
        if not body.startswith(b"\r\n", position):
            raise FormError("The form has a boundary that no line end follows.")
        following = body.find(delimiter, position)
        if following < 0:
            raise FormError("The form ends before its last boundary.")
        part = _part(body, position, following)
        if part.name in wanted:
            found.append(part)
        position = following + len(delimiter)
    raise FormError(f"The form has more than {_MAX_PARTS} parts.")


def _part(body: bytes, start: int, end: int) -> Field:
    """The part between two delimiters, `start` being the line end after the first."""
    head_end = body.find(b"\r\n\r\n", start, min(end, start + _MAX_HEADER_BYTES))
    if head_end < 0:
        raise FormError(f"A part of the form has no end of headers in {_MAX_HEADER_BYTES} bytes.")
    disposition: str | None = None
    transfer = ""
    for line in body[start + 2 : head_end].decode("utf-8", "replace").split("\r\n"):
        header = _HEADER.fullmatch(line)
        if header is None:
            raise FormError("A part of the form has a line that is not a header.")
        name = header[1].lower()
        if name == "content-disposition":
            if disposition is not None:
                raise FormError("A part of the form has two content-dispositions.")
            disposition = header[2]
        elif name == "content-transfer-encoding":
            transfer = header[2].strip().lower()
    if disposition is None:
        raise FormError("A part of the form has no content-disposition.")
    parameters = _parameters(disposition)
    names = [value for name, value in parameters if name in {"name", "name*"}]
    if len(names) != 1:
        raise FormError("A part of the form does not have exactly one name.")
    if "\\" in names[0]:
        raise FormError("A part of the form has an escape in its name.")
    is_file = any(name in {"filename", "filename*"} for name, _ in parameters)
    is_text = not is_file and transfer in _PLAIN_TRANSFER
    return Field(names[0], head_end + 4, end, is_text)


def _parameters(value: str) -> list[tuple[str, str]]:
    """The parameters after a header value's first word, names in lower case, quotes taken off."""
    position = value.find(";")
    found: list[tuple[str, str]] = []
    while 0 <= position < len(value):
        parameter = _PARAMETER.match(value, position)
        if parameter is None:
            raise FormError("The form has a header whose parameters cannot be read.")
        text = parameter[2]
        found.append((parameter[1].lower(), text[1:-1] if text[0] == '"' else text))
        position = parameter.end()
    return found
