"""What the service answers itself: models, readiness, misplaced methods and paths."""

from __future__ import annotations

import json
from urllib.parse import quote

import httpx2
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from extproc.exchange.listing import Listed, Listing, local_answer
from extproc.exchange.messages import Immediate

# The first text that hypothesis draws reads its character tables, which may take a second.
LAW = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
NAMES = ["gpt-9", "org/m:7B@x", "with blank", "100%", "模型", "a/b/c"]
LISTING = Listing(
    [*[Listed(name) for name in NAMES], Listed("east/gpt-9", "east", is_own=False)], created=7
)


def ask(
    method: str, path: str, *, is_ready: bool = True, own_only: bool = False
) -> Immediate | None:
    """The service's own answer to a request."""
    return local_answer(method, path, LISTING, is_ready=lambda: is_ready, own_only=own_only)


def asked(method: str, path: str, *, is_ready: bool = True, own_only: bool = False) -> Immediate:
    """The service's own answer, which there must be."""
    found = ask(method, path, is_ready=is_ready, own_only=own_only)
    assert found is not None
    return found


def test_every_model_is_listed_in_order() -> None:
    """The list has OpenAI's shape, own and peers' models alike."""
    found = asked("GET", "/v1/models")
    assert found.status == 200
    assert dict(found.headers) == {"content-type": b"application/json"}
    told = json.loads(found.body)
    assert told["object"] == "list"
    assert [card["id"] for card in told["data"]] == [*NAMES, "east/gpt-9"]
    first = {"id": "gpt-9", "object": "model", "created": 7, "owned_by": "llmgw"}
    assert told["data"][0] == first
    assert told["data"][-1]["owned_by"] == "east"


def test_the_list_is_rendered_once() -> None:
    """Every caller gets the same bytes object."""
    assert asked("GET", "/v1/models").body is asked("GET", "/v1/models").body


def test_a_peer_is_shown_own_models_only() -> None:
    """What came from a peer is neither listed nor found for a peer."""
    told = json.loads(asked("GET", "/v1/models", own_only=True).body)
    assert [card["id"] for card in told["data"]] == NAMES
    assert asked("GET", "/v1/models/east/gpt-9", own_only=True).status == 404
    assert asked("GET", "/v1/models/east/gpt-9").status == 200


def test_a_name_is_listed_once() -> None:
    """Of two entries of one name the first counts."""
    listing = Listing([Listed("a", "x"), Listed("b"), Listed("a", "y")], created=0)
    found = listing.answer("GET", "/v1/models")
    assert [card["owned_by"] for card in json.loads(found.body)["data"]] == ["x", "llmgw"]


def test_no_models_is_an_empty_list() -> None:
    """Nothing configured lists nothing."""
    found = Listing([], created=0).answer("GET", "/v1/models")
    assert json.loads(found.body) == {"object": "list", "data": []}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("safe", ["", "/", "/:@"])
def test_a_model_is_found_by_its_id(name: str, safe: str) -> None:
    """Slashes and other characters come plain or percent-encoded."""
    found = asked("GET", f"/v1/models/{quote(name, safe=safe)}")
    assert found.status == 200
    assert json.loads(found.body) == {
        "id": name,
        "object": "model",
        "created": 7,
        "owned_by": "llmgw",
    }


def test_a_path_of_raw_bytes_is_utf8() -> None:
    """An id that a client did not encode arrives with one character per byte."""
    raw = "模型".encode().decode("latin-1")
    assert asked("GET", f"/v1/models/{raw}").status == 200


@pytest.mark.parametrize("tail", ["x", "GPT-9", "gpt-9/", "a%252Fb%252Fc", "%FF", "%00", "\u20ac"])
def test_an_unknown_model_is_404(tail: str) -> None:
    """Case, a last slash and double encoding make another name; the envelope says which."""
    found = asked("GET", f"/v1/models/{tail}")
    assert found.status == 404
    assert json.loads(found.body)["error"]["code"] == "model_not_found"


def test_head_has_the_headers_alone() -> None:
    """HEAD is GET without its body, found or not."""
    for path, status in (("/v1/models", 200), ("/v1/models/gpt-9", 200), ("/v1/models/x", 404)):
        found = asked("HEAD", path)
        assert (found.status, found.body) == (status, b"")
        assert ("content-type", b"application/json") in found.headers


def test_readiness_is_a_status() -> None:
    """Ready is 200; not ready is 503 with a moment to come back."""
    assert asked("GET", "/ready").body == b'{"status":"ready"}'
    assert asked("HEAD", "/ready").body == b""
    found = asked("GET", "/ready", is_ready=False)
    assert found.status == 503
    assert ("retry-after", b"1") in found.headers
    assert ("x-llmgw-reason", b"not_ready") in found.headers


def test_readiness_does_not_hide_the_list() -> None:
    """Only /ready tells about readiness."""
    assert asked("GET", "/v1/models", is_ready=False).status == 200
    assert ask("POST", "/v1/chat/completions", is_ready=False) is None


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/messages"),
        ("POST", "/v1/audio/transcriptions"),
        ("GET", "/v1/realtime"),
    ],
)
def test_inference_is_left_to_an_endpoint(method: str, path: str) -> None:
    """The service has no answer of its own to what an endpoint serves."""
    assert ask(method, path) is None


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("POST", "/v1/models", b"GET, HEAD, OPTIONS"),
        ("DELETE", "/v1/models/gpt-9", b"GET, HEAD, OPTIONS"),
        ("GET", "/v1/chat/completions", b"POST, OPTIONS"),
        ("HEAD", "/v1/messages", b"POST, OPTIONS"),
        ("PUT", "/ready", b"GET, HEAD, OPTIONS"),
        ("post", "/v1/completions", b"POST, OPTIONS"),
        ("", "/v1/completions", b"POST, OPTIONS"),
    ],
)
def test_a_wrong_method_is_405(method: str, path: str, allow: bytes) -> None:
    """Methods are case-sensitive, and the answer lists the right ones."""
    found = asked(method, path)
    assert found.status == 405
    assert ("allow", allow) in found.headers
    assert (found.body == b"") is (method == "HEAD")


def test_options_grants_no_origin() -> None:
    """A preflight that reaches the service is 204 with the methods and without CORS headers."""
    found = asked("OPTIONS", "/v1/chat/completions")
    assert (found.status, found.body) == (204, b"")
    assert dict(found.headers) == {"allow": b"POST, OPTIONS"}


@pytest.mark.parametrize(
    "path", ["/", "", "/metrics", "/v1/models/", "/v1/load_lora_adapter", "/v1/files/x"]
)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "DELETE"])
def test_an_unknown_path_is_404_for_every_method(method: str, path: str) -> None:
    """What is not on the list of paths does not exist."""
    found = asked(method, path)
    assert found.status == 404
    assert ("x-llmgw-reason", b"path_not_found") in found.headers


def test_openais_sdk_lists_and_retrieves() -> None:
    """The SDK reads the list and finds a model whose id has a slash."""

    def gateway(request: httpx2.Request) -> httpx2.Response:
        path = request.url.raw_path.decode("ascii").partition("?")[0]
        found = asked(request.method, path)
        headers = [(name.encode(), value) for name, value in found.headers]
        return httpx2.Response(found.status, headers=headers, content=found.body)

    client = openai.OpenAI(
        api_key="k",
        base_url="http://gateway/v1",
        max_retries=0,
        http_client=httpx2.Client(transport=httpx2.MockTransport(gateway)),
    )
    with client:
        assert [model.id for model in client.models.list()] == [*NAMES, "east/gpt-9"]
        for name in NAMES:
            assert client.models.retrieve(name).id == name
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("none/such")


@LAW
@given(st.sampled_from(["GET", "HEAD"]), st.text(max_size=20))
def test_any_id_is_found_exactly_when_it_is_listed(method: str, name: str) -> None:
    """An encoded name finds its own model and nothing else."""
    path = f"/v1/models/{quote(name, safe='')}"
    assert LISTING.answer(method, path).status == (200 if name in NAMES else 404)
