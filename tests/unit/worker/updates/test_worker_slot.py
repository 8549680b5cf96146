"""Filling an engine's memory: what reaches it, what is refused, and that nothing of it stays."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import pytest
from safetensors.numpy import save_file

from rollout_worker.engine import (
    Engine,
    EngineError,
    Sink,
    TensorEntry,
    WeightsLayout,
    WeightsRejected,
)
from rollout_worker.schemas import Checkpoint, PushedBytes, StageRequest, StageSource, WeightsSource
from rollout_worker.sources.checkpoint_files import open_source
from rollout_worker.sources.pushed.incoming_version import IncomingVersion
from rollout_worker.sources.tensor_filling import Located, SinkFilling
from rollout_worker.threads import run_in_thread
from rollout_worker.updates.staging_slot import StagingSlot

TENSORS = {f"t{i}": np.arange(i, i + 6, dtype=np.float32) for i in range(3)}
CHECKPOINT = WeightsSource(checkpoint=Checkpoint())


class Bytes:
    """A sink of plain bytes, which notes what is done to it and holds its reader when told to."""

    slot = ""
    took = False

    def __init__(self, memory: Literal["host", "device"] = "host") -> None:
        self.memory = memory
        self.held: dict[str, bytearray] = {}
        self.done: list[str] = []
        self.reading, self.go = threading.Event(), threading.Event()
        self.go.set()

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.held.values()))

    def allocate(self, entry: TensorEntry) -> memoryview | None:
        assert not self.done, "nothing comes after the seal"
        self.reading.set()
        assert self.go.wait(10)
        if entry.name == "t2":
            return None
        self.held[entry.name] = bytearray(entry.spec.nbytes)
        return memoryview(self.held[entry.name])

    def seal(self) -> None:
        self.done.append("sealed")

    def close(self) -> None:
        self.done.append("closed")
        self.held.clear()


class Memory:
    """The part of an engine that fills need."""

    def __init__(self, sink: Sink | EngineError) -> None:
        self.sink = sink
        self.asked: list[tuple[list[str], bool]] = []

    async def open_slot(self, entries: Sequence[TensorEntry], *, on_disk: bool = False) -> Sink:
        self.asked.append(([entry.name for entry in entries], on_disk))
        if isinstance(self.sink, EngineError):
            raise self.sink
        return self.sink


def engine(sink: Sink | EngineError) -> Engine:
    return cast("Engine", Memory(sink))


@pytest.fixture
def source(tmp_path: Path) -> Located:
    save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path, ()


@pytest.fixture
def layout(source: Located) -> WeightsLayout:
    return WeightsLayout(
        {entry.name: entry.spec for entry in open_source(source[0]).entries}, {}, {}
    )


def anything(root_hash: str) -> None:
    """Take any hash."""


def begin_filling(
    sink: Bytes,
    layout: WeightsLayout,
    source: Located,
    verify: Callable[[str], None] = anything,
) -> asyncio.Task[Sink]:
    filling = SinkFilling(engine(sink).open_slot, layout, verify)
    return asyncio.create_task(filling.fill_from_files(source))


async def test_a_filled_sink_holds_what_the_engine_wanted(
    source: Located, layout: WeightsLayout
) -> None:
    sink, memory = Bytes(), Memory(Bytes())
    memory.sink = sink
    roots: list[str] = []
    seen: list[tuple[int, int]] = []
    filling = SinkFilling(
        partial(memory.open_slot, on_disk=True),
        layout,
        roots.append,
        lambda done, total: seen.append((done, total)),
    )
    found = await filling.fill_from_files(source)
    assert found is sink
    assert memory.asked == [(["t0", "t1", "t2"], True)]
    assert sink.held == {name: bytearray(TENSORS[name].tobytes()) for name in ("t0", "t1")}
    assert sink.done == ["sealed"]
    assert seen[-1] == (72, 72), "what the engine does not need is read for its hash"
    assert roots == [filling.root_hash]
    assert roots[0].startswith("xxh3_128_tree:")


async def test_what_does_not_fit_asks_for_no_memory(source: Located, layout: WeightsLayout) -> None:
    memory = Memory(Bytes())
    less = WeightsLayout({name: layout.required[name] for name in ("t0", "t1")}, {}, {})
    with pytest.raises(WeightsRejected, match=r"'t2' .* unknown to the model"):
        await SinkFilling(memory.open_slot, less, anything).fill_from_files(source)
    assert memory.asked == []


@pytest.mark.parametrize("fault", ["hash", "file", "device"])
async def test_what_goes_wrong_gives_the_memory_back(
    source: Located, layout: WeightsLayout, fault: str
) -> None:
    sink = Bytes("device" if fault == "device" else "host")
    sink.go.clear()

    def verify(_: str) -> None:
        raise WeightsRejected("another hash")

    filling = begin_filling(sink, layout, source, verify)
    if fault == "file":
        await asyncio.to_thread(sink.reading.wait, 10)
        (source[0] / "model.safetensors").write_bytes(b"")
    sink.go.set()
    words = {"hash": "another hash", "file": "truncated", "device": "transport"}[fault]
    with pytest.raises(EngineError, match=words):
        await filling
    assert sink.done == ["closed"]


@pytest.mark.parametrize("times", [1, 3], ids=["once", "impatiently"])
async def test_a_cancelled_fill_closes_its_sink_after_the_last_write(
    source: Located, layout: WeightsLayout, times: int
) -> None:
    sink = Bytes()
    sink.go.clear()
    filling = begin_filling(sink, layout, source)
    await asyncio.to_thread(sink.reading.wait, 10)
    for _ in range(times):
        filling.cancel()
        await asyncio.sleep(0.01)
    assert (filling.done(), sink.done) == (False, []), "the thread may still write"
    sink.go.set()
    with pytest.raises(asyncio.CancelledError):
        await filling
    assert sink.done == ["closed"]


async def test_a_fill_that_is_cancelled_while_it_gives_up_keeps_no_memory(
    source: Located, layout: WeightsLayout
) -> None:
    """A head's call to close a slot may come at any moment, and more than once."""
    loop, busy, gives_up = asyncio.get_running_loop(), threading.Event(), asyncio.Event()
    loop.set_default_executor(ThreadPoolExecutor(1))
    sink = Bytes()

    def refuse(_: str) -> None:
        loop.run_in_executor(None, busy.wait, 10)  # so the sink is closed after it
        gives_up.set()
        raise EngineError("no")

    filling = begin_filling(sink, layout, source, refuse)
    await gives_up.wait()
    for _ in range(2):
        filling.cancel()
        await asyncio.sleep(0.01)
    busy.set()
    await asyncio.wait([filling])
    assert sink.done == ["closed"]


# The slot.


def slot(**fields: Any) -> StagingSlot:
    request = StageRequest(epoch=1, version=1, source=StageSource.of(CHECKPOINT), **fields)
    return StagingSlot(request, CHECKPOINT)


async def test_a_slot_is_staged_once_it_is_filled(source: Located, layout: WeightsLayout) -> None:
    sink, found = Bytes(), slot()
    assert found.to_view().phase == "Staging"
    await found.fill_slot(engine(sink).open_slot, layout, source)
    view = found.to_view()
    assert (view.phase, view.bytes_done, view.bytes_total) == ("Staged", 72, 72)
    assert found.take_sink() is sink
    assert found.to_view().phase == "Staged", "until somebody says that it serves"
    await found.drop_slot()
    assert sink.done == ["sealed"], "it is the engine's now"


async def test_dropping_what_is_staged_gives_its_memory_back_once(
    source: Located, layout: WeightsLayout
) -> None:
    sink, found = Bytes(), slot()
    await found.fill_slot(engine(sink).open_slot, layout, source)
    await found.drop_slot()
    await found.drop_slot()
    assert sink.done == ["sealed", "closed"]


async def test_dropping_what_is_being_filled_waits_for_its_thread(
    source: Located, layout: WeightsLayout
) -> None:
    sink, found = Bytes(), slot()
    sink.go.clear()
    found.task = asyncio.create_task(found.fill_slot(engine(sink).open_slot, layout, source))
    await asyncio.to_thread(sink.reading.wait, 10)
    dropping = asyncio.create_task(found.drop_slot())
    await asyncio.sleep(0.02)
    assert not dropping.done()
    sink.go.set()
    await dropping
    assert sink.done == ["closed"]
    assert not found.is_staged


async def test_a_stage_whose_deadline_ends_while_a_slot_is_dropped_gives_up_its_push() -> None:
    go = threading.Event()

    async def fill() -> None:
        await run_in_thread(lambda cancelled: go.wait(10), threading.Event())

    def no_room(nbytes: int) -> Any:
        raise AssertionError("no layout comes")

    found = slot()
    found.incoming = IncomingVersion(found.identity, PushedBytes(), lambda entries: None, no_room)
    found.task = asyncio.create_task(fill())
    await asyncio.sleep(0)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await found.drop_slot("a later one")
    go.set()
    await asyncio.wait([found.task])
    assert found.incoming.failure == "a later one"
