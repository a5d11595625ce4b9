"""Hosts that are no engines: one that swallows connections, ones that break off, certificates."""

from __future__ import annotations

import asyncio
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

from extproc.lab.wire import reset

# More than the kernel keeps waiting at a socket that nobody accepts from.
_CONNECTIONS = 8


@contextmanager
def black_hole() -> Iterator[str]:
    """The URL of a host that answers no connection, neither with yes nor with no."""
    with ExitStack() as exits:
        listening = exits.enter_context(socket.socket())
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        address = listening.getsockname()
        for _ in range(_CONNECTIONS):
            one = exits.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(address)
        yield f"http://127.0.0.1:{address[1]}"


@asynccontextmanager
async def breaking_off(said: bytes) -> AsyncIterator[str]:
    """The URL of a host that answers a request with these bytes and a TCP reset."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(said)
            await writer.drain()
            # The bytes are to come before the reset, which would throw them away.
            await asyncio.sleep(0.05)
            transport = writer.transport
            assert isinstance(transport, asyncio.Transport)
            reset(transport)
        except (OSError, EOFError):
            return

    server = await asyncio.start_server(answer, "127.0.0.1")
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def certified(folder: Path) -> ssl.SSLContext:
    """A server's side of TLS with a certificate that nobody trusts."""
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-nodes", "-days", "2"]
    command += ["-pkeyopt", "ec_paramgen_curve:prime256v1", "-subj", "/CN=127.0.0.1"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(
        [*command, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context
