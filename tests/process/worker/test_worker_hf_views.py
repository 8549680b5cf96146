"""Tensors of the trainer's in the hf engine: views where they fit, copies elsewhere, and never a mix."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from rollout_worker.engine import EngineError, Sink, TrainerTensors, WeightsLayout, WeightsRejected
from rollout_worker.engines.hf.weights.buffers import TensorSink
from rollout_worker.engines.hf.weights.loading import LoadedModel
from rollout_worker.engines.hf.weights.weights_memory import WeightsMemory
from rollout_worker.engines.shared_memory.staging_budget import StagingBudget
from rollout_worker.sources.tensor_bytes import entries_of, fill, named
from rollout_worker.sources.tensor_filling import SinkFilling

LAYOUT = WeightsLayout(
    {each.name: each.spec for each in entries_of(nn.Linear(3, 4).state_dict())}, {}, {}
)


class Trainer:
    """A model that is handed over, and how often it was given back."""

    def __init__(self, value: float, dtype: torch.dtype = torch.float32) -> None:
        self.model = nn.Linear(3, 4).to(dtype)
        self.returned = 0
        with torch.no_grad():
            for tensor in self.model.parameters():
                tensor.fill_(value)

    def given(self, *, copy: bool = False) -> TrainerTensors:
        def give_back() -> None:
            self.returned += 1

        return TrainerTensors(named(self.model), give_back, copy)

    def step(self) -> None:
        """As an optimizer's: in place."""
        with torch.no_grad():
            for tensor in self.model.parameters():
                tensor.add_(1)

    @property
    def addresses(self) -> set[int]:
        return {tensor.data_ptr() for tensor in self.model.parameters()}


def engine_memory(dtype: torch.dtype = torch.float32, *, crowded: bool = False) -> WeightsMemory:
    """That of an engine; `crowded`: as on a GPU without room for a second version."""
    model = nn.Linear(3, 4).to(dtype).requires_grad_(requires_grad=False)
    targets: dict[str, Tensor] = dict(model.named_parameters())
    loaded = LoadedModel(model, None, WeightsLayout({}, {}, {}), targets, "", frozenset(), 8, 8)

    def full(specs: object) -> dict[str, Tensor]:
        raise torch.OutOfMemoryError

    return WeightsMemory(loaded, None, StagingBudget(), full if crowded else None)


async def taken(memory: WeightsMemory, given: TrainerTensors) -> TensorSink:
    """Fill a sink as the worker does."""

    async def open_slot(entries: object, *, given: TrainerTensors) -> Sink:
        return memory.open_sink(list(entries_of(given.tensors)), given)

    sink = await fill(SinkFilling(open_slot, LAYOUT, lambda _: None), given)
    assert isinstance(sink, TensorSink)
    return sink


def swap(memory: WeightsMemory, sink: TensorSink, *, pin: bool = False) -> None:
    memory.swap_weights(sink, pin=pin)
    sink.close()


def serving(memory: WeightsMemory) -> Mapping[str, Tensor]:
    return memory._targets


def addresses(memory: WeightsMemory) -> set[int]:
    return {tensor.data_ptr() for tensor in serving(memory).values()}


def is_all(memory: WeightsMemory, value: float) -> bool:
    return all(bool((tensor == value).all()) for tensor in serving(memory).values())


async def test_views_are_given_back_once_others_serve() -> None:
    memory, first, second = engine_memory(), Trainer(1), Trainer(2)
    swap(memory, await taken(memory, first.given()))
    assert addresses(memory) == first.addresses
    assert first.returned == 0
    swap(memory, await taken(memory, second.given()), pin=True)
    memory.use_weights(pinned=True)
    assert addresses(memory) == first.addresses
    memory.use_weights(pinned=False)
    assert first.returned == 0
    memory.release_pinned()
    assert first.returned >= 1
    memory.drop_weights()
    assert second.returned >= 1


async def test_copies_are_given_back_at_once() -> None:
    memory, trainer = engine_memory(), Trainer(1)
    sink = await taken(memory, trainer.given(copy=True))
    assert trainer.returned >= 1
    trainer.step()
    swap(memory, sink)
    assert is_all(memory, 1)
    memory.check_unchanged()


async def test_a_crowded_device_never_writes_over_the_trainers_tensors() -> None:
    memory, first, second = engine_memory(crowded=True), Trainer(1), Trainer(2)
    swap(memory, await taken(memory, first.given()))
    swap(memory, await taken(memory, second.given(copy=True)))
    assert is_all(memory, 2)
    assert addresses(memory).isdisjoint(first.addresses | second.addresses)
    assert all(bool((tensor == 1).all()) for tensor in first.model.parameters())


@pytest.mark.parametrize("pin", [False, True])
async def test_what_was_changed_serves_no_more(*, pin: bool) -> None:
    memory, first, second = engine_memory(), Trainer(1), Trainer(2)
    swap(memory, await taken(memory, first.given()))
    memory.check_unchanged()
    assert memory.is_intact
    first.step()
    assert not memory.is_intact
    with pytest.raises(EngineError, match=r"'bias' was changed in place|'weight' was changed in"):
        memory.check_unchanged()
    sink = await taken(memory, second.given())
    if pin:  # the former ones are no more
        with pytest.raises(EngineError, match="was changed in place"):
            memory.swap_weights(sink, pin=True)
    swap(memory, sink)
    memory.check_unchanged()
    assert is_all(memory, 2)


async def test_what_is_changed_between_hash_and_commit_is_refused() -> None:
    memory, trainer = engine_memory(), Trainer(1)
    sink = await taken(memory, trainer.given())
    trainer.step()
    with pytest.raises(EngineError, match="was changed in place"):
        memory.swap_weights(sink)
    sink = memory.open_sink(list(entries_of(named(trainer.model))), trainer.given(copy=True))
    trainer.step()
    with pytest.raises(WeightsRejected, match="was changed while it was handed over"):
        await asyncio.to_thread(sink.seal)
    sink.close()
    assert trainer.returned >= 1


async def test_tensors_of_another_dtype_are_copied_on_their_device() -> None:
    memory, trainer = engine_memory(torch.bfloat16), Trainer(1)
    swap(memory, await taken(memory, trainer.given()))
    assert is_all(memory, 1)
    assert {tensor.dtype for tensor in serving(memory).values()} == {torch.bfloat16}
    assert trainer.returned >= 1


async def test_tensors_whose_writes_torch_does_not_count_are_copied() -> None:
    memory = engine_memory()
    with torch.inference_mode():
        tensors = {name: torch.ones(each.shape) for name, each in serving(memory).items()}
    swap(memory, await taken(memory, TrainerTensors(named(tensors), lambda: None)))
    assert addresses(memory).isdisjoint(each.data_ptr() for each in tensors.values())
    assert is_all(memory, 1)


@pytest.mark.parametrize("pin", [True, False])
async def test_what_was_pinned_is_given_back_with_the_next_commit(pin: bool) -> None:
    """Whatever its policy is; the trainer may then write to it."""
    memory, first, second, third = engine_memory(), Trainer(1), Trainer(2), Trainer(3)
    swap(memory, await taken(memory, first.given()))
    for trainer, pins in ((second, True), (third, pin)):
        memory.swap_weights(await taken(memory, trainer.given()), pin=pins)
    assert first.returned == 1
    first.step()
    memory.check_unchanged()
    memory.release_pinned()
    assert second.returned == 1
