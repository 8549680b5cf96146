"""Memory that is given to an engine: it serves from there or maps it, takes none, and gives it back at the end."""

from __future__ import annotations

import gc
import json
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rollout_common.transfer.layout import PushLayout
from rollout_common.transfer.memory.slot import Slot
from rollout_worker.engine import GangMembership, MappedWeights, TensorEntry, TensorSpec
from rollout_worker.engines import EngineOptions
from rollout_worker.engines.hf.weights.borrowed import MappedTensorSink
from rollout_worker.engines.hf.weights.weights_memory import WeightsMemory
from rollout_worker.engines.shared_memory.rank_mappings import read_tensors
from rollout_worker.engines.shared_memory.sinks import BorrowedSink, MappedSink
from rollout_worker.engines.shared_memory.staging_budget import StagingBudget
from rollout_worker.engines.weight_versions import open_mapped_sink

OPTIONS = EngineOptions(Path("model"))
SHAPES = {"bias": (4,), "empty": (0, 2), "weight": (4, 3)}
ENTRIES = [TensorEntry(name, TensorSpec("F32", shape)) for name, shape in SHAPES.items()]


class Lender:
    """Shared memory with `fill` in every tensor, and by which threads it was given back."""

    def __init__(self, fill: float, dtype: str = "F32") -> None:
        layout = PushLayout.plan((name, dtype, shape) for name, shape in SHAPES.items())
        self.slot = Slot(layout.nbytes)
        self.returns: list[threading.Thread] = []
        for placed in layout.tensors:
            values = torch.full(placed.shape, fill).numpy().tobytes()
            self.slot.view_tensor(placed)[:] = values[: placed.nbytes]
        starts = {placed.name: placed.start for placed in layout.tensors}
        view = self.slot.view_bytes(0, self.slot.size)
        self.given = MappedWeights(self.slot.handle, self.slot.size, starts, self._release, view)

    def _release(self) -> None:
        self.returns.append(threading.current_thread())

    @property
    def released(self) -> int:
        """How often."""
        return len(self.returns)


@pytest.fixture
def lender() -> Iterator[Lender]:
    made = Lender(7.0)
    yield made
    made.given.view.release()
    made.slot.close()


def memory(model: nn.Module, staging: StagingBudget) -> WeightsMemory:
    loaded: Any = SimpleNamespace(model=model, targets=dict(model.named_parameters()), parts={})
    return WeightsMemory(loaded, None, staging)


def model_of(dtype: torch.dtype = torch.float32) -> nn.Module:
    model = nn.Module()
    for name, shape in SHAPES.items():
        model.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=dtype), False))
    return model


def ones(held: WeightsMemory) -> Any:
    """Another version, in memory of the engine's own."""
    sink = held.open_sink(ENTRIES)
    for entry in ENTRIES:
        view = sink.allocate(entry)
        assert view is not None
        if view:
            view[:] = torch.ones(entry.spec.shape).numpy().tobytes()
    sink.seal()
    return sink


def test_hf_serves_from_the_memory_that_is_given_and_takes_none(lender: Lender) -> None:
    model = model_of()
    staging = StagingBudget(1)  # of which nothing could be taken
    held = memory(model, staging)
    sink = held.open_sink(ENTRIES, lender.given)
    assert isinstance(sink, MappedTensorSink)
    assert sink.took
    views = list(map(sink.allocate, ENTRIES))
    assert views == [None] * 3
    sink.seal()
    held.swap_weights(sink)
    sink.close()
    gc.collect()
    assert not lender.released, "the model computes with it"
    assert model.get_parameter("weight").sum() == 7 * 12
    held.swap_weights(ones(memory(model, StagingBudget())))
    del sink
    staging.wait_until_freed()
    assert len(lender.returns) == 1
    assert lender.returns != [threading.current_thread()], "a step would have waited for it"


def test_hf_keeps_given_memory_until_pinned_outputs_have_ended(lender: Lender) -> None:
    staging = StagingBudget()
    held = memory(model_of(), staging)
    sink = held.open_sink(ENTRIES, lender.given)
    sink.seal()
    held.swap_weights(sink)
    sink.close()
    held.swap_weights(ones(held), pin=True)
    gc.collect()
    assert not lender.released
    held.use_weights(pinned=True)
    held.use_weights(pinned=False)
    held.release_pinned()
    staging.wait_until_freed()
    assert len(lender.returns) == 1
    assert lender.returns != [threading.current_thread()], "a step would have waited for it"


def test_hf_gives_memory_back_that_is_never_committed(lender: Lender) -> None:
    sink = memory(model_of(), StagingBudget()).open_sink(ENTRIES, lender.given)
    sink.seal()
    sink.close()
    gc.collect()
    assert len(lender.returns) == 1


def test_hf_of_another_dtype_leaves_given_memory_alone(lender: Lender) -> None:
    held = memory(model_of(torch.bfloat16), StagingBudget())
    sink = held.open_sink(ENTRIES, lender.given)
    assert not sink.took
    assert sink.allocate(ENTRIES[0]) is not None
    sink.close()
    gc.collect()
    assert not lender.released


async def test_a_lent_sink_tells_other_processes_where_tensors_are(lender: Lender) -> None:
    before = set(os.listdir("/proc/self/fd"))
    sink = await open_mapped_sink(ENTRIES, OPTIONS, given=lender.given, skip=["bias"])
    assert isinstance(sink, BorrowedSink)
    assert sink.took
    assert sink.nbytes == 0
    assert all(sink.allocate(entry) is None for entry in ENTRIES)
    sink.seal()
    found = dict(read_tensors(json.loads(sink.make_ticket())))
    assert set(found) == {"empty", "weight"}
    assert found["weight"].tolist() == [[7.0] * 3] * 4
    assert found["empty"].shape == (0, 2)
    del found  # views keep a mapping, which has a descriptor of its own
    gc.collect()
    assert not lender.released
    sink.close()
    sink.close()
    assert lender.released
    assert set(os.listdir("/proc/self/fd")) == before


async def test_a_sink_of_a_gang_or_a_file_takes_its_own_memory(
    lender: Lender, tmp_path: Any
) -> None:
    gang = GangMembership(nodes=2, rank=0, leader="a", port=1, slots=tmp_path)
    for options, on_disk in ((OPTIONS, True), (replace(OPTIONS, gang=gang), False)):
        sink = await open_mapped_sink(ENTRIES, options, on_disk=on_disk, given=lender.given)
        assert type(sink) is MappedSink
        assert not sink.took
        sink.close()
    assert not lender.released


def test_tensors_that_are_given_stay_while_a_view_of_them_lives(lender: Lender) -> None:
    found = dict(read_tensors(json.loads(BorrowedSink(ENTRIES, lender.given).make_ticket())))
    lender.slot.close()
    assert found["weight"].sum() == 7 * 12
