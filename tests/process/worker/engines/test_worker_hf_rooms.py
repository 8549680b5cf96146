"""Memory for a version in the hf engine: taken before it is filled, charged, and aside of a full GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rollout_worker.engine import (
    EngineError,
    TensorEntry,
    TensorSpec,
    WeightsLayout,
    WeightsRejected,
)
from rollout_worker.engines.hf.weights.buffers import DeviceAllocator, NamedSpec, TensorSink
from rollout_worker.engines.hf.weights.loading import LoadedModel
from rollout_worker.engines.hf.weights.weights_memory import WeightsMemory
from rollout_worker.engines.shared_memory.staging_budget import StagingBudget

SHAPES = {"weight": (4, 3), "bias": (4,)}
ENTRIES = [TensorEntry(name, TensorSpec("F32", shape)) for name, shape in SHAPES.items()]
NBYTES = 2 * 64


class Gpu:
    """A device with room for so many versions beside the serving one."""

    def __init__(self, versions: int) -> None:
        self.versions = versions

    def __call__(self, specs: Sequence[NamedSpec]) -> dict[str, Tensor]:
        if not self.versions:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.versions -= 1
        return {name: torch.empty(tuple(shape), dtype=dtype) for name, shape, dtype in specs}


def memory_of(
    model: nn.Module, staging: StagingBudget | None = None, beside: DeviceAllocator | None = None
) -> WeightsMemory:
    model.requires_grad_(requires_grad=False)
    targets: dict[str, Tensor] = dict(model.named_parameters())
    loaded = LoadedModel(model, None, WeightsLayout({}, {}, {}), targets, "", frozenset(), 8, 8)
    return WeightsMemory(loaded, None, staging or StagingBudget(), beside)


def filled(sink: TensorSink, value: float) -> TensorSink:
    for entry in ENTRIES:
        view = sink.allocate(entry)
        assert view is not None
        view[:] = torch.full(entry.spec.shape, value).numpy().tobytes()
        view.release()
    sink.seal()
    return sink


def is_all(model: Any, value: float) -> bool:
    return all(bool((tensor == value).all()) for tensor in model.parameters())


def test_a_model_whose_tensors_can_not_be_followed_is_not_updated() -> None:
    model = nn.Linear(3, 4)
    loaded = LoadedModel(model, None, WeightsLayout({}, {}, {}), {}, "", frozenset(), 8, 8)
    with pytest.raises(WeightsRejected, match="transformers converts this model's tensors"):
        WeightsMemory(loaded, None, StagingBudget()).open_sink(ENTRIES)


def test_all_of_its_memory_is_charged_before_it_is_filled() -> None:
    memory = memory_of(nn.Linear(3, 4), StagingBudget(NBYTES))
    first = memory.open_sink(ENTRIES)
    assert first.nbytes == 4 * (12 + 4)
    with pytest.raises(EngineError, match=r"128 bytes of staged .* 0 bytes .*stagingMemory.* 256"):
        memory.open_sink(ENTRIES)
    first.close()
    first.close()
    memory.open_sink(ENTRIES).close()


def test_a_commit_without_former_weights_takes_the_only_copy_there_is() -> None:
    """Woken without values the model has no tensors: what is staged becomes them."""
    model = nn.Linear(3, 4)
    gpu = Gpu(versions=1)  # the room of those that were dropped
    memory = memory_of(model, beside=gpu)
    memory.drop_weights()
    assert memory.nbytes == 0
    sink = filled(memory.open_sink(ENTRIES), 3.0)
    staged = {tensor.data_ptr() for tensor in sink.tensors.values()}
    memory.swap_weights(sink)
    assert is_all(model, 3.0)
    assert {tensor.data_ptr() for tensor in model.parameters()} == staged


def test_memory_that_is_taken_over_by_a_commit_is_staged_no_more() -> None:
    model = nn.Linear(3, 4)
    memory = memory_of(model, StagingBudget(NBYTES))
    for value in (1.0, 2.0):
        sink = filled(memory.open_sink(ENTRIES), value)
        memory.swap_weights(sink)
        sink.close()
        assert is_all(model, value)


def test_another_dtype_is_turned_into_the_models() -> None:
    model = nn.Linear(3, 4).to(torch.bfloat16)
    memory = memory_of(model)
    sink = filled(memory.open_sink(ENTRIES), 0.5)
    assert {tensor.dtype for tensor in sink.tensors.values()} == {torch.bfloat16}
    memory.swap_weights(sink)
    assert is_all(model, 0.5)


def test_what_other_dtypes_come_through_is_charged_until_it_is_sealed() -> None:
    """On a GPU that is locked memory, of the size of the largest tensor."""
    staging = StagingBudget(NBYTES + 64)
    memory = memory_of(nn.Linear(3, 4).to(torch.bfloat16), staging)
    sink = memory.open_sink(ENTRIES)
    with pytest.raises(EngineError, match="stagingMemory"):
        staging.claim_memory(1)
    filled(sink, 0.5)
    staging.claim_memory(64)()
    sink.close()
    staging.claim_memory(NBYTES + 64)()
    memory.open_sink(ENTRIES).close()
    staging.claim_memory(NBYTES + 64)()
    tight = memory_of(nn.Linear(3, 4).to(torch.bfloat16), StagingBudget(NBYTES))
    with pytest.raises(EngineError, match="64 bytes of staged"):
        tight.open_sink(ENTRIES)
    assert tight._staging._taken == 0


def addresses(model: nn.Module) -> Mapping[str, int]:
    return {name: tensor.data_ptr() for name, tensor in model.named_parameters()}


def test_a_gpu_without_room_for_two_versions_is_updated_all_the_same() -> None:
    """As after a restart, whose weights come on top of the checkpoint's."""
    model = nn.Linear(3, 4)
    staging = StagingBudget(NBYTES)
    memory = memory_of(model, staging, Gpu(0))
    before = addresses(model)
    sink = filled(memory.open_sink(ENTRIES), 3.0)
    assert sink.off_device
    memory.swap_weights(sink)
    sink.close()
    assert is_all(model, 3.0)
    assert addresses(model) == before, "a pointer to main memory is no tensor of a GPU"
    staging.claim_memory(NBYTES)()


def test_sleeping_weights_have_room_again() -> None:
    model = nn.Linear(3, 4)
    memory = memory_of(model, beside=Gpu(0))
    sink = filled(memory.open_sink(ENTRIES), 4.0)
    memory.drop_weights()
    memory.swap_weights(sink)
    sink.close()
    assert is_all(model, 4.0)


def test_a_gpu_with_room_takes_the_version_itself() -> None:
    model = nn.Linear(3, 4)
    memory = memory_of(model, StagingBudget(1), Gpu(1))
    sink = filled(memory.open_sink(ENTRIES), 5.0)
    assert not sink.off_device
    memory.swap_weights(sink, pin=True)
    memory.use_weights(pinned=True)
    assert not is_all(model, 5.0)
    memory.use_weights(pinned=False)
    assert is_all(model, 5.0)


def test_pinning_without_room_is_refused_and_the_former_weights_serve() -> None:
    model = nn.Linear(3, 4)
    nn.init.constant_(model.weight, 1.0)
    nn.init.constant_(model.bias, 1.0)
    memory = memory_of(model, beside=Gpu(0))
    sink = filled(memory.open_sink(ENTRIES), 6.0)
    with pytest.raises(EngineError, match=r"no room for two versions .*spec.weights.inFlight"):
        memory.swap_weights(sink, pin=True)
    assert is_all(model, 1.0)


def test_what_lies_aside_may_be_pinned_where_there_is_room_by_then() -> None:
    model = nn.Linear(3, 4)
    gpu = Gpu(0)
    memory = memory_of(model, beside=gpu)
    sink = filled(memory.open_sink(ENTRIES), 7.0)
    gpu.versions = 1
    memory.swap_weights(sink, pin=True)
    sink.close()
    assert is_all(model, 7.0)
    memory.use_weights(pinned=True)
    assert not is_all(model, 7.0)
