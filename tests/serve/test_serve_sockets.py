"""Addresses, and who may have a socket's path."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from extproc.serve.sockets import (
    Address,
    AddressUnavailable,
    TcpAddress,
    UnixAddress,
    bindable,
    parse_address,
    why_not,
)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:9002", TcpAddress("127.0.0.1", 9002)),
        ("llmgw:0", TcpAddress("llmgw", 0)),
        ("[::1]:9002", TcpAddress("::1", 9002)),
        ("unix:/run/llmgw/llmgw.sock", UnixAddress(Path("/run/llmgw/llmgw.sock"))),
    ],
)
def test_an_address_reads_as_it_is_written(text: str, address: Address) -> None:
    """Reading and writing an address are inverse."""
    assert parse_address(text) == address
    assert str(address) == text


@pytest.mark.parametrize(
    "text", ["", "9002", ":9002", "host", "host:", "host:x", "host:65536", "host:-1", "unix:a.sock"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    """The text says what is wrong."""
    with pytest.raises(ValueError, match=r".+"):
        parse_address(text)


def bound(path: Path) -> socket.socket:
    """A socket bound to `path`, not listening."""
    opened = socket.socket(socket.AF_UNIX)
    opened.bind(str(path))
    return opened


def test_a_dead_socket_is_removed_and_a_new_one_is_private(tmp_path: Path) -> None:
    """Inside, the path is free and a socket made there is open to owner and group only."""
    path = tmp_path / "a.sock"
    bound(path).close()
    before = os.umask(0o022)
    try:
        with bindable(UnixAddress(path)):
            assert not path.exists()
            bound(path).close()
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)


def test_a_living_socket_is_left_alone(tmp_path: Path) -> None:
    """Somebody listens, so the path is not to be had, and stays."""
    path = tmp_path / "a.sock"
    with bound(path) as living:
        living.listen()
        with pytest.raises(AddressUnavailable, match="listens"), bindable(UnixAddress(path)):
            pass
    assert path.exists()


def test_a_file_is_never_removed(tmp_path: Path) -> None:
    """A path that is something else is not to be had either."""
    path = tmp_path / "a.sock"
    path.write_text("precious")
    with pytest.raises(AddressUnavailable, match="no socket"), bindable(UnixAddress(path)):
        pass
    assert path.read_text() == "precious"


def test_a_busy_socket_counts_as_living(tmp_path: Path) -> None:
    """A full backlog is somebody's."""
    path = tmp_path / "a.sock"
    callers = []
    with bound(path) as living:
        living.listen(0)
        for _ in range(4):
            caller = socket.socket(socket.AF_UNIX)
            caller.setblocking(False)
            callers.append(caller)
            if caller.connect_ex(str(path)):
                break
        with pytest.raises(AddressUnavailable), bindable(UnixAddress(path)):
            pass
    for caller in callers:
        caller.close()
    assert path.exists()


def test_a_port_needs_no_preparation() -> None:
    """A TCP address is for the binding itself to refuse."""
    with bindable(TcpAddress("127.0.0.1", 1)):
        pass


def test_the_system_says_why_a_port_is_not_to_be_had() -> None:
    """A taken port and a foreign host have a reason each, a free port and a socket file none."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert why_not(TcpAddress("127.0.0.1", port)) == "Address already in use"
    assert why_not(TcpAddress("192.0.2.1", 0)) == "Cannot assign requested address"
    assert why_not(TcpAddress("127.0.0.1", 0)) is None
    assert why_not(UnixAddress(Path("/nowhere/at/all"))) is None
