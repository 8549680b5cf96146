"""Fixtures that the operator's unit tests share: an API server on loopback, and one pool over it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.loopback import Loopback, kubeconfig, loopback
from tests.support.unit.passlab import PassLab, watching_pass_lab
from tests.support.unit.world import World, settled_world


@pytest.fixture
async def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Loopback]:
    async with loopback() as server:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path, server.url)))
        yield server


@pytest.fixture
async def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[PassLab]:
    async with watching_pass_lab(tmp_path, monkeypatch) as made:
        yield made


@pytest.fixture
def world() -> World:
    """A pool of two replicas that serve."""
    made = settled_world()
    assert made.status.phase == "Ready"
    return made
