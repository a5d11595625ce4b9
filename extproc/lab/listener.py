"""A listening socket that can be closed and opened again on the same port.

While it is closed the port stays bound, so that connections are refused and nothing else gets the
port. Linux only: that a listening socket can go back to being bound is not so elsewhere.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import Callable

BACKLOG = 512


class Listener:
    """One bound address. `port` 0 takes a free one, which is then `port`."""

    def __init__(self, host: str, port: int) -> None:
        self._socket = _bound(host, port)
        self._server: asyncio.Server | None = None
        self.host = host
        self.port: int = self._socket.getsockname()[1]

    @property
    def is_open(self) -> bool:
        """Whether connections are accepted."""
        return self._server is not None

    async def open(
        self,
        factory: Callable[[], asyncio.BaseProtocol],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Connections are accepted."""
        if self._server is None:
            self._socket.listen(BACKLOG)
            # The loop gets a copy to close; the original keeps the port.
            self._server = await asyncio.get_running_loop().create_server(
                factory, sock=self._socket.dup(), ssl=tls, backlog=BACKLOG
            )

    def close(self) -> None:
        """Connections are refused; those accepted before are untouched."""
        if self._server is not None:
            self._server.close()
            self._server = None
            self._socket.shutdown(socket.SHUT_RDWR)

    def dispose(self) -> None:
        """The port is free."""
        self.close()
        self._socket.close()


def _bound(host: str, port: int) -> socket.socket:
    """A socket bound to the address, which nobody else listens on."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    while True:
        # A port that the kernel chose at bind is let go with the first listening; one that was
        # asked for is kept. So a free one is looked up first.
        wanted = port or _free_port(family, host)
        bound = socket.socket(family, socket.SOCK_STREAM)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.setblocking(False)
            bound.bind((host, wanted))
            # Two bound sockets collide only when both listen, and that is better known now.
            bound.listen(BACKLOG)
            bound.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            bound.close()
            if port or error.errno != errno.EADDRINUSE:
                raise
        else:
            return bound


def _free_port(family: socket.AddressFamily, host: str) -> int:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
