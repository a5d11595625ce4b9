"""Addresses to listen on, and who may have a Unix socket's path."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from extproc.errors import LlmgwError

_UNIX: Final = "unix:"
SOCKET_MODE: Final = 0o660


class AddressUnavailable(LlmgwError):  # noqa: N818 - reads as what it is at the place it is caught
    """An address cannot be listened on; the text says which and why."""


@dataclass(frozen=True, slots=True)
class UnixAddress:
    """A socket file."""

    path: Path

    def __str__(self) -> str:
        return f"{_UNIX}{self.path}"


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """A host and a port; port 0 takes a free one. An IPv6 host has no brackets here."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


Address = UnixAddress | TcpAddress


def parse_address(text: str) -> Address:
    """The address that `unix:/path`, `host:port` or `[host]:port` names.

    Raises:
        ValueError: `text` is none of them; its message says what is wrong.
    """
    if text.startswith(_UNIX):
        path = text.removeprefix(_UNIX)
        if not path.startswith("/"):
            raise ValueError(f"the path of {text!r} is not absolute")
        return UnixAddress(Path(path))
    host, colon, port = text.rpartition(":")
    if not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ValueError(f"{text!r} is neither unix:/path nor host:port")
    return TcpAddress(host.removeprefix("[").removesuffix("]"), int(port))


@contextmanager
def bindable(address: Address) -> Iterator[None]:
    """Inside, `address` can be bound; a Unix socket made there is open to owner and group only.

    A socket file that nobody listens on is removed.

    Raises:
        AddressUnavailable: somebody listens on the socket, or its path is something else.
    """
    if isinstance(address, TcpAddress):
        yield
        return
    _clear(address.path)
    # The mode must be right from the first moment, and only the mask is in force then.
    mask = os.umask(0o777 & ~SOCKET_MODE)
    try:
        yield
    finally:
        os.umask(mask)


def why_not(address: Address) -> str | None:
    """What the system has against a socket at `address`, None where it would bind one there."""
    if isinstance(address, UnixAddress):
        return None
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address.host, address.port))
        except OSError as error:
            return error.strerror
    return None


def _clear(path: Path) -> None:
    """Nothing is at `path`."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise AddressUnavailable(f"{path} exists and is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
        except FileNotFoundError:
            return
        except OSError as error:  # busy or forbidden: somebody has it
            raise AddressUnavailable(f"{path} is in use: {error.strerror}") from error
        else:
            raise AddressUnavailable(f"another process listens on {path}")
