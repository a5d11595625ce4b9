"""compose.yaml, the configuration that it mounts, and the image agree with each other."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml

from extproc.config.read import read
from extproc.lab import engine_main
from extproc.lab.envoy import complaint
from extproc.routing.endpoint import Kind
from extproc.xds.render import render

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "envoy" / "compose"
CONFIG = read(FOLDER / "llmgw.yaml")
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES: Mapping[str, Mapping[str, Any]] = COMPOSE["services"]
VARIABLE = re.compile(r"\$\{[A-Z_]+:-([^}]*)\}")


def mounts(service: str) -> dict[PurePosixPath, tuple[Path, set[str]]]:
    """What a service mounts: the path inside, to the path in the repository and the options."""
    found = {}
    for text in SERVICES[service].get("volumes", []):
        source, target, options = text.split(":")
        found[PurePosixPath(target)] = (ROOT / source, set(options.split(",")))
    return found


def argument(service: str, name: str) -> str:
    """What follows the option `name` on a service's command line."""
    command: list[str] = SERVICES[service]["command"]
    return command[command.index(name) + 1]


def test_the_committed_envoy_configuration_is_what_the_renderer_makes() -> None:
    """A change of the renderer or of llmgw.yaml shows in the committed file."""
    assert (FOLDER / "envoy.yaml").read_text() == render(CONFIG)


@pytest.mark.envoy
async def test_envoy_accepts_the_committed_configuration(tmp_path: Path) -> None:
    """The real binary has nothing against the file."""
    assert await complaint((FOLDER / "envoy.yaml").read_text(), tmp_path) is None


def test_the_configuration_is_mounted_read_only_where_the_commands_look_for_it() -> None:
    """Envoy and the service each read the committed file, and cannot write it."""
    for service, option, name in (
        ("envoy", "-c", "envoy.yaml"),
        ("llmgw", "--config", "llmgw.yaml"),
    ):
        source, options = mounts(service)[PurePosixPath(argument(service, option))]
        assert source == FOLDER / name
        assert "ro" in options
        assert source.is_file()


def test_every_endpoint_is_an_engine_of_the_same_name_port_and_models() -> None:
    """An endpoint's URL leads to the lab engine that calls itself by the endpoint's id."""
    engines = {name for name, service in SERVICES.items() if "entrypoint" in service}
    assert {info.url.host for info in CONFIG.endpoints} == engines
    for info in CONFIG.endpoints:
        service = SERVICES[info.url.host]
        flags = engine_main._parser().parse_args(service["command"])
        assert info.kind is Kind.ENGINE
        assert (flags.name, flags.port, flags.models) == (info.id, info.url.port, info.models)
        assert flags.host == "0.0.0.0"
        assert service["entrypoint"][-1] == "extproc.lab.engine_main"


def test_envoy_dials_the_service_by_its_name_and_port() -> None:
    """What Envoy dials is the container that serves, which listens on every interface."""
    host, _, port = (CONFIG.service.envoy_address or "").rpartition(":")
    assert SERVICES[host]["command"][0] == "serve"
    assert CONFIG.service.address == f"0.0.0.0:{port}"


def test_only_the_listener_is_published_and_only_to_this_machine() -> None:
    """The one published port is Envoy's listener, on 127.0.0.1:8080 unless told otherwise."""
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert list(published) == ["envoy"]
    (text,) = published["envoy"]
    assert VARIABLE.sub(r"\1", text) == f"127.0.0.1:8080:{CONFIG.listener.port}"
    assert CONFIG.listener.host == "0.0.0.0"
    assert CONFIG.listener.admin_host == "127.0.0.1"


def test_no_container_runs_as_root_or_waits_for_the_health_of_another() -> None:
    """Start-up works with engines that run no health checks, and needs no privilege."""
    for name, service in SERVICES.items():
        assert isinstance(service.get("depends_on", []), list)  # the short form waits for no health
        assert service["cap_drop"] == ["ALL"], name
        assert service["read_only"] is True, name
    assert SERVICES["envoy"]["user"] == "65532:65532"
    assert "USER 65532:65532" in dockerfile()
    assert CONFIG.listener.port >= 1024


def test_all_but_envoy_run_the_image_that_is_built_here() -> None:
    """One service builds the image; the engines use it and never look for it in a registry."""
    own = {name: service for name, service in SERVICES.items() if name != "envoy"}
    assert len({service["image"] for service in own.values()}) == 1
    assert [name for name, service in own.items() if "build" in service] == ["llmgw"]
    for name, service in own.items():
        assert name == "llmgw" or service["pull_policy"] == "never"
    assert SERVICES["envoy"]["image"] == "docker.io/envoyproxy/envoy:v1.40.0"


def test_the_image_exposes_and_checks_the_ports_that_the_service_listens_on() -> None:
    """EXPOSE and the health check name the ports of the mounted configuration."""
    decisions = CONFIG.service.address.rpartition(":")[2]
    http = CONFIG.service.http_address.rpartition(":")[2]
    assert f"\nEXPOSE {decisions} {http}\n" in dockerfile()
    assert f"('127.0.0.1', {http})" in dockerfile()


def dockerfile() -> str:
    """The text of the Dockerfile."""
    return (ROOT / "Dockerfile").read_text()
