"""The rendered Envoy while nobody answers for the service: what fails open, what stays closed."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import pytest_asyncio
from xds_world import CHAT, MESSAGES, Gateway, chat, config, endpoint, gateway

from extproc import headers
from extproc.config.values import ClientPolicy
from extproc.lab.engine_http import LabEngine
from extproc.routing.catalog import ModelEntry
from extproc.routing.endpoint import Kind
from extproc.xds.tree import extension

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="module")]

ODD_NAMES = ("1e5", "y", "on", "0x1F", "a: b", "#x", "null", "org/m:tag@1", "it's %40", '"q"')


@dataclass(frozen=True, slots=True)
class World:
    """One Envoy in front of two engines of our own, a provider and a peer; no service."""

    gateway: Gateway
    a: LabEngine
    b: LabEngine
    external: LabEngine
    peer: LabEngine

    @property
    def engines(self) -> tuple[LabEngine, ...]:
        """All of them."""
        return self.a, self.b, self.external, self.peer

    def hits(self) -> dict[str, int]:
        """How many requests each got, zeros left out."""
        counts = {engine.name: engine.counters.requests for engine in self.engines}
        return {name: count for name, count in counts.items() if count}

    def forget(self) -> None:
        """Nobody has seen anything."""
        for engine in self.engines:
            engine.records.reset()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """The engines and Envoy run for all tests of this file."""
    folder = tmp_path_factory.mktemp("down")
    async with (
        LabEngine("a", ("m", "only-a", *ODD_NAMES)) as a,
        LabEngine("b", ("m",)) as b,
        LabEngine("external", ("m", "provided")) as external,
        LabEngine("peer", ("m",)) as peer,
    ):
        infos = (
            endpoint("a", a.url, "m", "only-a", *ODD_NAMES),
            endpoint("b", b.url, "m"),
            endpoint("external", external.url, "m", "provided", kind=Kind.EXTERNAL),
            endpoint("peer", peer.url, "p/m", "m", kind=Kind.PEER),
        )
        plain = config(*infos, folder=folder)
        # The stand-in for a filter that authenticates: it turns one header into the other.
        authenticate = extension(
            "authenticate",
            "envoy.extensions.filters.http.header_mutation.v3.HeaderMutation",
            {
                "mutations": {
                    "request_mutations": [
                        {
                            "append": {
                                "header": {"key": headers.CLIENT, "value": "%REQ(x-test-user)%"},
                                "append_action": "OVERWRITE_IF_EXISTS_OR_ADD",
                            }
                        }
                    ]
                }
            },
        )
        configuration = replace(
            plain,
            models=(*plain.models, ModelEntry("alias-of", aliases=("other-name",))),
            clients={"careful": ClientPolicy(no_store=True), "free": ClientPolicy()},
            listener=replace(plain.listener, http_filters=(authenticate,)),
        )
        async with gateway(configuration, folder) as running:
            yield World(running, a, b, external, peer)


@pytest.fixture
def world(started: World) -> World:
    """The same, with nothing seen yet."""
    started.forget()
    return started


async def test_a_model_in_the_body_goes_to_its_own_engines(world: World) -> None:
    """Over both of them, and to nobody else that lists the model."""
    for _ in range(20):
        assert (await world.gateway.post("m")).status == 200
    assert set(world.hits()) == {"a", "b"}
    assert (await world.gateway.post("only-a")).headers["x-served-by"] == "a"


@pytest.mark.parametrize("name", headers.MODEL)
async def test_any_model_header_finds_the_pool(world: World, name: str) -> None:
    """Without the body being read, and without another model header added to it."""
    reply = await world.gateway.post("ignored-in-the-body", {name: "only-a"})
    assert reply.status == 404  # the engine's own word about the body's model
    (received,) = world.a.requests
    sent = [key.lower() for key, _ in received.headers]
    assert [key.decode() for key in sent if key.decode() in headers.MODEL] == [name]


@pytest.mark.parametrize("name", ODD_NAMES)
async def test_odd_model_names_survive_the_rendering(world: World, name: str) -> None:
    """What YAML could take for a number or a comment is still a name."""
    reply = await world.gateway.post(name, {headers.MODEL[0]: name})
    assert reply.headers["x-served-by"] == "a"
    reply = await world.gateway.post(name)
    assert reply.headers["x-served-by"] == "a"


@pytest.mark.parametrize(
    "extra",
    [
        [(headers.HOP, "other")],
        [(headers.HOP, "")],
        [(headers.RESIDENCY, "eu")],
        [(headers.RESIDENCY, "")],
        [(headers.NO_STORE, "true")],
        [(headers.NO_STORE, "")],
        [(headers.NO_STORE, "False")],
        [(headers.NO_STORE, "falsely")],
        [(headers.NO_STORE, "00")],
        [(headers.NO_STORE, "false"), (headers.NO_STORE, "true")],
        [(headers.NO_STORE, "true"), (headers.NO_STORE, "0")],
        [("x-test-user", "careful")],
    ],
)
async def test_restricted_requests_stay_closed(world: World, extra: list[tuple[str, str]]) -> None:
    """By whatever rule, whether the model is in the body or in a header."""
    for more in ([], [(headers.MODEL[0], "m")]):
        reply = await world.gateway.post("m", [*extra, *more])
        assert reply.status == 503
        assert reply.headers[headers.REASON] == "no_endpoint"
    assert not world.hits()


@pytest.mark.parametrize(
    "extra",
    [
        {headers.NO_STORE: "false"},
        {headers.NO_STORE: "0"},
        {"x-test-user": "free"},
        {headers.TAGS: "team=a"},
        {"session_id": "s"},
    ],
)
async def test_requests_without_a_restriction_are_served(
    world: World, extra: dict[str, str]
) -> None:
    """Also where a header says so in words."""
    assert (await world.gateway.post("m", extra)).status == 200


@pytest.mark.parametrize("model", ["provided", "p/m", "unknown", "alias-of", "other-name", None])
async def test_models_without_engines_of_their_own_stay_closed(
    world: World, model: str | None
) -> None:
    """Providers and peers are never in a pool, nor are aliases."""
    reply = await world.gateway.post(model)
    assert (reply.status, reply.headers[headers.REASON]) == (503, "no_endpoint")
    assert not world.hits()


async def test_two_model_headers_stay_closed(world: World) -> None:
    """The service would refuse them; which of the two is meant is not for Envoy to guess."""
    both = {headers.MODEL[0]: "only-a", headers.MODEL[1]: "m"}
    assert (await world.gateway.post("m", both)).status == 503


async def test_clients_cannot_steer(world: World) -> None:
    """Every header of ours that says where to go is gone before a route is chosen."""
    spoofed = {
        headers.CLUSTER: "ep-external",
        headers.DESTINATION: world.external.authority,
        headers.SUBSET: world.external.authority,
        headers.SERVED: world.external.authority,
        headers.CLIENT: "free",
        headers.MAX_RETRIES: "9",
    }
    reply = await world.gateway.post("only-a", [*spoofed.items(), *spoofed.items()])
    assert reply.status == 200
    (received,) = world.a.requests
    assert not {key.decode().lower() for key, _ in received.headers} & {*spoofed}
    assert world.hits() == {"a": 1}


@pytest.mark.parametrize("name", headers.CREDENTIALS)
async def test_an_engine_without_a_key_is_not_given_the_clients(world: World, name: str) -> None:
    """Whatever header it came in."""
    assert (await world.gateway.post("only-a", {name: "secret"})).status == 200
    (received,) = world.a.requests
    assert received.header(name) == []


async def test_the_host_is_the_endpoints(world: World) -> None:
    """With its port, which is not the scheme's."""
    await world.gateway.post("only-a")
    assert world.a.requests[0].header("host") == [world.a.authority.encode()]


@pytest.mark.parametrize(
    "path",
    [
        "/metrics",
        "//metrics",
        "/v1/../metrics",
        "/v1/chat/../../metrics",
        "/v1/%2e%2e/metrics",
        "/v1%2F..%2Fmetrics",
        "/v1/./../flush_cache",
        "/v1/chat/completions/../../load_lora_adapter",
        "/v1/load_lora_adapter",
        "/v1/chat/completions/",
        "/v1/models/",
        "/v1/Chat/completions",
        "/",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_unlisted_paths_are_not_served(world: World, method: str, path: str) -> None:
    """However they are written, and in the envelope of their kind."""
    body = b'{"model":"m"}' if method == "POST" else None
    reply = await world.gateway.ask(method, path, {headers.MODEL[0]: "m"}, body)
    assert reply.status == 404
    assert json.loads(reply.body)["error"]["code"] == "path_not_found"
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers[headers.SHOULD_RETRY] == "false"
    assert not world.hits()


@pytest.mark.parametrize(
    "path", ["//v1//chat/completions", "/v1/./chat/completions", f"{CHAT}?a=b"]
)
async def test_other_spellings_of_a_listed_path_are_served(world: World, path: str) -> None:
    """After normalisation they are the listed path."""
    assert (await world.gateway.post("m", path=path)).status == 200


async def test_a_wrong_method_is_told_the_right_ones(world: World) -> None:
    """By Envoy itself, in the envelope of the path; HEAD gets no body."""
    reply = await world.gateway.ask("GET", CHAT)
    assert (reply.status, reply.headers["allow"]) == (405, "POST, OPTIONS")
    assert json.loads(reply.body)["error"]["code"] == "method_not_allowed"
    reply = await world.gateway.ask("DELETE", "/v1/messages")
    assert reply.status == 405
    assert json.loads(reply.body)["type"] == "error"
    reply = await world.gateway.ask("POST", "/v1/models", (), b"{}")
    assert (reply.status, reply.headers["allow"]) == (405, "GET, HEAD, OPTIONS")
    reply = await world.gateway.ask("HEAD", CHAT)
    assert (reply.status, reply.body) == (405, b"")


async def test_own_errors_carry_the_envelope_of_the_path(world: World) -> None:
    """OpenAI's, and Anthropic's below /v1/messages; each says when to come back."""
    reply = await world.gateway.post("unknown")
    assert json.loads(reply.body) == {
        "error": {
            "message": "No endpoint can serve this request at the moment.",
            "type": "service_unavailable_error",
            "param": None,
            "code": "no_endpoint",
        }
    }
    assert reply.headers["content-type"] == "application/json"
    assert (reply.headers[headers.RETRY_AFTER], reply.headers[headers.RETRY_AFTER_MS]) == (
        "1",
        "1000",
    )
    assert "x-request-id" in reply.headers
    reply = await world.gateway.post("unknown", path="/v1/messages?beta=true")
    assert json.loads(reply.body)["error"]["type"] == "overloaded_error"
    reply = await world.gateway.ask("GET", "/v1/messages/batches")
    assert (reply.status, json.loads(reply.body)["type"]) == (404, "error")
    reply = await world.gateway.ask("GET", "/v1/messagesx")
    assert "type" not in json.loads(reply.body)


async def test_a_body_over_the_limit_is_refused_in_the_envelope(world: World) -> None:
    """Where it must be read; a model in a header lets any size through."""
    size = 33 * 1024 * 1024
    declared = f"POST {CHAT} HTTP/1.1\r\nhost: gw\r\ncontent-type: application/json\r\n"
    head = f"{declared}content-length: {size}\r\n"
    reply = await world.gateway.send((head + "\r\n").encode(), bytes(size))
    assert reply.status == 413
    assert json.loads(reply.body)["error"]["code"] == "body_too_large"
    assert reply.headers[headers.SHOULD_RETRY] == "false"
    body = b'{"model":"only-a",%s,"x":"%s"}' % (MESSAGES, b"a" * size)
    head = f"{declared}content-length: {len(body)}\r\n{headers.MODEL[0]}: only-a\r\n"
    assert (await world.gateway.send((head + "\r\n").encode() + body)).status == 200
    assert world.a.requests[-1].body_bytes == len(body)


async def test_a_body_below_the_limit_arrives_unchanged(world: World) -> None:
    """Read for its model on the way, in one piece or many."""
    body = b'{"x":"%s",%s,"model":"only-a"}' % (b"a" * 3_000_000, MESSAGES)
    head = f"POST {CHAT} HTTP/1.1\r\nhost: gw\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    for request, later in ((head + body, ()), (head, (body[:9], body[9:700_000], body[700_000:]))):
        assert (await world.gateway.send(request, *later, pause=0.01)).status == 200
    one, other = world.a.requests
    assert one.body_bytes == len(body)
    assert one.body_sha256 == other.body_sha256


async def test_a_model_in_a_header_lets_the_body_stream(world: World) -> None:
    """Its first bytes are at the engine before the client has sent the last."""
    body = chat("only-a")
    head = (
        f"POST {CHAT} HTTP/1.1\r\nhost: gw\r\ncontent-length: {len(body)}\r\n"
        f"content-type: application/json\r\n{headers.MODEL[0]}: only-a\r\n\r\n"
    ).encode()
    reply = await world.gateway.send(head + body[:5], body[5:], pause=0.3)
    assert reply.status == 200
    (received,) = world.a.requests
    assert received.first_byte_seconds is not None
    assert received.last_byte_seconds is not None
    assert received.last_byte_seconds - received.first_byte_seconds > 0.2


@pytest.mark.parametrize("more", [{}, {headers.MODEL[0]: "m"}])
@pytest.mark.parametrize("upgrade", ["websocket", "other"])
async def test_an_upgrade_where_none_is_does_not_hang(
    world: World, upgrade: str, more: dict[str, str]
) -> None:
    """It is refused at once."""
    reply = await world.gateway.post("m", {"connection": "upgrade", "upgrade": upgrade, **more})
    assert reply.status == 400
    assert json.loads(reply.body)["error"]["code"] == "upgrade_refused"


async def test_an_offer_of_http2_is_ignored(world: World) -> None:
    """As curl makes it with every first request."""
    offer = {
        "connection": "Upgrade, HTTP2-Settings",
        "upgrade": "h2c",
        "http2-settings": "AAMAAABkAAQCAAAAAAIAAAAA",
    }
    assert (await world.gateway.post("m", offer)).status == 200


async def test_requests_without_a_body_do_not_wait_for_one(world: World) -> None:
    """With a length of zero, in no chunks, with no framing at all, and with OPTIONS."""
    head = f"POST {CHAT} HTTP/1.1\r\nhost: gw\r\ncontent-type: application/json\r\n"
    for rest in (
        "content-length: 0\r\n\r\n",
        "transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        "\r\n",
    ):
        assert (await world.gateway.send((head + rest).encode())).status == 503
    assert (await world.gateway.ask("OPTIONS", CHAT)).status == 503
    assert not world.hits()


async def test_a_chunked_body_that_ends_in_trailers_is_read(world: World) -> None:
    """The model is found before them."""
    head = f"POST {CHAT} HTTP/1.1\r\nhost: gw\r\ntransfer-encoding: chunked\r\ntrailer: x-t\r\n\r\n"
    body = chat("only-a")
    chunks = b"%x\r\n%s\r\n0\r\nx-t: 1\r\n\r\n" % (len(body), body)
    assert (await world.gateway.send(head.encode() + chunks)).status == 200


async def test_http_1_0_is_spoken(world: World) -> None:
    """Also without a host."""
    body = chat("only-a")
    head = f"POST {CHAT} HTTP/1.0\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    assert (await world.gateway.send(head + body)).status == 200


@pytest.mark.parametrize("request_id", ["mine", "11111111-2222-4333-8444-555555555555"])
async def test_the_clients_request_id_is_kept(world: World, request_id: str) -> None:
    """To the letter, at the engine and in the answer."""
    reply = await world.gateway.post("only-a", {headers.REQUEST_ID: request_id})
    assert reply.headers[headers.REQUEST_ID] == request_id
    assert world.a.requests[0].header(headers.REQUEST_ID) == [request_id.encode()]


async def test_what_the_service_answers_itself_is_unavailable(world: World) -> None:
    """Readiness says so in its own words."""
    reply = await world.gateway.ask("GET", "/ready")
    assert (reply.status, reply.headers[headers.REASON]) == (503, "not_ready")
    reply = await world.gateway.ask("GET", "/v1/models/org%2Fname")
    assert (reply.status, reply.headers[headers.REASON]) == (503, "no_endpoint")


async def test_malformed_requests_get_the_envelope(world: World) -> None:
    """Where Envoy answers them at all."""
    reply = await world.gateway.send(f"POST {CHAT} HTTP/1.1\r\ncontent-length: 0\r\n\r\n".encode())
    assert (reply.status, json.loads(reply.body)["error"]["code"]) == (400, "request_invalid")
    reply = await world.gateway.ask("OPTIONS", "*")
    assert (reply.status, json.loads(reply.body)["error"]["code"]) == (404, "path_not_found")


async def test_a_dead_member_of_a_pool_costs_nothing(tmp_path: Path) -> None:
    """A retry goes to another member, and the dead one is soon left out."""
    async with LabEngine("a", ("m",)) as a, LabEngine("gone", ("m",)) as gone:
        infos = (endpoint("a", a.url, "m"), endpoint("gone", gone.url, "m"))
    configuration = config(*infos, folder=tmp_path)
    async with (
        LabEngine("a", ("m",), port=a.port),
        gateway(configuration, tmp_path) as running,
    ):
        for _ in range(30):
            assert (await running.post("m")).status == 200
