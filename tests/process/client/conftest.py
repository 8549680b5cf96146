"""A worker whose answers a test scripts, a pool of it alone, and parts that look and try again more often than in use."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from rollout_client import AsyncRolloutPool
from rollout_client.pool import background
from rollout_client.routing import settings as routing_settings
from tests.support.loopback import loopback
from tests.support.unit.scripted import ScriptedWorker


@pytest.fixture(autouse=True)
def frequent_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing_settings, "HEALTH_TICK_SECONDS", 0.02)
    monkeypatch.setattr(routing_settings, "FIRST_PROBE_SECONDS", 0.05)
    monkeypatch.setattr(routing_settings, "WEIGHTS_PROBE_SECONDS", 0.1)
    monkeypatch.setattr(background, "PART_RESTART_SECONDS", 0.05)


@pytest.fixture
async def worker() -> AsyncIterator[ScriptedWorker]:
    async with loopback() as server:
        yield ScriptedWorker(server)


@pytest.fixture
async def workers(worker: ScriptedWorker) -> AsyncIterator[list[ScriptedWorker]]:
    """Yield two workers."""
    async with loopback() as server:
        yield [worker, ScriptedWorker(server)]


@pytest.fixture
async def pool(worker: ScriptedWorker) -> AsyncIterator[AsyncRolloutPool]:
    async with AsyncRolloutPool.from_urls([worker.url]) as pool:
        yield pool
