"""What only the grpc.aio transport has: TLS, and calls that are already gone."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
from transport_world import SERVING, Echoes, Kind, asking, client_of, serving

from extproc.config.values import ServiceTls
from extproc.serve.grpcio import GrpcSettings, GrpcTransport
from extproc.serve.sockets import AddressUnavailable
from extproc.serve.stream import StreamEnd


@pytest.fixture
async def echoes() -> Echoes:
    """The service that is carried."""
    return Echoes()


@pytest.fixture
async def transport(echoes: Echoes) -> AsyncIterator[GrpcTransport]:
    """A started transport on a free port."""
    started = GrpcTransport(echoes, GrpcSettings("127.0.0.1:0"))
    await started.start()
    yield started
    await started.stop(0)


class DeadContext:
    """The context of a call that is already gone, but for one message."""

    def __init__(self) -> None:
        self.codes: list[grpc.StatusCode] = []

    async def read(self) -> bytes:
        return b"a"

    async def write(self, message: bytes) -> None:
        raise grpc.aio.UsageError(message)

    def set_code(self, code: grpc.StatusCode) -> None:
        self.codes.append(code)


async def test_a_reply_to_a_dead_call_is_an_end(echoes: Echoes, transport: GrpcTransport) -> None:
    """A write that the library refuses ends the stream with its reply unwritten."""
    await transport.ext_proc(empty(), DeadContext())  # type: ignore[arg-type]  # a stand-in
    assert echoes.streams[0].ends == [StreamEnd.CANCELLED]
    assert not echoes.streams[0].written_after


async def test_a_stream_that_comes_too_late_is_refused(
    echoes: Echoes, transport: GrpcTransport
) -> None:
    """What the library had accepted and not begun when it stopped gets no handler."""
    await transport.stop(0)
    context = DeadContext()
    await transport.ext_proc(empty(), context)  # type: ignore[arg-type]  # a stand-in
    assert context.codes == [grpc.StatusCode.UNAVAILABLE]
    assert not echoes.streams


async def empty() -> AsyncIterator[bytes]:
    """No messages: the transport reads from the context."""
    messages: list[bytes] = []
    for message in messages:
        yield message


@pytest.fixture(scope="module")
def identities(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an authority, a server's identity and a client's."""
    folder = tmp_path_factory.mktemp("tls")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    openssl(
        *("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2"),
        *("-subj", "/CN=authority"),
    )
    for name in ("server", "client"):
        openssl(
            *("req", "-x509", *key, "-keyout", f"{name}.key", "-out", f"{name}.pem"),
            *("-days", "2", "-subj", f"/CN={name}", "-CA", "ca.pem", "-CAkey", "ca.key"),
            *("-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"),
            *("-addext", "basicConstraints=critical,CA:FALSE"),
        )
    return folder


def trusting(folder: Path, *, has_identity: bool) -> grpc.ChannelCredentials:
    """A client's side of TLS, with an identity of its own or without."""
    if not has_identity:
        return grpc.ssl_channel_credentials((folder / "ca.pem").read_bytes())
    return grpc.ssl_channel_credentials(
        (folder / "ca.pem").read_bytes(),
        (folder / "client.key").read_bytes(),
        (folder / "client.pem").read_bytes(),
    )


async def test_tls_shows_the_servers_identity(echoes: Echoes, identities: Path) -> None:
    """A client that trusts the authority is served without an identity of its own."""
    tls = ServiceTls(
        cert_file=str(identities / "server.pem"), key_file=str(identities / "server.key")
    )
    async with (
        serving(echoes, Kind.GRPCIO, tls=tls) as transport,
        client_of(str(transport.address), trusting(identities, has_identity=False)) as client,
    ):
        assert await client.check(asking("here")) == SERVING


async def test_mtls_demands_the_clients_identity(echoes: Echoes, identities: Path) -> None:
    """With a client authority, only a client with an identity of it is served."""
    tls = ServiceTls(
        cert_file=str(identities / "server.pem"),
        key_file=str(identities / "server.key"),
        client_ca_file=str(identities / "ca.pem"),
    )
    async with serving(echoes, Kind.GRPCIO, tls=tls) as transport:
        address = str(transport.address)
        async with client_of(address, trusting(identities, has_identity=True)) as known:
            assert await known.check(asking("here")) == SERVING
        async with client_of(address, trusting(identities, has_identity=False)) as stranger:
            with pytest.raises(grpc.aio.AioRpcError):
                await stranger.check(asking("here"))


async def test_a_missing_certificate_is_named(echoes: Echoes) -> None:
    """A file that cannot be read keeps the service from starting, and the text says which."""
    tls = ServiceTls(cert_file="/nowhere/cert.pem", key_file="/nowhere/key.pem")
    with pytest.raises(AddressUnavailable, match=r"/nowhere/key\.pem"):
        await GrpcTransport(echoes, GrpcSettings("127.0.0.1:0", tls=tls)).start()
