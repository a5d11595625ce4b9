"""Whether Envoy would accept what a reply asks for.

Checked here, because a mutation that Envoy rejects is a 500 to the client even where everything
else fails open.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from extproc import headers
from extproc.errors import LlmgwError

MAX_VALUE_BYTES: Final = 16 * 1024
MAX_HEADERS: Final = 64
MAX_TOTAL_BYTES: Final = 32 * 1024

_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9a-z-]{1,256}", re.ASCII)
_CONTROL: Final = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_DETAILS: Final = re.compile(r"[A-Za-z0-9_.:-]{0,128}", re.ASCII)

# The connection's own headers, and the two that Envoy keeps from a processor.
_FORBIDDEN: Final = frozenset({"host", "connection", "transfer-encoding", "te", "upgrade"})
_ENVOY_PREFIX: Final = "x-envoy-"
_CONTENT_LENGTH: Final = "content-length"

STATUSES: Final = frozenset(
    {*range(200, 209), 226, *range(300, 306), 307, 308}
    | {*range(400, 418), 421, 422, 423, 424, 426, 428, 429, 431}
    | {*range(500, 509), 510, 511}
)
"""The final statuses that Envoy's API knows; it refuses others."""


class InvalidAction(LlmgwError):  # noqa: N818 - reads as what it is at the place it is caught
    """An action must not be sent to Envoy; the text says why and holds nothing of a request."""


def check_name(name: str) -> None:
    """`name` is a header that a processor may set or remove.

    Raises:
        InvalidAction: it is no lower-case token, a pseudo-header, a connection header, a credential
            or one of Envoy's own.
    """
    if name == headers.DECISION:
        return  # the one name with a colon: Envoy keeps it for its log and sends it nowhere
    if _NAME.fullmatch(name) is None:
        raise InvalidAction("a header name is not a lower-case token")
    if name in _FORBIDDEN or name in headers.CREDENTIALS:
        raise InvalidAction(f"{name} is not ours to change")
    if name.startswith(_ENVOY_PREFIX) and name != headers.MAX_RETRIES:
        raise InvalidAction(f"{name} is Envoy's own")


def check_removed(name: str) -> None:
    """`name` is a header that a processor may remove.

    Raises:
        InvalidAction: it may not be changed at all, or it frames the body.
    """
    check_name(name)
    if name == _CONTENT_LENGTH:
        raise InvalidAction("content-length cannot be removed")


def check_value(name: str, value: bytes, body: bytes | None) -> None:
    """`value` is one that header `name` can have, next to a body that is replaced by `body`.

    Raises:
        InvalidAction: it holds a control character, is too long, or is a content length that is not
            the body's.
    """
    if len(value) > MAX_VALUE_BYTES or _CONTROL.search(value) is not None:
        raise InvalidAction(f"the value of {name} is too long or holds a control character")
    if name == _CONTENT_LENGTH and (body is None or value != b"%d" % len(body)):
        raise InvalidAction("content-length is not the length of the body that is sent")


def check_together(set_names: Iterable[str], removed: Iterable[str], size: int) -> None:
    """The mutations of one reply fit together: one for each header, `size` bytes in all.

    Raises:
        InvalidAction: a header is changed twice, or there are too many or too large changes.
    """
    names = [*set_names, *removed]
    if len(set(names)) != len(names):
        raise InvalidAction("one header is changed twice")
    if len(names) > MAX_HEADERS or size > MAX_TOTAL_BYTES:
        raise InvalidAction("too many or too large header changes")


def check_body(names: Iterable[str], body: bytes | None) -> None:
    """A replaced body comes with its length.

    Raises:
        InvalidAction: it does not; Envoy would refuse the reply.
    """
    if body is not None and _CONTENT_LENGTH not in names:
        raise InvalidAction("a body is replaced without content-length")


def check_immediate(status: int, details: str) -> None:
    """Envoy knows `status`, and `details` is a word for its access log.

    Raises:
        InvalidAction: one of them is not so.
    """
    if status not in STATUSES:
        raise InvalidAction(f"Envoy does not know status {status}")
    if _DETAILS.fullmatch(details) is None:
        raise InvalidAction("the details are not a word")
