"""What a text in the configuration may look like, field by field.

A rule says whether a text is right and what would be. Texts that may hold a secret, or a host, are
never shown in an error; names and words are.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Final
from urllib.parse import urlsplit

from extproc.routing.endpoint import SecretKind, SecretRef, Url
from extproc.routing.policy import NOBODY, is_cluster_id, residency_label

MAX_PORT: Final = 65535
MAX_NAME_CHARS: Final = 256

_ENDPOINT_ID: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}", re.ASCII)
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", re.ASCII)
_TOKEN: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,64}", re.ASCII)
_PREFIX: Final = re.compile(r"[ -~]{0,64}", re.ASCII)
_HOST: Final = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?", re.ASCII)
_PATH: Final = re.compile(r"/[ -~]{1,1023}", re.ASCII)
_ENV: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,254}", re.ASCII)
_TAG_KEY: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
_TAG_VALUE: Final = re.compile(r"[!#-+\--:<>-~]([ !#-+\--:<>-~]{0,254}[!#-+\--:<>-~])?", re.ASCII)
_LABEL_MATCH: Final = r'\s*+[A-Za-z_][A-Za-z0-9_]*+\s*+!?=\s*+"([^"\\\n]|\\[\\"n])*+"\s*+'
_METRIC: Final = re.compile(
    rf"[A-Za-z_:][A-Za-z0-9_:]*+(\{{({_LABEL_MATCH}(,{_LABEL_MATCH})*+,?\s*+)?\}})?", re.ASCII
)


@dataclass(frozen=True, slots=True)
class Rule:
    """`accepts` says whether a text is right, `expected` what would be.

    `shows` is whether an error may show the text.
    """

    accepts: Callable[[str], bool]
    expected: str
    shows: bool = False


def _matching(pattern: re.Pattern[str], expected: str, *, shows: bool = False) -> Rule:
    return Rule(lambda text: pattern.fullmatch(text) is not None, expected, shows)


def secret_ref(text: str) -> SecretRef | None:
    """Where `text` says that a secret is; None for anything else, a secret itself included."""
    kind, _, name = text.partition(":")
    if kind == SecretKind.ENV and _ENV.fullmatch(name):
        return SecretRef(SecretKind.ENV, name)
    if kind == SecretKind.FILE and _PATH.fullmatch(name):
        return SecretRef(SecretKind.FILE, name)
    return None


def is_name(text: str) -> bool:
    """Whether `text` can be what a client calls a model, or be called itself."""
    return 0 < len(text) <= MAX_NAME_CHARS and text.isprintable() and text == text.strip()


def is_host_port(text: str) -> bool:
    """Whether `text` is `host:port`, an IPv6 host in brackets."""
    host, separator, port = text.rpartition(":")
    if not (separator and port.isascii() and port.isdecimal() and len(port) < 6):
        return False
    if not 1 <= int(port) <= MAX_PORT:
        return False
    if host.startswith("[") and host.endswith("]"):
        return is_ip(host[1:-1]) and ":" in host[1:-1]
    return _HOST.fullmatch(host) is not None


def host_and_port(address: str) -> tuple[str, int]:
    """The two halves of a text that `is_host_port`, the host without brackets."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def is_service_address(text: str) -> bool:
    """Whether `text` is `host:port`, or `unix:` and an absolute path."""
    if text.startswith("unix:"):
        return _PATH.fullmatch(text.removeprefix("unix:")) is not None
    return is_host_port(text)


def is_on_this_machine(address: str) -> bool:
    """Whether only this machine can reach a service at `address`: a Unix socket, or loopback."""
    if address.startswith("unix:"):
        return True
    host, _ = host_and_port(address)
    return host == "localhost" or (is_ip(host) and ip_address(host).is_loopback)


def url_problem(text: str) -> str | None:
    """Why `text` is no endpoint address, without a word of it; None when it is one."""
    if not text.isascii() or not text.isprintable() or " " in text:
        return "is no URL"
    # What urllib says about a URL repeats parts of it, and a part may be a key.
    try:
        parts = urlsplit(text)
    except ValueError:
        return "is no URL"
    if parts.scheme not in {"http", "https"}:
        return "is not http:// or https://"
    try:
        _ = parts.port
    except ValueError:
        return "the port is no number from 1 to 65535"
    try:
        url = Url.parse(text)
    except ValueError as error:
        return str(error)
    return None if is_ip(url.host) or _HOST.fullmatch(url.host) else "the host is no name"


def is_metrics_url(text: str) -> bool:
    """Whether `text` is an http or https URL of a page, without user info and fragment."""
    if not text.isascii() or not text.isprintable() or " " in text:
        return False
    try:
        parts = urlsplit(text)
        if "@" in parts.netloc or parts.fragment or "#" in text or parts.port == 0:
            return False
    except ValueError:
        return False
    host = parts.hostname or ""
    is_host = is_ip(host) or _HOST.fullmatch(host) is not None
    return parts.scheme in {"http", "https"} and is_host


def is_ip(text: str) -> bool:
    """Whether `text` is an IP address, which needs no DNS; one with a zone is none."""
    try:
        ip_address(text)
    except ValueError:
        return False
    return "%" not in text


ENDPOINT_ID: Final = _matching(
    _ENDPOINT_ID,
    "use 1 to 63 of a-z, 0-9, dot, underscore and hyphen, a letter or digit first",
    shows=True,
)
CLUSTER_ID: Final = Rule(
    is_cluster_id,
    "use 1 to 64 letters, digits, dots, underscores and hyphens, a letter or digit first,"
    " at least one letter",
    shows=True,
)
MODEL: Final = Rule(
    is_name, "use 1 to 256 printable characters, no blank at either end", shows=True
)
CLIENT: Final = Rule(
    is_name, "use 1 to 256 printable characters, no blank at either end", shows=True
)
NAME: Final = _matching(
    _NAME,
    "use 1 to 63 letters, digits, dots, underscores and hyphens, a letter or digit first",
    shows=True,
)
POOL: Final = _matching(
    re.compile(r"[ -~]{0,128}", re.ASCII), "use at most 128 printable ASCII characters", shows=True
)
RESIDENCY: Final = Rule(
    lambda text: residency_label(text) != NOBODY,
    "give one label: 1 to 64 of a-z, 0-9, dot, underscore and hyphen, a letter or digit first",
    shows=True,
)
HEADER: Final = _matching(_TOKEN, "give a header name of at most 64 characters")
HEADER_PREFIX: Final = _matching(_PREFIX, "use at most 64 printable ASCII characters")
HOST: Final = _matching(_HOST, "give a host name")
LISTEN_IP: Final = Rule(is_ip, "give an IP address, such as 127.0.0.1 or 0.0.0.0")
ADDRESS: Final = Rule(is_host_port, "give host:port, such as 127.0.0.1:9090")
SERVICE_ADDRESS: Final = Rule(
    is_service_address, "give host:port, or unix: and an absolute path of a socket"
)
FILE: Final = _matching(
    _PATH, "give an absolute path: Envoy and the service may run in different folders"
)
METRICS_URL: Final = Rule(is_metrics_url, "give an http:// or https:// URL without user info")
METRIC: Final = _matching(
    _METRIC, 'give a metric name, with labels if need be: name{label="value"}', shows=True
)
TAG_KEY: Final = _matching(
    _TAG_KEY, "use 1 to 64 letters, digits, dots, underscores and hyphens", shows=True
)
TAG_VALUE: Final = _matching(
    _TAG_VALUE,
    "use 1 to 256 printable ASCII characters, without comma, semicolon, quote and equals sign",
)
