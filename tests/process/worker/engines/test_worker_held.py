"""Staged memory as an engine's ranks hold it: what they read, and that all is given back."""

from __future__ import annotations

import asyncio
import gc
import json
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout_common.transfer.memory.slot import Slot
from rollout_worker.engine import MappedWeights, TensorEntry, TensorSpec
from rollout_worker.engines import EngineOptions
from rollout_worker.engines.shared_memory import rank_mappings, ranks
from rollout_worker.engines.shared_memory.rank_mappings import RankMapping
from rollout_worker.engines.shared_memory.ranks import EngineRanks
from rollout_worker.engines.shared_memory.sinks import MappedSink
from rollout_worker.engines.weight_versions import open_mapped_sink
from tests.support.waiting import until_sync

OPTIONS = EngineOptions(Path("model"))
BIG = (1 << 18) + 64
ENTRIES = [
    TensorEntry("big", TensorSpec("F32", (BIG,))),
    TensorEntry("byte", TensorSpec("U8", (3,))),
    TensorEntry("small", TensorSpec("F32", (2, 2))),
]


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    before = set(os.listdir("/proc/self/fd"))
    yield
    gc.collect()
    assert rank_mappings._mappings == []
    assert set(os.listdir("/proc/self/fd")) == before


def fill(sink: MappedSink, value: float) -> None:
    for entry in ENTRIES:
        view = sink.allocate(entry)
        if view is not None:
            dtype = torch.uint8 if entry.spec.dtype == "U8" else torch.float32
            view[:] = torch.full(entry.spec.shape, value, dtype=dtype).numpy().tobytes()
            view.release()


def content(sink: MappedSink) -> dict[str, float]:
    found = rank_mappings.read_tensors(json.loads(sink.make_ticket()))
    return {name: float(tensor.sum()) for name, tensor in found}


def sums(value: float) -> dict[str, float]:
    return {"big": BIG * value, "byte": 3 * value, "small": 4 * value}


def here(wrong: str = "") -> Callable[[str, Mapping[str, Any]], Awaitable[None]]:
    """Reach one rank, which is this process; `wrong`: what it fails at."""

    async def call(method: str, args: Mapping[str, Any]) -> None:
        if method == wrong:
            raise OSError("no such rank")
        if method == "rollout_map":
            rank_mappings.begin_mapping(**args)
        else:
            rank_mappings.close_mappings(**args)

    return call


async def test_a_sealed_sink_is_held_before_the_commit_until_it_is_closed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "rollout_worker")
    known = EngineRanks(here(), 1)
    sink = await open_mapped_sink(ENTRIES, OPTIONS, ranks=known)
    await asyncio.to_thread(fill, sink, 2.0)
    assert rank_mappings.find_mapped(sink.sink_location) is None
    await asyncio.to_thread(sink.seal)
    found = rank_mappings.find_mapped(sink.sink_location)
    assert found is not None
    assert "are mapped by 1 of 1 ranks" in caplog.text
    assert content(sink) == sums(2.0)
    assert found[:8].numpy().tobytes() == b"\0\0\0\x40" * 2
    del found
    await asyncio.to_thread(sink.close)
    await asyncio.to_thread(sink.close)
    assert rank_mappings.find_mapped(sink.sink_location) is None


async def test_memory_that_was_given_is_held_too() -> None:
    slot = Slot(4096)
    release = slot.lend_slot()
    slot.view_bytes(0, 16)[:] = torch.full((4,), 3.0).numpy().tobytes()
    entries = [TensorEntry("small", TensorSpec("F32", (2, 2)))]
    given = MappedWeights(
        slot.handle, slot.size, {"small": 0}, release, slot.view_bytes(0, slot.size)
    )
    sink = await open_mapped_sink(entries, OPTIONS, given=given, ranks=EngineRanks(here(), 1))
    await asyncio.to_thread(sink.seal)
    assert rank_mappings.find_mapped(sink.sink_location) is not None
    assert content(sink) == {"small": 12.0}
    await asyncio.to_thread(sink.close)
    assert not slot.is_lent
    slot.close()


@pytest.mark.parametrize("wrong", ["rollout_map", "rollout_unmap"])
async def test_ranks_that_cannot_be_told_are_no_reason_to_fail(
    wrong: str, caplog: pytest.LogCaptureFixture
) -> None:
    known = EngineRanks(here(wrong), 1)
    sink = await open_mapped_sink(ENTRIES, OPTIONS, ranks=known)
    await asyncio.to_thread(fill, sink, 2.0)
    await asyncio.to_thread(sink.seal)
    assert sink.sealed
    assert content(sink) == sums(2.0)
    await asyncio.to_thread(sink.close)
    assert f"{wrong} could not be called in the engine's ranks: no such rank" in caplog.text
    # What nobody was told to let go of goes with the next one, whatever its path is.
    second = await open_mapped_sink(ENTRIES, OPTIONS, ranks=EngineRanks(here(), 1))
    await asyncio.to_thread(fill, second, 4.0)
    await asyncio.to_thread(second.seal)
    assert content(second) == sums(4.0)
    await asyncio.to_thread(second.close)


async def test_a_rank_that_takes_too_long_is_not_waited_for_longer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ranks, "MIN_MAPPING_SECONDS", 0.05)
    sink = await open_mapped_sink(ENTRIES, OPTIONS, ranks=EngineRanks(here(), 2))
    await asyncio.to_thread(sink.seal)
    assert "1 of 2 ranks have mapped the staged weights" in caplog.text
    await asyncio.to_thread(sink.close)


async def test_an_engine_that_was_stopped_is_told_nothing() -> None:
    async def never(method: str, args: Mapping[str, Any]) -> None:
        await asyncio.Event().wait()

    known = EngineRanks(never, 1)
    sink = await open_mapped_sink(ENTRIES, OPTIONS, ranks=known)
    sealing = asyncio.create_task(asyncio.to_thread(sink.seal))
    await asyncio.sleep(0)
    known.stop_calling()
    await asyncio.wait_for(sealing, 10)
    await asyncio.to_thread(sink.close)


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("/memfd:rollout-weights")


def test_memory_stays_mapped_as_long_as_a_view_of_it_lives() -> None:
    sink = MappedSink(ENTRIES)
    fill(sink, 2.0)
    sink.seal()
    before = mappings()
    found = mapped(sink)
    assert found.memory is not None
    whole = found.memory[:]
    found.close()
    sink.close()
    gc.collect()
    assert mappings() == before + 1
    assert float(whole[:4].view(torch.float32)) == 2
    del whole
    gc.collect()
    until_sync(lambda: mappings() == before, what="the memory to be unmapped")


def mapped(sink: MappedSink) -> RankMapping:
    made = RankMapping(sink.path, json.loads(sink.make_ticket())["size"], ("", ""))
    made.wait_until_ready(10)
    return made


def test_a_loader_that_changes_what_it_reads_changes_it_for_its_rank_alone() -> None:
    """Some do (Gemma's norms in SGLang)."""
    sink = MappedSink(ENTRIES)
    fill(sink, 2.0)
    first, second = mapped(sink), mapped(sink)
    assert first.memory is not None
    assert second.memory is not None
    with torch.inference_mode():  # as engines load
        first.memory[:4].view(torch.float32).add_(1)
    assert [float(m[:4].view(torch.float32)) for m in (first.memory, second.memory)] == [3, 2]
    assert content(sink) == sums(2.0)
    first.close()
    second.close()
    sink.close()


def test_a_descriptor_that_is_used_again_is_no_held_memory() -> None:
    first = MappedSink(ENTRIES)
    fill(first, 1.0)
    path = {"path": first.path}
    rank_mappings.begin_mapping(path, first.nbytes, ("", ""))
    rank_mappings._mappings[0].wait_until_ready(10)
    assert rank_mappings.find_mapped(path) is not None
    first.close()
    second = MappedSink(ENTRIES)
    assert second.path == path["path"]
    fill(second, 5.0)
    assert rank_mappings.find_mapped(path) is None
    assert content(second) == sums(5.0)
    rank_mappings.close_mappings(path)
    second.close()


def test_a_tally_that_is_another_file_is_left_alone(tmp_path: Path) -> None:
    """On another node of a gang the path leads to whatever has that number there."""
    other = tmp_path / "other"
    other.write_text("theirs")
    sink = MappedSink(ENTRIES)
    for tally in ((str(other), "ours"), (str(tmp_path), "ours"), (str(tmp_path / "none"), "ours")):
        rank_mappings.begin_mapping(sink.sink_location, sink.nbytes, tally)
        rank_mappings._mappings[0].wait_until_ready(10)
    assert other.read_text() == "theirs"
    rank_mappings.close_mappings(sink.sink_location)
    sink.close()
