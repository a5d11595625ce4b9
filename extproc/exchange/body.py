"""The model inside a buffered request body: read it, or replace just its bytes.

The body is checked and skipped in C and never built as objects, so the cost is one pass (10 MB in
about 10 ms). Nothing is decompressed. Where two readers could see two models, it is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import msgspec
import numpy as np
from msgspec import Raw, Struct

from extproc.errors import Rejection
from extproc.exchange import form, refusals
from extproc.exchange.messages import BodyField
from extproc.exchange.names import MAX_NAME_CHARS, checked_name, decoded_name

_BOM: Final = b"\xef\xbb\xbf"
_WIDE_MARKS: Final = (b"\xff\xfe", b"\xfe\xff")
_WANTED: Final = frozenset({BodyField.MODEL, BodyField.STREAM, BodyField.PROMPT_CACHE_KEY})
# A character takes at most two \uXXXX escapes, and two quotes enclose them.
_MAX_NAME_BYTES: Final = 12 * MAX_NAME_CHARS + 2
_FORM_TYPE: Final = "multipart/form-data"
_JSON_TYPE: Final = re.compile(r"application/(?:[^\s;/]+\+)?json")
_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
_MAX_SURROGATES: Final = 10_000
_QUOTE: Final = ord('"')
_KINDS: Final = MappingProxyType(
    {
        ord("n"): "null",
        ord("t"): "a boolean",
        ord("f"): "a boolean",
        ord("["): "a list",
        ord("{"): "an object",
    }
)
_FLAGS: Final = MappingProxyType({b"true": True, b"false": False})


@dataclass(frozen=True, slots=True)
class BodyFacts:
    """What a body says: its model, whether it asks for a stream, its prompt cache key."""

    model: str
    stream: bool | None = None
    prompt_cache_key: bytes | None = None


class _Document(Struct, frozen=True, gc=False):
    """The members of the top-level object that matter, each a view of the body; empty if absent."""

    model: Raw = Raw()
    stream: Raw = Raw()
    prompt_cache_key: Raw = Raw()


@dataclass(frozen=True, slots=True)
class _Located:
    """Where the model's value stands in the body, and the facts of the body."""

    facts: BodyFacts
    start: int
    end: int
    is_json: bool


_DOCUMENT: Final = msgspec.json.Decoder(_Document)
_STRING: Final = msgspec.json.Decoder(str)


def read_model(
    body: bytes, content_type: str | None, content_encoding: str | None, limit: int
) -> BodyFacts | Rejection:
    """What `body` says, or the refusal that tells the client what is wrong with it.

    `limit` is in bytes. JSON (a missing content-type counts as JSON, a UTF-8 byte order mark is
    skipped) and multipart/form-data are read; other types and every compression are 415.
    Two models are 400, and so is a model that is no name.
    """
    if len(body) > limit:
        return refusals.body_too_large(limit)
    located = _locate(body, content_type, content_encoding)
    return located if isinstance(located, Rejection) else located.facts


def replace_model(
    body: bytes, content_type: str | None, new_model: str, content_encoding: str | None = None
) -> bytes | Rejection:
    """`body` with `new_model` as its model and every other byte as it was.

    Refused like `read_model`, a body without a model included.
    """
    located = _locate(body, content_type, content_encoding)
    if isinstance(located, Rejection):
        return located
    value = msgspec.json.encode(new_model) if located.is_json else new_model.encode()
    return b"".join((memoryview(body)[: located.start], value, memoryview(body)[located.end :]))


def unreadable(
    content_type: str | None, content_encoding: str | None, length: int, limit: int
) -> Rejection | None:
    """Why a body of `length` bytes with these headers would be refused; None if it may be read.

    A length of 0 is one that is not known.
    """
    if content_encoding is not None and content_encoding.strip().lower() not in {"", "identity"}:
        return refusals.body_compressed()
    media_type = _media_type(content_type)
    if media_type not in {"", _FORM_TYPE} and not _JSON_TYPE.fullmatch(media_type):
        return refusals.media_type_unsupported()
    return refusals.body_too_large(limit) if length > limit else None


def _media_type(content_type: str | None) -> str:
    """The type without its parameters, in lower case."""
    return (content_type or "").partition(";")[0].strip().lower()


def _locate(
    body: bytes, content_type: str | None, content_encoding: str | None
) -> _Located | Rejection:
    """The model's place in `body`."""
    refused = unreadable(content_type, content_encoding, 0, 0)
    if refused is not None:
        return refused
    if not body:
        return refusals.model_missing()
    if _media_type(content_type) == _FORM_TYPE:
        return _in_form(body, content_type or "")
    return _in_json(body)


def _in_json(body: bytes) -> _Located | Rejection:
    """The model's place in a JSON body."""
    if body.startswith(_WIDE_MARKS) or b"\0" in body[:4]:
        return refusals.body_invalid("The body must be UTF-8.")
    skipped = len(_BOM) if body.startswith(_BOM) else 0
    decoded = _decode(body[skipped:] if skipped else body)
    if isinstance(decoded, Rejection):
        return decoded
    document, data = decoded
    start, end = _span(document.model, data)
    if start == end:
        return refusals.model_missing()
    if _is_repeated(data, start):
        return refusals.model_ambiguous("two models in its body")
    start += skipped
    end += skipped
    model = _json_name(body[start:end])
    if isinstance(model, Rejection):
        return model
    key_start, key_end = _span(document.prompt_cache_key, data)
    facts = BodyFacts(
        model,
        _FLAGS.get(bytes(document.stream)),
        _json_key(body[key_start + skipped : key_end + skipped]),
    )
    return _Located(facts, start, end, is_json=True)


def _decode(data: bytes, *, is_masked: bool = False) -> tuple[_Document, bytes] | Rejection:
    """The document and the buffer that it views: `data`, or a copy of the same length."""
    try:
        return _DOCUMENT.decode(data), data
    except RecursionError:
        return refusals.body_invalid("The body's JSON is nested too deeply.")
    except msgspec.ValidationError:
        return refusals.body_invalid("The body must be a JSON object.")
    except msgspec.DecodeError as error:
        # JSON's grammar allows half a surrogate pair, which clients write when they cut a text
        # inside an emoji. The decoder does not; where it stands does not matter here.
        if not is_masked and _SURROGATE.search(data):
            masked = _SURROGATE.sub(rb"\\u0041", data, _MAX_SURROGATES)
            return _decode(masked, is_masked=True)
        return _malformed(data, error)


def _malformed(data: bytes, error: msgspec.DecodeError) -> Rejection:
    """The refusal of JSON that the decoder refused with `error`."""
    if data.isspace():
        return refusals.model_missing()
    if "truncated" in str(error):
        return refusals.body_invalid("The body ends in the middle of its JSON.")
    return refusals.body_invalid("The body is not valid JSON.")


def _span(value: Raw, data: bytes) -> tuple[int, int]:
    """Where `value`, a view of `data`, begins and ends there; (0, 0) for an absent one."""
    size = len(value)
    if not size:
        return 0, 0
    start = _address(value) - _address(data)
    return start, start + size


def _address(buffer: Raw | bytes) -> int:
    """Where `buffer` begins in memory."""
    return int(np.frombuffer(buffer, np.uint8).__array_interface__["data"][0])


def _is_repeated(data: bytes, start: int) -> bool:
    """Whether another member named model precedes the one whose value begins at `start`.

    The decoder keeps the last one. What stands before that one's key, closed with a brace, is an
    object again, and the decoder tells whether it has a model.
    """
    key_end = data.rfind(b'"', 0, data.rfind(b":", 0, start))
    comma = data.rfind(b",", 0, data.rfind(b'"', 0, key_end))
    if comma < 0:
        return False  # the first member: only its brace and blanks precede it
    return bool(_DOCUMENT.decode(b"".join((memoryview(data)[:comma], b"}"))).model)


def _json_name(value: bytes) -> str | Rejection:
    """The model's name that a JSON value gives."""
    if value[0] != _QUOTE:
        return refusals.model_invalid(f"must be a string, not {_KINDS.get(value[0], 'a number')}")
    if len(value) > _MAX_NAME_BYTES:
        return refusals.model_invalid(f"is longer than {MAX_NAME_CHARS} characters")
    try:
        return checked_name(_STRING.decode(value))
    except msgspec.DecodeError:
        return refusals.model_invalid("is not valid Unicode")


def _json_key(value: bytes) -> bytes | None:
    """The session key that a JSON value gives: a string's text, anything else as written."""
    if value in {b"", b"null", b'""'}:
        return None
    try:
        return _STRING.decode(value).encode()
    except msgspec.DecodeError:
        return value


def _in_form(body: bytes, content_type: str) -> _Located | Rejection:
    """The model's place in a multipart form."""
    try:
        found = form.fields(body, form.boundary_of(content_type), _WANTED)
    except form.FormError as error:
        return refusals.body_invalid(str(error))
    models = [field for field in found if field.name == BodyField.MODEL]
    if len(models) != 1:
        return (
            refusals.model_ambiguous("two models in its form")
            if models
            else refusals.model_missing()
        )
    place = models[0]
    if not place.is_text:
        return refusals.model_invalid("must be a plain text field of the form")
    model = decoded_name(body[place.start : min(place.end, place.start + _MAX_NAME_BYTES)])
    if isinstance(model, Rejection):
        return model
    others = {field.name: body[field.start : field.end] for field in found if field.is_text}
    facts = BodyFacts(
        model,
        _FLAGS.get(others.get(BodyField.STREAM, b"")),
        others.get(BodyField.PROMPT_CACHE_KEY) or None,
    )
    return _Located(facts, place.start, place.end, is_json=False)
