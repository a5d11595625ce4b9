"""The rendered Envoy with a service that says where to go: failover, keys, envelopes, logs."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from itertools import permutations
from pathlib import Path
from ssl import PROTOCOL_TLS_SERVER, SSLContext

import pytest
import pytest_asyncio
from xds_world import (
    CHAT,
    SECONDS,
    Gateway,
    ScriptedService,
    chat,
    config,
    endpoint,
    gateway,
    immediate,
    steer,
)

from extproc import headers
from extproc.clusters import NONE
from extproc.config.values import Listener
from extproc.lab.engine_http import LabEngine
from extproc.lab.faults import CutBy, Fault, FaultKind
from extproc.routing.endpoint import Auth, Info, Kind, SecretKind, SecretRef, Tls
from extproc.serve.pb.access_log_pb2 import DownstreamEnd, UpstreamEnd

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="module")]

KEYS = {"OPEN_KEY": "open-key", "AZURE_KEY": "azure-key"}
# What each endpoint may be sent in a header that can hold a key.
RIGHT_KEYS = {
    "a": {},
    "peer": {},
    "open": {"authorization": "Bearer open-key"},
    "azure": {"api-key": "azure-key"},
    "goog": {"x-goog-api-key": "goog-key"},
}
KEY_HEADERS = (*headers.CREDENTIALS, "x-goog-api-key")


@dataclass(frozen=True, slots=True)
class World:
    """One Envoy, its endpoints by name, and what is said to it."""

    gateway: Gateway
    service: ScriptedService
    engines: dict[str, LabEngine]

    def hits(self) -> dict[str, int]:
        """How many requests each endpoint got, zeros left out."""
        counts = {name: one.counters.requests for name, one in self.engines.items()}
        return {name: count for name, count in counts.items() if count}


def certificate(folder: Path, name: str) -> tuple[Path, SSLContext]:
    """A certificate for `name` that is its own authority, and a server that shows it."""
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    subprocess.run(
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
        f" -subj /CN={name} -addext subjectAltName=DNS:{name} -keyout {key} -out {cert}".split(),
        check=True,
        capture_output=True,
    )
    context = SSLContext(PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    return cert, context


def secured(info: Info, cert: Path, sni: str, *, verify: bool = True) -> Info:
    """`info` reached by TLS, trusting `cert` and expecting `sni`."""
    return replace(info, tls=Tls(sni=sni, ca_file=str(cert) if verify else None, verify=verify))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """Endpoints of every kind, the service and Envoy run for all tests of this file."""
    folder = tmp_path_factory.mktemp("steered")
    (folder / "goog.key").write_text("goog-key\n")
    cert, context = certificate(folder, "engine.test")
    plain = [LabEngine(name, ("m",)) for name in ("a", "b", "open", "azure", "goog", "peer")]
    tls = LabEngine("tls", ("m",), tls=context)
    async with LabEngine("gone") as gone:
        gone_url = gone.url
    engines = {engine.name: engine for engine in (*plain, tls)}
    for engine in engines.values():
        await engine.start()
    infos = [
        endpoint("a", engines["a"].url, "m"),
        endpoint("b", engines["b"].url, "m"),
        keyed(engines["open"], Auth(SecretRef(SecretKind.ENV, "OPEN_KEY"))),
        keyed(engines["azure"], Auth(SecretRef(SecretKind.ENV, "AZURE_KEY"), "api-key", "")),
        keyed(
            engines["goog"],
            Auth(SecretRef(SecretKind.FILE, str(folder / "goog.key")), "X-Goog-Api-Key", ""),
        ),
        endpoint("peer", engines["peer"].url, "p/m", kind=Kind.PEER),
        endpoint("gone", gone_url, "other"),
        secured(endpoint("tls", tls.url, "t"), cert, "engine.test"),
        secured(endpoint("wrong-name", tls.url, "t"), cert, "other.test"),
        secured(endpoint("unverified", tls.url, "t"), cert, "other.test", verify=False),
        endpoint("unknown-authority", tls.url, "t"),
    ]
    configuration = config(*infos, folder=folder)
    service = ScriptedService(folder / "service.sock")
    async with service, gateway(configuration, folder, environ=KEYS) as running:
        yield World(running, service, engines)
    for engine in engines.values():
        await engine.stop()


def keyed(engine: LabEngine, auth: Auth) -> Info:
    """The engine as a provider that demands a key."""
    info = endpoint(engine.name, engine.url, "provided", kind=Kind.EXTERNAL)
    return replace(info, auth=auth)


@pytest.fixture
def world(started: World) -> World:
    """The same, with nothing seen yet, nothing going wrong, and everything sent to `a`."""
    for engine in started.engines.values():
        engine.records.reset()
        engine.faults.clear()
    started.service.seen.clear()
    started.service.logged.clear()
    started.service.answer = lambda _: steer("ep-a")
    started.service.answer_response = lambda _: None
    return started


def fails(world: World, name: str, fault: Fault) -> None:
    """The endpoint fails so from now on."""
    world.engines[name].faults.add(fault)


BUSY = Fault(FaultKind.STATUS, status=503, headers={"retry-after": "7"}, body="its own words")


async def test_no_order_of_attempts_carries_a_key_elsewhere(world: World) -> None:
    """Neither the client's nor another endpoint's, whatever was tried before."""
    client = dict.fromkeys(KEY_HEADERS, "the-client")
    for name in RIGHT_KEYS:
        fails(world, name, BUSY)
    for order in permutations(RIGHT_KEYS, 3):
        for name in order:
            world.engines[name].records.reset()
        world.service.answer = lambda _, order=order: steer(*(f"ep-{name}" for name in order))  # type: ignore[misc]  # bound for this round
        assert (await world.gateway.post("m", client)).body == b"its own words"
        for name in order:
            (received,) = world.engines[name].requests
            sent = {key.decode().lower(): value.decode() for key, value in received.headers}
            held = {key: value for key, value in sent.items() if key in KEY_HEADERS}
            assert held == RIGHT_KEYS[name], order


async def test_a_provider_is_told_nothing_internal(world: World) -> None:
    """No header of ours, no client address, nothing of Envoy's."""
    world.service.answer = lambda _: steer("ep-open", extra={headers.HOP: "gw"})
    extra = {
        "x-llmgw-session": "s",
        headers.TAGS: "t",
        headers.MODEL[1]: "m",
        "x-forwarded-for": "192.0.2.9",
        "x-request-id": "kept",
    }
    await world.gateway.post("m", extra)
    (received,) = world.engines["open"].requests
    sent = {key.decode().lower() for key, _ in received.headers}
    prefixes = ("x-llmgw-", "x-forwarded-", "x-envoy-", ":")
    assert not [name for name in sent if name.startswith(prefixes) or name in headers.MODEL]
    assert "x-request-id" in sent


async def test_a_peer_is_told_what_the_service_set(world: World) -> None:
    """The request's own headers and the hop list, but not who the client is."""
    told = {headers.HOP: "gw", headers.CLIENT: "alice"}
    world.service.answer = lambda _: steer("ep-peer", extra=told)
    await world.gateway.post("m", {headers.TAGS: "t", headers.RESIDENCY: "eu"})
    (received,) = world.engines["peer"].requests
    assert received.header(headers.HOP) == [b"gw"]
    assert received.header(headers.TAGS) == [b"t"]
    assert received.header(headers.RESIDENCY) == [b"eu"]
    assert received.header(headers.CLIENT) == []


async def test_steering_headers_do_not_reach_the_endpoint(world: World) -> None:
    """Nor does the name under which the attempt log knows the decision."""
    await world.gateway.post("m")
    (received,) = world.engines["a"].requests
    sent = {key.decode().lower() for key, _ in received.headers}
    assert not sent & {*headers.REMOVED_BY_THE_ROUTE, headers.MAX_RETRIES}
    assert not [name for name in sent if "decision" in name]


@pytest.mark.parametrize(
    "fault",
    [
        Fault(FaultKind.STATUS, status=429),
        Fault(FaultKind.STATUS, status=500),
        Fault(FaultKind.STATUS, status=508),
        Fault(FaultKind.RESET_AFTER_BODY),
    ],
)
async def test_the_next_of_the_list_serves_what_the_first_cannot(
    world: World, fault: Fault
) -> None:
    """With the same body, which is sent once more."""
    fails(world, "a", fault)
    world.service.answer = lambda _: steer("ep-gone", "ep-a", "ep-b")
    reply = await world.gateway.post("m")
    assert (reply.status, reply.headers["x-served-by"]) == (200, "b")
    assert world.hits() == {"a": 1, "b": 1}
    assert world.engines["b"].requests[0].body_bytes == len(chat("m"))


@pytest.mark.parametrize("attempts", [1, 2, 3])
async def test_the_list_bounds_the_attempts(world: World, attempts: int) -> None:
    """One attempt for each element, though the route would allow for more or fewer."""
    for name in ("a", "b", "open"):
        fails(world, name, BUSY)
    order = ("ep-a", "ep-b", "ep-open")[:attempts]
    world.service.answer = lambda _: steer(*order)
    assert (await world.gateway.post("m")).status == 503
    assert sum(world.hits().values()) == attempts


async def test_a_clients_retry_count_is_not_believed(world: World) -> None:
    """Nor its deadline."""
    fails(world, "a", BUSY)
    asked = {headers.MAX_RETRIES: "5", "x-envoy-upstream-rq-per-try-timeout-ms": "1"}
    assert (await world.gateway.post("m", asked)).status == 503
    assert world.hits() == {"a": 1}


async def test_a_restricted_request_goes_where_the_service_says(world: World) -> None:
    """Its route is closed only while nothing is said."""
    for extra in ({headers.HOP: "other"}, {headers.RESIDENCY: "eu"}, {headers.NO_STORE: "1"}):
        assert (await world.gateway.post("m", extra)).status == 200
    world.service.answer = lambda _: None
    assert (await world.gateway.post("m", {headers.HOP: "other"})).status == 503


@pytest.mark.parametrize(
    ("cluster", "status", "reason"),
    [
        ("ep-gone", 503, "upstream_failed"),
        ("ep-nowhere", 503, "no_endpoint"),
        (NONE, 503, "no_endpoint"),
    ],
)
async def test_failed_attempts_end_in_the_envelope(
    world: World, cluster: str, status: int, reason: str
) -> None:
    """Refused connections, unknown clusters and clusters without hosts."""
    world.service.answer = lambda _: steer(cluster)
    reply = await world.gateway.post("m")
    assert (reply.status, reply.headers[headers.REASON]) == (status, reason)
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers[headers.RETRY_AFTER] == "1"
    assert set(json.loads(reply.body)["error"]) == {"message", "type", "param", "code"}
    reply = await world.gateway.post("m", path="/v1/messages")
    assert json.loads(reply.body)["error"]["type"] == "overloaded_error"


async def test_an_endpoint_that_sends_no_headers_in_time_is_a_504(tmp_path: Path) -> None:
    """In the envelope; a stream that has begun is not cut by the same deadline."""
    async with LabEngine("a") as engine:
        configuration = replace(
            config(endpoint("a", engine.url, "m"), folder=tmp_path),
            listener=Listener(header_deadline_seconds=0.3),
        )
        service = ScriptedService(tmp_path / "service.sock")
        async with service, gateway(configuration, tmp_path) as running:
            service.answer = lambda _: steer("ep-a")
            engine.inject(Fault(FaultKind.HANG, times=1))
            reply = await running.post("m")
            error = json.loads(reply.body)["error"]
            assert (reply.status, error["code"]) == (504, "upstream_failed")
            engine.inject(Fault(FaultKind.STALL, chunks=2, seconds=0.6))
            body = chat("m")[:-1] + b',"stream":true}'
            reply = await running.ask("POST", CHAT, (), body)
    assert reply.status == 200
    assert reply.body.rstrip().endswith(b"[DONE]")


async def test_an_answer_that_is_cut_at_its_headers_ends_in_the_envelope(tmp_path: Path) -> None:
    """While Envoy still holds them back there is a status to be told."""

    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nabc")
        writer.close()

    async with await asyncio.start_server(cut, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        configuration = config(endpoint("a", f"http://127.0.0.1:{port}", "m"), folder=tmp_path)
        service = ScriptedService(tmp_path / "service.sock")
        async with service, gateway(configuration, tmp_path) as running:
            service.answer = lambda _: steer("ep-a")
            service.may_answer_response.clear()
            reply = await running.post("m")
            service.may_answer_response.set()
    assert (reply.status, reply.headers[headers.REASON]) == (502, "upstream_failed")


@pytest.mark.parametrize("status", [400, 404, 408, 413, 429, 500, 503, 504])
async def test_the_services_and_the_endpoints_own_words_are_kept(world: World, status: int) -> None:
    """Whatever their status."""
    own = Fault(FaultKind.STATUS, status=status, body="its own words", headers={"x-own": "1"})
    fails(world, "a", own)
    reply = await world.gateway.post("m")
    assert (reply.status, reply.body, reply.headers["x-own"]) == (status, b"its own words", "1")
    world.service.answer = lambda _: immediate(status, b'{"ours":1}')
    for path in (CHAT, "/v1/messages"):
        reply = await world.gateway.post("m", path=path)
        assert (reply.status, reply.body) == (status, b'{"ours":1}')
        assert headers.REASON not in reply.headers


async def test_the_services_last_word_outranks_the_envelope(world: World) -> None:
    """An answer given after every attempt has failed is not rewritten."""
    world.service.answer = lambda _: steer("ep-gone")
    world.service.answer_response = lambda _: immediate(503, b'{"ours":2}')
    assert (await world.gateway.post("m")).body == b'{"ours":2}'


async def test_an_invalid_instruction_is_an_internal_error_in_the_envelope(world: World) -> None:
    """Envoy refuses to follow it, also where everything else fails open."""
    world.service.answer = lambda _: steer("ep-a", extra={"bad name": "x"})
    reply = await world.gateway.post("m")
    assert (reply.status, reply.headers[headers.REASON]) == (500, "internal")


async def test_the_service_is_told_what_it_reads_and_no_key(world: World) -> None:
    """An allow-list of headers both ways, and the attributes of the outcome."""
    extra = {
        **dict.fromkeys(KEY_HEADERS, "secret"),
        "session_id": "s",
        "x-claude-code-session-id": "c",
        headers.TAGS: "t",
        headers.HOP: "h",
        "user-agent": "u",
    }
    await world.gateway.post("m", extra)
    (seen,) = world.service.seen
    assert seen.request[":path"] == CHAT.encode()
    assert seen.request["content-length"] == b"%d" % len(chat("m"))
    assert seen.request["session_id"] == b"s"
    assert seen.request[headers.MODEL[0]] == b"m"
    assert set(seen.request) == {
        ":method",
        ":path",
        "content-length",
        "content-type",
        "session_id",
        "x-claude-code-session-id",
        headers.HOP,
        headers.MODEL[0],
        headers.REQUEST_ID,
        headers.TAGS,
    }
    assert seen.body_model == b"m"
    assert set(seen.response) <= {":status", "content-length", "content-type"}
    assert seen.attributes == {
        "response.flags",
        "response.code_details",
        "xds.cluster_name",
        "upstream.request_attempt_count",
    }


@pytest.mark.parametrize(
    ("body", "model", "header"),
    [
        (b'{"model":"m"}', b"m", b"m"),
        (b'{"model":"one","model":"two"}', b"two", b"two"),
        (b'{"mo\\u0064el":"m"}', b"m", b"m"),
        (b"{}", b"_missing", None),
        (b'{"model":null}', b"_missing", None),
        (b'{"model":["m"]}', b"_missing", None),
        (b"{", b"_error", None),
        (b'{"model":"\xff"}', b"_error", None),
    ],
)
async def test_a_body_without_a_model_is_told_apart_from_one_with(
    world: World, body: bytes, model: bytes, header: bytes | None
) -> None:
    """In the metadata; the header is set only where there is a model."""
    world.service.answer = lambda _: immediate(200, b"")
    await world.gateway.ask("POST", CHAT, (), body)
    (seen,) = world.service.seen
    assert seen.body_model == model
    assert seen.request.get(headers.MODEL[0]) == header


async def test_a_line_break_in_a_model_never_becomes_a_header(world: World) -> None:
    """Not even when the service lets it pass."""
    reply = await world.gateway.ask("POST", CHAT, (), b'{"model":"m\\r\\nx-evil: 1"}')
    assert (reply.status, reply.headers[headers.REASON]) == (500, "internal")
    assert not world.hits()


async def test_uploads_are_not_parsed(world: World) -> None:
    """On paths whose bodies are no JSON nothing is read, and nothing waits for the end."""
    extra = {"content-type": "multipart/form-data; boundary=x"}
    await world.gateway.post("m", extra, path="/v1/audio/transcriptions")
    (seen,) = world.service.seen
    assert seen.body_model is None
    assert headers.MODEL[0] not in seen.request


async def test_tls_is_verified_by_name_and_authority(world: World) -> None:
    """Unless that is switched off."""
    for name, served in (
        ("tls", True),
        ("unverified", True),
        ("wrong-name", False),
        ("unknown-authority", False),
    ):
        world.service.answer = lambda _, name=name: steer(f"ep-{name}")  # type: ignore[misc]  # bound for this round
        reply = await world.gateway.post("m")
        expected = (200, None) if served else (503, "upstream_failed")
        assert (reply.status, reply.headers.get(headers.REASON)) == expected, name


async def test_a_tls_failure_moves_on_to_the_next(world: World) -> None:
    """Which may be reached by TLS, too."""
    world.service.answer = lambda _: steer("ep-wrong-name", "ep-tls")
    assert (await world.gateway.post("m")).headers["x-served-by"] == "tls"


async def test_failed_attempts_are_logged_with_their_decision(world: World) -> None:
    """Also those that a later success hides; a clean request logs nothing."""
    world.service.answer = lambda _: steer("ep-a", decision="d-6")
    assert (await world.gateway.post("m")).status == 200
    fails(world, "a", BUSY)
    world.service.answer = lambda _: steer("ep-gone", "ep-a", "ep-b", decision="d-7")
    assert (await world.gateway.post("m")).status == 200
    refused, busy = await world.service.entries("d-7", 2)
    for entry in (refused, busy):
        assert entry.common_properties.access_log_type == UpstreamEnd
    assert refused.common_properties.upstream_cluster == b"ep-gone"
    assert refused.common_properties.response_flags.upstream_connection_failure
    assert busy.common_properties.upstream_cluster == b"ep-a"
    assert busy.response.response_code.value == 503
    assert dict(busy.response.response_headers) == {"retry-after": b"7"}
    tags = [entry.common_properties.custom_tags["decision"] for entry in world.service.logged]
    assert b"d-6" not in tags


async def test_a_cut_stream_is_logged_with_its_decision(world: World) -> None:
    """The request's own entry says that it was the endpoint."""
    world.service.answer = lambda _: steer("ep-a", decision="d-8")
    fails(world, "a", Fault(FaultKind.CUT, chunks=3, how=CutBy.RST))
    body = chat("m")[:-1] + b',"stream":true}'
    with pytest.raises((asyncio.IncompleteReadError, ValueError)):
        await world.gateway.ask("POST", CHAT, (), body)
    entries = await world.service.entries("d-8", 2)
    (entry,) = [one for one in entries if one.common_properties.access_log_type == DownstreamEnd]
    assert entry.response.response_code.value == 200
    assert entry.response.response_code_details.startswith(b"upstream_reset_after_response_started")


async def test_a_request_that_nobody_decided_on_logs_nothing(world: World) -> None:
    """Whatever became of it: the next entry is the next decision's."""
    world.service.answer = lambda _: None
    assert (await world.gateway.post("other")).status == 503
    world.service.answer = lambda _: steer("ep-gone", decision="d-9")
    assert (await world.gateway.post("m")).status == 503
    await world.service.entries("d-9", 2)
    tags = [entry.common_properties.custom_tags.get("decision") for entry in world.service.logged]
    assert None not in tags


async def test_a_websocket_is_opened(tmp_path: Path) -> None:
    """At its path the upgrade goes to the endpoint, and bytes go both ways."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert b"upgrade: websocket" in await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\n")
        writer.write(b"upgrade: websocket\r\n\r\n")
        writer.write(await reader.readexactly(5))
        assert await reader.read() == b""  # one that closes first would race with its answer
        writer.close()

    async with await asyncio.start_server(echo, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        configuration = config(endpoint("a", f"http://127.0.0.1:{port}", "m"), folder=tmp_path)
        service = ScriptedService(tmp_path / "service.sock")
        async with service, gateway(configuration, tmp_path) as running:
            service.answer = lambda _: steer("ep-a")
            reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
            writer.write(
                b"GET /v1/realtime?model=m HTTP/1.1\r\nhost: gw\r\nconnection: upgrade\r\n"
                b"upgrade: websocket\r\n\r\nhello"
            )
            async with asyncio.timeout(SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 101")
                assert await reader.readexactly(5) == b"hello"
            writer.close()
    assert service.seen[0].request[":path"] == b"/v1/realtime?model=m"
    assert service.seen[0].request["upgrade"] == b"websocket"


async def test_the_end_of_the_service_cuts_no_stream(tmp_path: Path) -> None:
    """And the next request fails open."""
    async with LabEngine("a", ("m",)) as engine:
        configuration = config(endpoint("a", engine.url, "m"), folder=tmp_path)
        service = ScriptedService(tmp_path / "service.sock")
        async with service, gateway(configuration, tmp_path) as running:
            service.answer = lambda _: steer("ep-a")
            engine.faults.add(Fault(FaultKind.STALL, chunks=2, seconds=0.5, times=1))
            body = chat("m")[:-1] + b',"stream":true}'
            stream = asyncio.create_task(running.ask("POST", CHAT, (), body))
            await service.until_answering()
            await service.stop()
            assert (await stream).body.rstrip().endswith(b"[DONE]")
            assert (await running.post("m")).status == 200
            assert len(service.seen) == 1
