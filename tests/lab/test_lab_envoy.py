"""Envoy as a child process: it starts, tells, and ends, in every way that a parent can end."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from extproc.lab.envoy import EnvoyFailed, complaint, find_envoy, running_envoy

BARE = """
admin: {address: {socket_address: {address: 127.0.0.1, port_value: 0}}}
static_resources:
  listeners:
  - name: llmgw
    address: {socket_address: {address: 127.0.0.1, port_value: 0}}
    filter_chains:
    - filters:
      - name: echo
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.echo.v3.Echo
"""
SECONDS = 15.0

# Starts an Envoy, says its process id, and waits to be killed.
PARENT = """
import asyncio, sys
from pathlib import Path
from extproc.lab.envoy import running_envoy

async def main():
    folder = Path(sys.argv[1])
    async with running_envoy(sys.argv[2], folder, log=folder / "log") as envoy:
        print(envoy.pid, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that nobody has waited for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.envoy
async def test_it_is_ready_and_tells_its_ports(tmp_path: Path) -> None:
    """Where the configuration leaves them open; on leaving it has ended."""
    async with running_envoy(BARE, tmp_path, log=tmp_path / "log") as envoy:
        port = await envoy.listener_port()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"hello")
        assert await reader.readexactly(5) == b"hello"
        writer.close()
        await writer.wait_closed()
        assert (await envoy.stats("^server.live$"))["server.live"] == 1
        assert b"LIVE" in await envoy.get("/ready")
        with pytest.raises(EnvoyFailed, match="no listener 'other'"):
            await envoy.listener_port("other")
        with pytest.raises(EnvoyFailed, match="404"):
            await envoy.get("/nothing")
        pid = envoy.pid
        assert is_alive(pid)
    assert not envoy.is_running
    assert not is_alive(pid)
    assert await envoy.wait() == 0


@pytest.mark.envoy
async def test_two_run_side_by_side(tmp_path: Path) -> None:
    """Each in a folder of its own."""
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    async with (
        running_envoy(BARE, folders[0], log=tmp_path / "log-a") as one,
        running_envoy(BARE, folders[1], log=tmp_path / "log-b") as other,
    ):
        assert one.admin_url != other.admin_url
        assert await one.listener_port() != await other.listener_port()


@pytest.mark.envoy
async def test_a_drained_envoy_refuses_new_connections(tmp_path: Path) -> None:
    """Its admin interface goes on."""
    async with running_envoy(BARE, tmp_path, log=tmp_path / "log") as envoy:
        await envoy.drain()
        assert await envoy.get("/listeners?format=json")


@pytest.mark.envoy
async def test_one_that_is_refused_says_why(tmp_path: Path) -> None:
    """With Envoy's last words, whether it is started or only asked."""
    bad = BARE.replace("name: llmgw", "nme: llmgw")
    with pytest.raises(EnvoyFailed, match=r"Envoy has ended:\n(.|\n)*nme"):
        async with running_envoy(bad, tmp_path, log=tmp_path / "log"):
            pass
    said = await complaint(bad, tmp_path)
    assert said is not None
    assert "nme" in said
    assert await complaint(BARE, tmp_path) is None


@pytest.mark.envoy
async def test_one_that_ends_by_itself_is_noticed(tmp_path: Path) -> None:
    """With the signal that ended it."""
    async with running_envoy(BARE, tmp_path, log=tmp_path / "log") as envoy:
        os.kill(envoy.pid, signal.SIGKILL)
        async with asyncio.timeout(SECONDS):
            assert await envoy.wait() == -signal.SIGKILL
        assert not envoy.is_running
        with pytest.raises(EnvoyFailed, match="does not answer"):
            await envoy.get("/ready")


@pytest.mark.envoy
async def test_one_that_hangs_is_killed(tmp_path: Path) -> None:
    """After the grace that it was given."""
    async with running_envoy(BARE, tmp_path, log=tmp_path / "log") as envoy:
        os.kill(envoy.pid, signal.SIGSTOP)
        await envoy.stop(grace_seconds=0.1)
        assert await envoy.wait() == -signal.SIGKILL


@pytest.mark.envoy
async def test_it_dies_with_its_parent(tmp_path: Path) -> None:
    """Also with one that is killed and can clean nothing up."""
    parent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PARENT, str(tmp_path), BARE), stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    async with asyncio.timeout(SECONDS):
        pid = int(await parent.stdout.readline())
        assert is_alive(pid)
        parent.kill()
        await parent.wait()
        while is_alive(pid):
            await asyncio.sleep(0.02)


def test_the_binary_can_be_chosen(tmp_path: Path) -> None:
    """By a variable, which must name a file; else it is the installed one, or the path's."""
    chosen = tmp_path / "envoy"
    with pytest.raises(EnvoyFailed, match="there is no Envoy at"):
        find_envoy({"LLMGW_ENVOY": str(chosen)})
    chosen.touch()
    assert find_envoy({"LLMGW_ENVOY": str(chosen)}) == chosen
    assert find_envoy({}).is_file()


async def test_a_missing_binary_is_said(tmp_path: Path) -> None:
    """Before anything is started."""
    with pytest.raises(EnvoyFailed, match="there is no Envoy at"):
        async with running_envoy(BARE, tmp_path, binary=tmp_path / "none"):
            pass
