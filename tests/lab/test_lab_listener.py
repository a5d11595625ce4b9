"""A port that can be closed and opened and is never lost."""

from __future__ import annotations

import asyncio
import socket

import pytest

from extproc.lab.listener import Listener


async def connect(port: int) -> None:
    """A connection was made and closed."""
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.close()
    await writer.wait_closed()


async def test_closed_it_refuses_and_keeps_its_port() -> None:
    """Nobody can connect and nobody else can listen there."""
    listener = Listener("127.0.0.1", 0)
    with pytest.raises(ConnectionRefusedError):
        await connect(listener.port)
    await listener.open(asyncio.Protocol)
    await listener.open(asyncio.Protocol)
    await connect(listener.port)
    listener.close()
    listener.close()
    with pytest.raises(ConnectionRefusedError):
        await connect(listener.port)
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", listener.port))
    port = listener.port
    await listener.open(asyncio.Protocol)
    assert listener.port == port
    await connect(port)
    listener.dispose()
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", port))


async def test_a_port_in_use_is_an_error_at_once() -> None:
    """A second listener on the same port is refused when it is made."""
    first = Listener("127.0.0.1", 0)
    await first.open(asyncio.Protocol)
    with pytest.raises(OSError, match="in use"):
        Listener("127.0.0.1", first.port)
    first.dispose()


async def test_it_speaks_ipv6() -> None:
    """A host with colons is an IPv6 address."""
    listener = Listener("::1", 0)
    await listener.open(asyncio.Protocol)
    _, writer = await asyncio.open_connection("::1", listener.port)
    writer.close()
    await writer.wait_closed()
    listener.dispose()
