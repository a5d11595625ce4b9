"""Envoy itself accepts what is rendered, whatever is configured."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
from xds_world import ScriptedService, chat, config, endpoint, gateway, steer

from extproc.config.values import ClientPolicy, Config, HeaderNames, Listener, Service, ServiceTls
from extproc.config.values import Steering as By
from extproc.lab.engine_http import LabEngine
from extproc.lab.envoy import complaint
from extproc.routing.catalog import ModelEntry
from extproc.routing.endpoint import Auth, Kind, SecretKind, SecretRef, Tls
from extproc.xds.render import render
from extproc.xds.tree import extension

pytestmark = pytest.mark.envoy


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a certificate for localhost, its key, and a file with an API key."""
    made = tmp_path_factory.mktemp("files")
    subprocess.run(
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
        f" -subj /CN=localhost -addext subjectAltName=DNS:localhost"
        f" -keyout {made / 'key'} -out {made / 'cert'}".split(),
        check=True,
        capture_output=True,
    )
    (made / "api-key").write_text("k\n")
    return made


def everything(folder: Path) -> Config:
    """A configuration in which every part of the rendering is used."""
    cert, key = str(folder / "cert"), str(folder / "key")
    tls = Tls(sni="e.test", ca_file=cert, client_cert_file=cert, client_key_file=key)
    env, file = (
        SecretRef(SecretKind.ENV, "K"),
        SecretRef(SecretKind.FILE, str(folder / "api-key")),
    )
    infos = (
        replace(endpoint("a", "http://192.0.2.1:80", "m"), priority=2, weight=0.5),
        endpoint("b", "http://b.test:8000", "m", "org/n:1"),
        replace(endpoint("c", "https://[2001:db8::1]", "m"), tls=Tls(ca_file=cert)),
        replace(endpoint("d", "https://d.test:8443", "m"), tls=tls, auth=Auth(env)),
        replace(
            endpoint("e", "https://e.test", "large", kind=Kind.EXTERNAL),
            tls=Tls(verify=False),
            auth=Auth(file, "x-goog-api-key", ""),
        ),
        endpoint("f", "https://f.test", "p/m", kind=Kind.PEER),
        replace(endpoint("g", "http://192.0.2.9:80", "m"), drained=True),
    )
    authenticate = extension(
        "api-keys",
        "envoy.extensions.filters.http.api_key_auth.v3.ApiKeyAuth",
        {
            "credentials": [{"key": "secret", "client": "alice"}],
            "key_sources": [{"header": "authorization"}],
            "forwarding": {"header": "x-llmgw-client", "hide_credentials": True},
        },
    )
    return replace(
        config(*infos),
        models=(
            ModelEntry("m", aliases=("alias",)),
            ModelEntry("org/n:1"),
            ModelEntry("split", split=(("m", 1.0), ("large", 1.0))),
            ModelEntry("large"),
        ),
        clients={f"client-{number}": ClientPolicy(no_store=True) for number in range(300)},
        headers=HeaderNames(model=("x-model", "x-other")),
        listener=Listener(
            host="::",
            tls_cert_file=cert,
            tls_key_file=key,
            body_limit_bytes=1024,
            http_filters=(authenticate,),
        ),
        service=Service(
            address="[::]:9002",
            envoy_address="service.test:9002",
            tls=ServiceTls(
                ca_file=cert,
                client_cert_file=cert,
                client_key_file=key,
                cert_file="/c",
                key_file="/k",
            ),
        ),
    )


@pytest.mark.parametrize("steering", By)
async def test_everything_at_once_is_accepted(steering: By, folder: Path, tmp_path: Path) -> None:
    """In every steering."""
    text = render(everything(folder), steering)
    assert await complaint(text, tmp_path, environ={"K": "k"}) is None


@pytest.mark.parametrize("steering", By)
async def test_nothing_at_all_is_accepted(steering: By, tmp_path: Path) -> None:
    """No endpoint, no model, no access log."""
    bare = replace(config(), service=Service(access_log=False))
    assert await complaint(render(bare, steering), tmp_path) is None


async def test_nothing_is_deprecated(folder: Path, tmp_path: Path) -> None:
    """Envoy starts without a word of warning about its configuration."""
    configuration = replace(
        everything(folder),
        listener=Listener(port=0, admin_port=0),
        clients={},
        service=Service(address="127.0.0.1:1"),
    )
    async with gateway(configuration, tmp_path, environ={"K": "k"}):
        assert "warning" not in (tmp_path / "envoy.log").read_text()


async def test_a_missing_variable_is_named(tmp_path: Path) -> None:
    """By Envoy, before it serves anybody."""
    auth = Auth(SecretRef(SecretKind.ENV, "NOT_THERE"))
    text = render(config(replace(endpoint("a", "http://192.0.2.1:80", "m"), auth=auth)))
    said = await complaint(text, tmp_path, environ={})
    assert said is not None
    assert "NOT_THERE" in said


async def test_tls_and_http2_are_served(folder: Path, tmp_path: Path) -> None:
    """With the configured certificate; the protocol is negotiated."""
    async with LabEngine("a", ("m",)) as engine:
        plain = config(endpoint("a", engine.url, "m"), folder=tmp_path)
        secure = replace(
            plain.listener,
            tls_cert_file=str(folder / "cert"),
            tls_key_file=str(folder / "key"),
        )
        async with gateway(replace(plain, listener=secure), tmp_path) as running:
            trusted = ssl.create_default_context(cafile=str(folder / "cert"))
            trusted.set_alpn_protocols(["h2", "http/1.1"])
            _, writer = await asyncio.open_connection(
                "127.0.0.1", running.port, ssl=trusted, server_hostname="localhost"
            )
            assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == "h2"
            writer.close()
            await writer.wait_closed()
            trusted = ssl.create_default_context(cafile=str(folder / "cert"))
            url = f"https://localhost:{running.port}/v1/chat/completions"
            told = {"content-type": "application/json"}
            async with (
                aiohttp.ClientSession(headers=told) as session,
                session.post(url, data=chat("m"), ssl=trusted) as response,
            ):
                assert response.status == 200


async def test_the_service_over_tcp_is_reached(tmp_path: Path) -> None:
    """As well as over a Unix socket."""
    async with LabEngine("a", ("m",)) as a, LabEngine("b", ("m",)) as b:
        service = ScriptedService("127.0.0.1:0")
        async with service:
            plain = config(endpoint("a", a.url, "m"), endpoint("b", b.url, "m"))
            there = Service(address=f"127.0.0.1:{service.port}")
            async with gateway(replace(plain, service=there), tmp_path) as running:
                for name in "ab":
                    service.answer = lambda _, name=name: steer(f"ep-{name}")  # type: ignore[misc]  # bound for this round
                    assert (await running.post("m")).headers["x-served-by"] == name
