"""What every engine's weights do alike, whatever the engine: no memory stays of a commit that is given up."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollout_worker.engines import EngineOptions
from rollout_worker.engines.hf.versions import HfVersions
from rollout_worker.engines.sglang.versions import SglangVersions
from rollout_worker.engines.vllm.versions import VllmVersions
from rollout_worker.schemas import WeightsId

OPTIONS = EngineOptions(Path("model"))


def versions(engine: str) -> Any:
    """The part of an adapter that commits; nothing of the rest is reached here."""
    none: Any = None
    if engine == "hf":
        return HfVersions(none, none, none)
    if engine == "vllm":
        steering: Any = SimpleNamespace(asleep=set())
        return VllmVersions(none, steering, none, OPTIONS)
    plain: Any = SimpleNamespace(quantisation={})
    return SglangVersions(OPTIONS, plain, none, none, {}, none)


@pytest.mark.parametrize("engine", ["hf", "vllm", "sglang"])
async def test_a_commit_that_is_cancelled_in_its_queue_gives_the_memory_back(engine: str) -> None:
    closed: list[bool] = []
    sink: Any = SimpleNamespace(close=lambda: closed.append(True))
    found = versions(engine)
    async with found._lock:  # another verb is under way
        commit = asyncio.create_task(found.commit(WeightsId(epoch=1, version=1), sink, "keep"))
        await asyncio.sleep(0)
        commit.cancel()
        await asyncio.wait([commit], timeout=10)
    assert commit.cancelled()
    assert closed == [True]
