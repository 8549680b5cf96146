"""What most tests of a worker begin with."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rollout_worker.lifecycle import supervisor
from rollout_worker.updates import pushed_weights
from tests.support.unit.tiny_gang import Node, hash_of_checkpoint, hasten_head, node
from tests.support.unit.tiny_worker import TinyWorker, tiny_worker


@pytest.fixture(autouse=True)
def quick_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A death that no process reports is seen soon."""
    monkeypatch.setattr(supervisor, "WATCH_INTERVAL_SECONDS", 0.02)


@pytest.fixture
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions whose tensors are larger than the model's are taken."""
    monkeypatch.setattr(pushed_weights, "check_layout", lambda *_, where: None)


@pytest.fixture
async def worker(tmp_path: Path) -> AsyncIterator[TinyWorker]:
    async with tiny_worker(tmp_path) as made:
        yield made


@pytest.fixture
async def root_hash(tmp_path: Path) -> str:
    """Of the checkpoint that all nodes of a gang have."""
    return await hash_of_checkpoint(tmp_path)


@pytest.fixture
def quick_gang(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second of a gang takes a fiftieth."""
    hasten_head(monkeypatch)


@pytest.fixture
async def member(
    tmp_path: Path, root_hash: str, request: pytest.FixtureRequest
) -> AsyncIterator[Node]:
    """A member whose ranks read all tensors but those that the test names."""
    async with node(tmp_path, root_hash) as member:
        member.member.left_alone = frozenset(getattr(request, "param", ()))
        yield member


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The lock directory of a node."""
    folder = tmp_path / "turn"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder
