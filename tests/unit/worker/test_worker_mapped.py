"""Memory that another process maps: what it finds there, and that nothing stays behind."""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from rollout_common.wire.root_hash import LEAF_BYTES
from rollout_worker.engine import (
    EngineError,
    GangMembership,
    TensorEntry,
    TensorSpec,
    WeightsLayout,
    WeightsRejected,
)
from rollout_worker.engines import EngineOptions
from rollout_worker.engines.shared_memory.sinks import TENSOR_ALIGNMENT, MappedSink
from rollout_worker.engines.shared_memory.staging_budget import StagingBudget
from rollout_worker.engines.weight_versions import open_mapped_sink, require_sealed
from rollout_worker.sources.tensor_filling import SinkFilling
from tests.support.unit.pushing import no_file_above

ENTRIES = [
    TensorEntry("a", TensorSpec("U8", (3,))),
    TensorEntry("empty", TensorSpec("F32", (0, 4))),
    TensorEntry("b", TensorSpec("F32", (2, 2))),
]
OPTIONS = EngineOptions(Path("model"))
VALUES = {"a": b"abc", "empty": b"", "b": bytes(range(16))}


def filled(sink: MappedSink) -> MappedSink:
    for entry in ENTRIES:
        view = sink.allocate(entry)
        if view is not None:
            assert len(view) == entry.spec.nbytes
            view[:] = VALUES[entry.name]
            view.release()
    sink.seal()
    return sink


def open_files() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("on_disk", [False, True])
def test_another_process_finds_every_tensor_at_its_place(tmp_path: Path, *, on_disk: bool) -> None:
    before = open_files()
    sink = filled(MappedSink(ENTRIES, tmp_path if on_disk else None))
    ticket = json.loads(sink.make_ticket())
    places = {name: (dtype, shape, start) for name, dtype, shape, start in ticket["tensors"]}
    assert places["b"][:2] == ("F32", [2, 2])
    assert all(start % TENSOR_ALIGNMENT == 0 for _, _, start in places.values())
    assert ticket["size"] == sink.nbytes
    handle = os.open(ticket["path"], os.O_RDONLY)
    try:
        with mmap.mmap(handle, ticket["size"], prot=mmap.PROT_READ) as seen:
            for name, (_, _, start) in places.items():
                assert seen[start : start + len(VALUES[name])] == VALUES[name]
    finally:
        os.close(handle)
    sink.close()
    sink.close()
    assert sink.nbytes == 0
    assert open_files() == before
    assert list(tmp_path.iterdir()) == []


def test_only_what_was_sealed_may_serve() -> None:
    sink = MappedSink(ENTRIES)
    with pytest.raises(WeightsRejected, match="fill it first"):
        require_sealed(sink, MappedSink)
    assert require_sealed(filled(sink), MappedSink) is sink
    sink.close()
    with pytest.raises(WeightsRejected, match="fill it first"):
        require_sealed(sink, MappedSink)


def test_what_is_closed_while_an_error_still_sees_it_gives_everything_back() -> None:
    """As the frames of a read do that failed in the middle of a tensor."""
    before, staging = open_files(), StagingBudget(1 << 20)
    sink = MappedSink(ENTRIES, staging=staging)
    view = sink.allocate(ENTRIES[0])
    assert view is not None
    part = view[:1]
    sink.close()
    staging.claim_memory(1 << 20)()
    part.release()
    view.release()
    assert open_files() == before


def test_its_room_is_taken_before_anything_is_filled() -> None:
    """A page that is not there later would end the process."""
    sink = MappedSink([TensorEntry("big", TensorSpec("U8", (1 << 20,)))])
    assert os.stat(sink.path).st_blocks * 512 >= 1 << 20
    sink.close()


async def test_memory_without_room_is_told_before_it_is_taken() -> None:
    before = open_files()
    full = TensorEntry("full", TensorSpec("U8", (1 << 60,)))
    with pytest.raises(EngineError, match=rf"no room for {1 << 60} bytes .* bytes are left"):
        await open_mapped_sink([full], OPTIONS)
    assert open_files() == before


async def test_a_caller_that_gives_up_leaves_no_memory_behind(tmp_path: Path) -> None:
    before = open_files()
    opening = asyncio.create_task(open_mapped_sink(ENTRIES, OPTIONS))
    await asyncio.sleep(0)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert open_files() == before


@pytest.mark.parametrize("why", ["a caller that gives up", "another node that fails"])
async def test_nothing_stays_of_what_was_given_up_while_it_was_read(
    tmp_path: Path, why: str
) -> None:
    size, slots = 32 * LEAF_BYTES, tmp_path / "slots"
    staging = StagingBudget(size + TENSOR_ALIGNMENT)  # and its index
    slots.mkdir()
    save_file({"w": np.zeros(size, np.uint8)}, tmp_path / "model.safetensors")
    gang = GangMembership(nodes=2, rank=0, leader="a", port=1, slots=slots)
    options = replace(OPTIONS, gang=gang, staging=staging)
    reading = threading.Event()

    def report(done: int, total: int) -> None:
        if done:
            reading.set()
            time.sleep(0.01)

    async def open_slot(entries: Sequence[TensorEntry]) -> MappedSink:
        return await open_mapped_sink(entries, options)

    async def elsewhere(slot: str) -> Mapping[str, str]:
        await asyncio.to_thread(reading.wait, 10)
        raise EngineError("no room there")

    layout, before = WeightsLayout({"w": TensorSpec("U8", (size,))}, {}, {}), open_files()
    others = elsewhere if why.startswith("another") else None
    filled = SinkFilling(open_slot, layout, lambda _: None, report, others)
    filling = asyncio.create_task(filled.fill_from_files((tmp_path, ())))
    if why.startswith("another"):
        with pytest.raises(EngineError, match="no room there"):
            await filling
    else:
        await asyncio.to_thread(reading.wait, 10)
        filling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await filling
    assert open_files() == before
    assert list(slots.iterdir()) == []
    staging.claim_memory(size + TENSOR_ALIGNMENT)()


def test_a_folder_without_room_is_named(tmp_path: Path) -> None:
    before = open_files()
    with pytest.raises(EngineError, match=r"no room for 128 bytes .*gone.*spill_dir"):
        MappedSink(ENTRIES, tmp_path / "gone")
    full = TensorEntry("full", TensorSpec("U8", (1 << 60,)))
    with pytest.raises(EngineError, match="no room"):
        MappedSink([full], tmp_path)
    assert open_files() == before
    assert list(tmp_path.iterdir()) == []


async def test_its_memory_is_charged_until_it_is_closed(tmp_path: Path) -> None:
    options = replace(OPTIONS, staging=StagingBudget(2 * TENSOR_ALIGNMENT), spill_dir=tmp_path)
    sink = await open_mapped_sink(ENTRIES, options)
    on_disk = await open_mapped_sink(ENTRIES, options, on_disk=True)
    before = open_files()
    with pytest.raises(EngineError, match=r"0 bytes are left .* spec\.weights\.stagingMemory"):
        await open_mapped_sink(ENTRIES, options)
    assert open_files() == before
    sink.seal()
    sink.close()
    sink.close()
    again = await open_mapped_sink(ENTRIES, options)
    for each in (again, on_disk):
        each.close()


async def test_memory_that_is_not_had_is_not_charged() -> None:
    staging = StagingBudget(2 * TENSOR_ALIGNMENT)
    with no_file_above(1), pytest.raises(EngineError, match="no room"):
        await open_mapped_sink(ENTRIES, replace(OPTIONS, staging=staging))
    staging.claim_memory(2 * TENSOR_ALIGNMENT)()
