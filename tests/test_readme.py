"""What the README shows works as it stands: its links, its commands and every block to paste."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from textwrap import indent

import aiohttp
import pytest
import yaml

from extproc import headers
from extproc.clusters import cluster_name
from extproc.config.parse import parse
from extproc.config.values import Service
from extproc.lab.engine_http import LabEngine
from extproc.lab.envoy import complaint, running_envoy
from extproc.lab.processes import Child, free_port
from extproc.xds.bootstrap import bootstrap

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]

MODEL = "llama-3.3-70b"

# What somebody's own Envoy has already; each block goes where its name stands, indented so far.
SOMEBODYS_ENVOY = """\
admin: {address: {socket_address: {address: 127.0.0.1, port_value: 0}}}
static_resources:
  listeners:
  - name: web
    address: {socket_address: {address: 127.0.0.1, port_value: 0}}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.\
http_connection_manager.v3.HttpConnectionManager
          stat_prefix: web
@          connection manager
          route_config:
            virtual_hosts:
            - name: web
              domains: ["*"]
              routes:
@              routes
              - match: {prefix: /}
                direct_response: {status: 200, body: {inline_string: the rest of the site}}
          http_filters:
@          http_filters
          - name: envoy.filters.http.router
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router
  clusters:
@  clusters
"""


def blocks(language: str) -> Mapping[str, str]:
    """The README's blocks in a language, by the first words of their first line."""
    found = re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
    return {re.split(r":|$", text.splitlines()[0].removeprefix("# "))[0]: text for text in found}


def assembled() -> str:
    """The README's blocks in somebody's Envoy."""
    pasted = blocks("yaml")
    lines = []
    for line in SOMEBODYS_ENVOY.splitlines(keepends=True):
        if line.startswith("@"):
            name = line[1:].strip()
            lines.append(indent(pasted[name], line[1:].split(name)[0]))
        else:
            lines.append(line)
    return "".join(lines)


def replaced(text: str, *changes: tuple[str, str]) -> str:
    """`text` with each first part, which must occur exactly once, exchanged for its second."""
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_within_the_docs_leads_somewhere(page: Path) -> None:
    """To a file that is there, and to a heading of it where the link names one."""
    links = re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", page.read_text(encoding="utf-8"))
    for target, anchor in links:
        file = (page.parent / target).resolve() if target else page
        assert file.is_file(), target
        assert not anchor or anchor in anchors(file), f"{target}#{anchor}"


def test_every_make_target_that_it_names_exists() -> None:
    """And `make` alone lists them."""
    named = set(re.findall(r"\bmake ([a-z-]+)", README)) - {"alone"}
    targets = re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert {"up", "test"} <= named <= set(targets)


def test_the_configuration_is_read_without_a_warning() -> None:
    """Two engines, one model, an alias."""
    config = parse(blocks("yaml")["llmgw.yaml"])
    assert config.warnings == ()
    assert [info.id for info in config.endpoints] == ["gpu-1", "gpu-2"]
    assert [(entry.name, entry.aliases) for entry in config.models] == [(MODEL, ("llama",))]


def test_the_blocks_name_what_the_service_answers_with() -> None:
    """Clusters as the service names them, its default address, and every header to be stripped."""
    pasted = {name: yaml.safe_load(text) for name, text in blocks("yaml").items()}
    config = parse(blocks("yaml")["llmgw.yaml"])
    clusters = [cluster["name"] for cluster in pasted["clusters"]]
    assert clusters[-2:] == [cluster_name(info.id) for info in config.endpoints]
    (listener,) = pasted["connection manager"]["early_header_mutation_extensions"]
    stripped = [each["remove"] for each in listener["typed_config"]["mutations"]]
    assert tuple(stripped) == headers.STRIPPED_AT_THE_EDGE
    for route in pasted["routes"]:
        assert tuple(route["request_headers_to_remove"]) == headers.REMOVED_BY_THE_ROUTE
    assert [match["name"] for match in pasted["routes"][0]["match"]["headers"][2:]] == [
        *headers.MODEL
    ]
    assert f"`{Service().address}`" in README


def test_the_blocks_say_what_the_rendered_configuration_says() -> None:
    """What the filter, the retries and the endpoint's cluster have, the rendered ones have too."""
    pasted = {name: yaml.safe_load(text) for name, text in blocks("yaml").items()}
    whole = bootstrap(parse(blocks("yaml")["llmgw.yaml"]))
    rendered = yaml.safe_load(yaml.safe_dump(_plain(whole)))["static_resources"]
    manager = rendered["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    host = manager["route_config"]["virtual_hosts"][0]
    by_name = {each["name"]: each for each in manager["http_filters"]}
    ours = pasted["http_filters"][1]["typed_config"]
    theirs = by_name["llmgw.ext-proc"]["typed_config"]
    for key in ours.keys() - {"forward_rules", "grpc_service"}:
        assert ours[key] == theirs[key], key
    retry = pasted["routes"][0]["route"]["retry_policy"]
    assert {key: host["retry_policy"][key] for key in retry} == retry
    clusters = {each["name"]: each for each in rendered["clusters"]}
    for cluster in pasted["clusters"][2:]:
        twin = clusters[cluster["name"]]
        assert {key: twin[key] for key in cluster} == cluster


def _plain(tree: object) -> object:
    """`tree` as lists and dictionaries."""
    if isinstance(tree, Mapping):
        return {str(key): _plain(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_plain(value) for value in tree]
    return tree


@pytest.mark.envoy
async def test_envoy_accepts_the_blocks(tmp_path: Path) -> None:
    """Pasted as they stand into a configuration that knows nothing of them."""
    assert await complaint(assembled(), tmp_path) is None


@asynccontextmanager
async def somebodys_envoy(folder: Path) -> AsyncIterator[tuple[str, Child, LabEngine, LabEngine]]:
    """Envoy with the blocks, the service on the README's file, and two engines behind them.

    Only addresses are exchanged. Given are Envoy's own, the service, and the engines.
    """
    async with AsyncExitStack() as exits:
        one, two = (LabEngine(name, (MODEL,)) for name in ("gpu-1", "gpu-2"))
        for engine in (one, two):
            await exits.enter_async_context(engine)
        file = folder / "llmgw.yaml"
        file.write_text(
            replaced(
                blocks("yaml")["llmgw.yaml"],
                ("http://10.0.0.11:8000", one.url),
                ("http://10.0.0.12:8000", two.url),
            )
        )
        port = free_port()
        service = Child("the service", _serve(file, port))
        await service.start()
        exits.push_async_callback(service.kill)
        await service.until(lambda: any(" ready on " in line for line in service.lines), 30)
        text = replaced(
            assembled(),
            ("port_value: 9002", f"port_value: {port}"),
            ("address: 10.0.0.11, port_value: 8000", _address(one)),
            ("address: 10.0.0.12, port_value: 8000", _address(two)),
        )
        envoy = await exits.enter_async_context(
            running_envoy(text, folder, log=folder / "envoy.log")
        )
        yield f"http://127.0.0.1:{await envoy.listener_port('web')}", service, one, two


def _serve(file: Path, port: int) -> list[str]:
    return [
        *(sys.executable, "-m", "extproc.cli.llmgw", "serve", f"--config={file}"),
        *(f"--address=127.0.0.1:{port}", f"--http-address=127.0.0.1:{free_port()}"),
    ]


def _address(engine: LabEngine) -> str:
    return f"address: 127.0.0.1, port_value: {engine.port}"


@pytest.mark.envoy
async def test_the_blocks_serve_requests(tmp_path: Path) -> None:
    """By body and by header, past a dead engine, with the SDK's snippet; closed without service."""
    async with somebodys_envoy(tmp_path) as (url, service, one, two):
        async with aiohttp.ClientSession(f"{url}/v1/", trust_env=False) as session:
            chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}

            async def ask(model: str, **more: str) -> int:
                body = {**chat, "model": model}
                async with session.post("chat/completions", json=body, headers=more) as answer:
                    await answer.read()
                    return answer.status

            for number in range(8):
                assert await ask("llama" if number % 2 else MODEL) == 200
                assert await ask(MODEL, **{headers.MODEL[0]: MODEL}) == 200
            assert one.counters.served + two.counters.served == 16
            assert min(one.counters.served, two.counters.served) > 0
            assert await ask("nobody-has-this") == 404

            seen = {name for received in one.requests for name, _ in received.headers}
            assert not {name.decode().lower() for name in seen} & {
                *headers.REMOVED_BY_THE_ROUTE,
                *headers.CREDENTIALS,
                headers.CLIENT,
            }

            one.refuse()
            assert {await ask(MODEL) for _ in range(6)} == {200}
            await one.accept()

            await asyncio.to_thread(_run_snippet, url)

            await service.kill()
            assert await ask(MODEL) == 503
        async with aiohttp.ClientSession(trust_env=False) as session, session.get(url) as rest:
            assert await rest.text() == "the rest of the site"


def _run_snippet(url: str) -> None:
    """The README's Python block has been run against `url`."""
    snippet = replaced(
        blocks("python")["from openai import OpenAI"],
        ("http://127.0.0.1:8080", url),
        ('model="demo"', f'model="{MODEL}"'),
    )
    exec(compile(snippet, "README.md", "exec"), {})
