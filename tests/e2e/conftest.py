"""A stack of three engines for the tests of one file."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

pytest.register_assert_rewrite("e2e_world")

from e2e_world import World, standing  # noqa: E402 - its asserts are rewritten only from here on

from extproc.lab.engine_http import LabEngine  # noqa: E402 - as above


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started_trio(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """Envoy, the service and three engines run for all tests of a file."""
    engines = [LabEngine(name) for name in "abc"]
    async with standing(tmp_path_factory.mktemp("trio"), engines) as world:
        yield world


@pytest_asyncio.fixture(loop_scope="module")
async def trio(started_trio: World) -> World:
    """The same, with nothing seen yet and nothing going wrong."""
    await started_trio.forget()
    return started_trio
