"""What most tests of a worker begin with."""

from __future__ import annotations

import pytest

from rollout_worker.lifecycle import supervisor


@pytest.fixture(autouse=True)
def quick_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A death that no process reports is seen soon."""
    monkeypatch.setattr(supervisor, "WATCH_INTERVAL_SECONDS", 0.02)
