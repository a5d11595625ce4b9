"""The protocol core against h2spec, the conformance test of HTTP/2 and HPACK."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
from fastlane_pages import pages

SCRIPT = Path(__file__).with_name("get_h2spec")
_BUILD_SECONDS = 300


@pytest.fixture
async def h2spec() -> str:
    """The tool, built when it is missing."""
    process = await asyncio.create_subprocess_exec(
        SCRIPT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(_BUILD_SECONDS):
        said, complaint = await process.communicate()
    if process.returncode != 0:
        pytest.fail(complaint.decode())
    return said.decode().strip()


async def test_the_core_conforms(h2spec: str) -> None:
    """Every test passes, those of the strict mode included, and none is left out."""
    async with pages() as port:
        process = await asyncio.create_subprocess_exec(
            *(h2spec, "--strict", "--host", "127.0.0.1", "--port", str(port)),
            stdout=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(60):
            said, _ = await process.communicate()
    report = said.decode()
    assert process.returncode == 0, report
    found = re.search(r"(\d+) tests, (\d+) passed, 0 skipped, 0 failed", report)
    assert found is not None, report
    assert int(found[1]) == int(found[2]) > 140
