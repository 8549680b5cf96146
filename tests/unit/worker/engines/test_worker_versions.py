"""What every engine's weights do alike, shown by SGLang's without its child: commits that are given up, copies for sleep."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rollout_worker.engines import EngineOptions
from rollout_worker.engines.sglang.sglang_versions import SglangVersions
from rollout_worker.schemas import WeightsId

OPTIONS = EngineOptions(Path("model"))


class Child:
    """SGLang's child and its requests: notes the commands."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def call_child(self, op: str, **args: Any) -> None:
        self.calls.append(f"{op} {args.get('method') or ' '.join(args.get('tags', ()))}")

    async def stop_steps(self, mode: str) -> None: ...

    def note_recomputed(self) -> None: ...


def sleeping_sglang(child: Child) -> SglangVersions:
    fake: Any = child
    model: Any = SimpleNamespace(quantisation={})
    facts = {"enable_memory_saver": True}
    return SglangVersions(OPTIONS, model, fake, fake, facts, print, fake)


async def test_a_commit_that_is_cancelled_in_its_queue_gives_the_memory_back() -> None:
    closed: list[bool] = []
    sink: Any = SimpleNamespace(close=lambda: closed.append(True))
    found = sleeping_sglang(Child())
    async with found._lock:  # another verb is under way
        commit = asyncio.create_task(found.commit(WeightsId(epoch=1, version=1), sink, "keep"))
        await asyncio.sleep(0)
        commit.cancel()
        await asyncio.wait([commit], timeout=10)
    assert commit.cancelled()
    assert closed == [True]


async def never(*, on_disk: bool = False) -> Any:
    raise AssertionError("there is a copy")


async def test_a_cache_that_sleeps_at_level_2_leaves_the_copy_of_the_weights() -> None:
    child = Child()
    found = sleeping_sglang(child)
    await found.sleep(1, ["weights"], never)
    await found.sleep(2, ["kv_cache"], never)
    await found.wake(["weights", "kv_cache"], never)
    assert child.calls == [
        *("call_ranks rollout_keep", "release weights", "release kv_cache"),
        *("retake kv_cache weights", "call_ranks rollout_bring_back"),
    ]
    assert found.is_awake
