"""What each feature of the rendered configuration costs, in CPU per request.

Every variant leaves one feature out of the full configuration and shares the service and the nginx
upstream with it; the difference to the full one is the feature's cost. ROUNDS and SECONDS change
the run; JSON=1 prints one JSON object last.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import AsyncExitStack
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import load
import yaml
from rounds import JsonRow, Row, finish, in_turns, measure, summed_up
from subjects import ENDPOINTS, Subject, config_file

from extproc.config.values import Transport
from extproc.lab.envoy import find_envoy
from extproc.lab.processes import Child, free_port
from extproc.lab.stack import Stack
from extproc.xds.render import render

CONNECTIONS = 64
# The rendered tree is changed in place; its shape is Envoy's.
Tree = Any


def _manager(tree: Tree) -> Tree:
    chain = tree["static_resources"]["listeners"][0]["filter_chains"][0]
    return chain["filters"][0]["typed_config"]


def _filters(tree: Tree) -> Tree:
    return _manager(tree)["http_filters"]


def _ext_proc(tree: Tree) -> Tree:
    found = [f for f in _filters(tree) if f["typed_config"]["@type"].endswith("ExternalProcessor")]
    return found[0]["typed_config"]


def _drop_filters(tree: Tree, kind: str) -> None:
    kept = [f for f in _filters(tree) if not f["typed_config"]["@type"].endswith(kind)]
    _manager(tree)["http_filters"] = kept


def _without_ext_proc(tree: Tree) -> None:
    _drop_filters(tree, "ExternalProcessor")
    for route in _manager(tree)["route_config"]["virtual_hosts"][0]["routes"]:
        route.pop("typed_per_filter_config", None)


def _without_response_phase(tree: Tree) -> None:
    mode = _ext_proc(tree)["processing_mode"]
    mode["response_header_mode"] = mode["response_trailer_mode"] = "SKIP"


def _without_attributes(tree: Tree) -> None:
    _ext_proc(tree).pop("response_attributes", None)


def _without_forward_rules(tree: Tree) -> None:
    _ext_proc(tree).pop("forward_rules", None)


def _without_access_logs(tree: Tree) -> None:
    _manager(tree).pop("access_log", None)
    for item in _filters(tree):
        item["typed_config"].pop("upstream_log", None)


def _without_local_replies(tree: Tree) -> None:
    _manager(tree).pop("local_reply_config", None)


def _without_edge_strip(tree: Tree) -> None:
    _manager(tree).pop("early_header_mutation_extensions", None)


def _without_body_filters(tree: Tree) -> None:
    _drop_filters(tree, "JsonToMetadata")
    _drop_filters(tree, "HeaderMutation")
    for route in _manager(tree)["route_config"]["virtual_hosts"][0]["routes"]:
        route.pop("typed_per_filter_config", None)


def _without_upstream_filters(tree: Tree) -> None:
    for cluster in tree["static_resources"]["clusters"]:
        for options in cluster.get("typed_extension_protocol_options", {}).values():
            options.pop("http_filters", None)


VARIANTS: dict[str, Callable[[Tree], None]] = {
    "full": lambda _tree: None,
    "no ext_proc at all": _without_ext_proc,
    "no response phase": _without_response_phase,
    "no response attributes": _without_attributes,
    "no forward rules": _without_forward_rules,
    "no access logs": _without_access_logs,
    "no local reply config": _without_local_replies,
    "no strip at the edge": _without_edge_strip,
    "no body filters": _without_body_filters,
    "no upstream filters": _without_upstream_filters,
}


async def main() -> None:
    """The table is on the screen."""
    rounds = int(os.environ.get("ROUNDS", "3"))
    seconds = int(os.environ.get("SECONDS", "4"))
    upstream = free_port()
    async with AsyncExitStack() as exits:
        folder = Path(exits.enter_context(TemporaryDirectory(prefix="llmgw-bench-")))
        exits.enter_context(load.nginx(upstream))
        file = config_file(
            folder, [f"127.0.0.1:{upstream}"] * ENDPOINTS, transport=Transport.FASTLANE
        )
        stack = await exits.enter_async_context(Stack(file, port=0, concurrency=1))
        full = yaml.safe_load(render(stack.config))
        variants: list[Subject] = []
        for number, (name, change) in enumerate(VARIANTS.items()):
            tree = deepcopy(full)
            change(tree)
            port = free_port()
            listener = tree["static_resources"]["listeners"][0]
            listener["address"]["socket_address"]["port_value"] = port
            tree["admin"]["address"]["socket_address"]["port_value"] = free_port()
            path = folder / f"variant-{number}.yaml"
            path.write_text(yaml.safe_dump(tree))
            options = ["--concurrency", "1", "--disable-hot-restart", "--log-level", "error"]
            child = Child(name, [str(find_envoy()), "-c", str(path), *options])
            await child.start()
            exits.push_async_callback(child.stop)
            pids = {"envoy": child.pid, "service": stack.service.pid}
            variants.append(Subject(name, f"http://127.0.0.1:{port}", pids))
        await asyncio.sleep(3)

        def once(subject: Subject, number: int) -> Row:
            return measure(subject, CONNECTIONS, seconds if number else 1)

        found = await in_turns(variants, rounds, f"{CONNECTIONS} connections", once)
    _show([summed_up(name, CONNECTIONS, rows) for name, rows in found.items()])


def _show(rows: list[JsonRow]) -> None:
    used = {str(row["name"]): cast("dict[str, float]", row["cpu_us"]) for row in rows}
    whole = used["full"]
    print(f"{'us per request':24}{'Envoy':>8}{'service':>9}{'total':>8}{'saves':>8}")
    for name, cpu_us in used.items():
        saves = whole["total"] - cpu_us["total"]
        print(
            f"{name:24}{cpu_us['envoy']:>8}{cpu_us['service']:>9}{cpu_us['total']:>8}{saves:>8.1f}"
        )
    finish({"rows": rows})


if __name__ == "__main__":
    asyncio.run(main())
