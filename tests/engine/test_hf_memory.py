"""Memory given back and taken again: the same output, really less memory, no state between."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from rollout_common.wire.adapters import CONFIG_KEY, entry_name
from rollout_worker.engine import Engine, EngineError, TensorEntry, TensorSpec, WeightsRejected
from rollout_worker.engines.hf.hf_engine import HfEngine
from rollout_worker.engines.shared_memory.staging_budget import StagingBudget
from tests.support.engine.engines import (
    PROMPT,
    V1,
    V2,
    figure,
    flip,
    nothing,
    refilling,
    request,
    run,
    serving,
    staged,
    update,
)
from tests.support.engine.reference import Reference
from tests.support.engine.tinymodels import TinyModels


async def cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.wait([task])


async def test_the_collector_leaves_a_started_engine_alone(tiny_models: TinyModels) -> None:
    before = gc.get_freeze_count()
    async with serving(tiny_models.model(1), guest=True):
        assert gc.get_freeze_count() <= before, "the process is somebody else's"
    async with serving(tiny_models.model(1), guest=False):
        assert gc.get_freeze_count() > before + 1000
        left = len(gc.get_objects())
        assert left < gc.get_freeze_count() / 10, "every sleep and end of a pin goes through them"


@pytest.mark.parametrize("level", [1, 2])
async def test_sleep_and_wake_bring_the_same_output_back(
    tiny_models: TinyModels, tmp_path: Path, level: Any
) -> None:
    wanted = [request(f"r{i}", temperature=1, seed=i, max_tokens=30) for i in range(4)]
    async with serving(tiny_models.model(1), spill_dir=tmp_path) as (engine, _):
        active = refilling(engine, tiny_models.weights(2)) if level == 2 else nothing
        await update(engine, tiny_models.weights(2))
        before = [await run(engine, each) for each in wanted]  # bit for bit needs equal batches
        await engine.pause()
        await engine.sleep(level, ["weights", "kv_cache"], nothing)
        await engine.sleep(level, ["weights", "kv_cache"], nothing)
        asleep = engine.stats()
        held = [figure(engine, f"hf_engine_{what}_bytes") for what in ("weights", "kv_cache")]
        version = await staged(engine, tiny_models.weights(2))
        with pytest.raises(EngineError, match="asleep"):
            await engine.commit(V2, version.sink, "keep")
        await engine.resume()  # nothing can run: it waits for its memory
        waiting = asyncio.create_task(run(engine, request("w")))
        await asyncio.sleep(0.05)
        assert engine.stats().running == 0
        await engine.wake(["weights"], active)
        half = engine.stats()
        await engine.wake(["kv_cache"], active)
        await engine.wake(["weights", "kv_cache"], active)
        await waiting
        after = [await run(engine, each) for each in wanted]
    assert (asleep.resident.weights, asleep.resident.kv_cache) == (False, False)
    assert held == [0, 0]
    assert (half.resident.weights, half.resident.kv_cache) == (True, False)
    for one, two in zip(before, after, strict=True):
        assert (one.token_ids, one.logprobs) == (two.token_ids, two.logprobs)
        assert set(two.versions) == {(1, False)}
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("cyclic", [False, True], ids=["by nobody", "by a cycle"])
async def test_a_stopped_engine_keeps_no_model(tiny_models: TinyModels, cyclic: bool) -> None:
    """Though what was there at its start is out of the collector's sight."""
    async with serving(tiny_models.model(1), guest=False) as (engine, _):
        parts = cast(HfEngine, engine)._parts
        assert parts is not None
        model = weakref.ref(parts.loaded.model)
        if cyclic:
            holder: list[Any] = [parts.core]
            holder.append(holder)
            gc.freeze()
            del holder
        del parts
    assert model() is None


async def test_a_refused_refill_leaves_everything_asleep(
    tiny_models: TinyModels, engine: Engine, reference: Reference
) -> None:
    await engine.pause()
    await engine.sleep(2, ["weights"], nothing)
    with pytest.raises(WeightsRejected, match="has gone"):
        await engine.wake(["weights"], nothing)
    assert not engine.stats().resident.weights
    await engine.wake(["weights"], refilling(engine, tiny_models.model(1)))
    await engine.resume()
    assert (await run(engine, request())).token_ids == reference.greedy(PROMPT, 8)


async def test_no_spill_folder_leaves_the_weights_serving(
    tiny_models: TinyModels, tmp_path: Path
) -> None:
    async with serving(tiny_models.model(1), spill_dir=tmp_path / "gone") as (engine, _):
        before = await run(engine, request())
        await engine.pause()
        with pytest.raises(EngineError, match="spill_dir"):
            await engine.sleep(1, ["kv_cache", "weights"], nothing)
        there = engine.stats().resident
        assert (there.weights, there.kv_cache) == (True, True)
        await engine.resume()
        assert (await run(engine, request())).token_ids == before.token_ids


async def test_adapters_are_staged_where_the_limit_has_room_for_them(
    tiny_models: TinyModels,
) -> None:
    entry = TensorEntry(entry_name("a", CONFIG_KEY), TensorSpec("U8", (60,)))
    async with serving(tiny_models.model(1), staging=StagingBudget(100)) as (engine, _):
        first = await engine.open_slot([entry])
        with pytest.raises(EngineError, match="stagingMemory"):
            await engine.open_slot([entry])
        first.close()
        (await engine.open_slot([entry])).close()


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, int]]:
    """A model of 100 MB: large enough to be seen in the process's memory."""
    from tests.support.engine.tinymodels import script

    folder = tmp_path_factory.mktemp("larger") / "m"
    tiny: Any = script()
    tiny.make_weights(folder, 1, tiny.Shape(vocab=16384, hidden=512, intermediate=2048, layers=6))
    yield folder, (folder / "model.safetensors").stat().st_size
    shutil.rmtree(folder)


async def test_a_lost_spill_is_made_up_for_by_the_source(
    tiny_models: TinyModels, engine: Engine, reference: Reference, caplog: pytest.LogCaptureFixture
) -> None:
    await engine.pause()
    await engine.sleep(1, ["weights"], nothing)
    parts = cast("HfEngine", engine)._parts
    assert parts is not None
    spill = parts.memory._spill
    assert spill is not None
    os.truncate(spill._file.fileno(), 1000)
    await engine.wake(["weights"], refilling(engine, tiny_models.model(1)))
    await engine.resume()
    assert (await run(engine, request())).token_ids == reference.greedy(PROMPT, 8)
    assert "it ends early" in caplog.text


async def test_a_cancelled_sleep_leaves_the_weights_serving(
    tiny_models: TinyModels, engine: Engine, reference: Reference
) -> None:
    active = refilling(engine, tiny_models.model(1))
    await engine.pause()
    for level in (1, 2, 1):
        asleep = asyncio.create_task(engine.sleep(level, ["weights", "kv_cache"], active))
        await asyncio.sleep(0.001 * level)
        await cancelled(asleep)
        awake = asyncio.create_task(engine.wake(["weights", "kv_cache"], active))
        await asyncio.sleep(0.001)
        await cancelled(awake)
    await engine.wake(["weights", "kv_cache"], active)
    await engine.resume()
    assert (await run(engine, request())).token_ids == reference.greedy(PROMPT, 8)


KEPT_BYTES = 96 << 20
"""What glibc may keep of freed memory at the ends of threads' arenas, which `malloc_trim` leaves alone: up to 90 MB were seen in
a process that had run thousands of tests. Weights that stayed would make it 128 MB."""


def resident_memory() -> int:
    """Return what the system says this process has in memory, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("level", [1, 2])
async def test_memory_really_falls_by_the_weights(
    larger: tuple[Path, int], tmp_path: Path, level: Any
) -> None:
    folder, size = larger
    async with serving(folder, spill_dir=tmp_path) as (engine, _):
        before = await run(engine, request())
        loaded = resident_memory()
        parts = cast(HfEngine, engine)._parts
        assert parts is not None
        version = await staged(engine, folder)
        parts.memory.free_in_thread(lambda: time.sleep(0.5))
        await flip(engine, version.sink, V1, "keep")  # what it leaves behind is freed after that
        await engine.pause()
        await engine.sleep(level, ["weights", "kv_cache"], nothing)
        fallen = loaded - resident_memory()
        await engine.wake(["weights", "kv_cache"], refilling(engine, folder))
        await engine.resume()
        after = await run(engine, request())
    assert fallen >= size - KEPT_BYTES > 25_000_000
    assert (before.token_ids, before.logprobs) == (after.token_ids, after.logprobs)
