"""Other routers from PyPI: each in an environment of its own, started on the same endpoints.

Their settings are their own defaults, but for the policy (the one that is nearest to ours), the
port, and a log that says warnings only. Versions are pinned: the newest whose dependencies the
package index had.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import load
import yaml
from rounds import say
from subjects import Subject

from extproc.lab.processes import Child, free_port

CACHE: Final = Path(__file__).resolve().parent.parent / ".bench"


@dataclass(frozen=True, slots=True)
class Start:
    """What a router is started with: where it listens, its endpoints, a folder for its files."""

    port: int
    urls: Sequence[str]
    folder: Path
    binaries: Path


@dataclass(frozen=True, slots=True)
class Rival:
    """One other router; `command` makes its command line. `requirement` is pip's."""

    name: str
    version: str
    requirement: str
    command: Callable[[Start], list[str]]


def _sglang(start: Start) -> list[str]:
    return [
        str(start.binaries / "sglang-router"),
        "launch",
        *("--host", "127.0.0.1"),
        *("--port", str(start.port)),
        *("--prometheus-port", str(free_port())),
        *("--policy", "cache_aware"),
        *("--log-level", "warn"),
        *("--worker-urls", *start.urls),
    ]


def _vllm(start: Start) -> list[str]:
    return [
        str(start.binaries / "vllm-router"),
        *("--host", "127.0.0.1"),
        *("--port", str(start.port)),
        *("--prometheus-port", str(free_port())),
        *("--policy", "consistent_hash"),
        *("--log-level", "warning"),
        *("--worker-urls", *start.urls),
    ]


def _litellm(start: Start) -> list[str]:
    models = [
        {
            "model_name": load.MODEL,
            "litellm_params": {
                "model": f"openai/{load.MODEL}",
                "api_base": f"{url}/v1",
                "api_key": "none",
            },
        }
        for url in start.urls
    ]
    # Without keys it does less for a request.
    settings = {"dangerously_permit_weak_or_unset_master_key": True}
    file = start.folder / "litellm.yaml"
    file.write_text(yaml.safe_dump({"model_list": models, "general_settings": settings}))
    return [
        "env",
        "LITELLM_LOCAL_MODEL_COST_MAP=True",  # or it asks the Internet for prices
        "LITELLM_LOG=ERROR",
        "LITELLM_MODE=PRODUCTION",
        str(start.binaries / "litellm"),
        *("--config", str(file)),
        *("--host", "127.0.0.1"),
        *("--port", str(start.port)),
    ]


RIVALS: Final = (
    Rival("sglang-router", "0.3.2", "sglang-router==0.3.2", _sglang),
    Rival("vllm-router", "0.1.17", "vllm-router==0.1.17", _vllm),
    Rival("litellm", "1.108.0", "litellm[proxy]==1.108.0", _litellm),
)


def installed(rival: Rival) -> Path:
    """The folder with the router's commands; it is installed if it was not."""
    folder = CACHE / f"{rival.name}-{rival.version}"
    mark = folder / "installed"
    if not mark.exists():
        say(f"installing {rival.requirement} into {folder} (up to a minute)")
        venv.create(folder, with_pip=True, clear=True)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, rival.requirement], check=True, stdout=sys.stderr)
        mark.touch()
    return folder / "bin"


@asynccontextmanager
async def running(rival: Rival, folder: Path, upstreams: Sequence[str]) -> AsyncIterator[Subject]:
    """The router has been started on the upstreams, `host:port` each; it may not answer yet."""
    port = free_port()
    urls = [f"http://{upstream}" for upstream in upstreams]
    command = rival.command(Start(port, urls, folder, installed(rival)))
    # The modules of the benchmark, which PYTHONPATH names, are not to be taken for the router's.
    child = Child(rival.name, ["env", "-u", "PYTHONPATH", "-u", "PYTHONSAFEPATH", *command])
    await child.start()
    try:
        yield Subject(
            rival.name, f"http://127.0.0.1:{port}", {"router": child.pid}, has_model_header=False
        )
    finally:
        await child.stop()
