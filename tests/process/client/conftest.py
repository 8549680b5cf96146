"""A worker whose answers a test scripts, and a pool of it alone."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from rollout_client import AsyncRolloutPool
from tests.support.loopback import loopback
from tests.support.unit.scripted import ScriptedWorker


@pytest.fixture
async def worker() -> AsyncIterator[ScriptedWorker]:
    async with loopback() as server:
        yield ScriptedWorker(server)


@pytest.fixture
async def pool(worker: ScriptedWorker) -> AsyncIterator[AsyncRolloutPool]:
    async with AsyncRolloutPool.from_urls([worker.url]) as pool:
        yield pool
