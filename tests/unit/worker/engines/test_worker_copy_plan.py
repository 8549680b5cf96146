"""Loads that are recorded once and repeated: what may be recorded, and that it makes the same weights."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from rollout_worker.engines.sglang.child_process import loader
from rollout_worker.engines.shared_memory.copy_plan import (
    CopyList,
    CopyRecorder,
    NotRecordable,
    RecordedCopy,
    SourceIndex,
    StridedPart,
    TensorMemory,
    TensorRows,
    have_same_bytes,
    merge_copies,
    repeat_copies,
)
from rollout_worker.engines.shared_memory.tensor_views import view_tensors

SHAPES: dict[str, tuple[str, tuple[int, ...]]] = {
    "down": ("F32", (6, 4)),
    "embed": ("BF16", (5, 4)),
    "gate": ("F32", (4, 6)),
    "norm": ("F32", (4,)),
    "up": ("F32", (4, 6)),
}
ROWS: TensorRows = [[name, dtype, list(shape)] for name, (dtype, shape) in SHAPES.items()]


class Version:
    """A version's bytes as they are staged: each tensor begins at a multiple of 256."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.whole = torch.randint(0, 127, (2048,), generator=generator, dtype=torch.uint8)
        self.starts = {name: 256 * place for place, name in enumerate(SHAPES)}
        self.memory = TensorMemory(self.whole, self.starts, ROWS)

    def read(self) -> Iterator[tuple[str, Tensor]]:
        places = [(n, dtype, shape, self.starts[n]) for n, (dtype, shape) in SHAPES.items()]
        return view_tensors(self.whole, places)


class Model(nn.Module):
    """A rank's share: merged projections, a cut one, padding, an embedding of another dtype."""

    gate_up: nn.Parameter
    down: nn.Parameter
    embed: nn.Parameter
    norm: nn.Parameter
    quant_method: object

    def __init__(self) -> None:
        super().__init__()
        zeros = {"gate_up": (6, 4), "down": (6, 2), "embed": (8, 4), "norm": (4,)}
        for name, shape in zeros.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape), requires_grad=False))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            self.load(name, tensor)

    def load(self, name: str, tensor: Tensor) -> None:
        if name in ("gate", "up"):
            half = self.gate_up.data.narrow(0, 3 if name == "up" else 0, 3)
            half.copy_(tensor.t().narrow(0, 3, 3))
        elif name == "down":
            self.down.data.copy_(tensor[:, 2:])
        elif name == "embed":
            self.embed.data[:5].copy_(tensor)
            self.embed.data[5:].fill_(0)
        else:
            self.norm.data.copy_(tensor)

    def content(self) -> dict[str, Tensor]:
        return {name: parameter.data.clone() for name, parameter in self.named_parameters()}


load_plainly = Model.load


def recorded(model: Model, version: Version) -> CopyRecorder:
    sources = SourceIndex()
    recorder = CopyRecorder(sources, {n: p.data for n, p in model.named_parameters()})
    with recorder:
        model.load_weights(sources.track_tensors(version.read()))
    recorder.check_copies()
    return recorder


def computes(model: Model, name: str, tensor: Tensor) -> None:
    load_plainly(model, name, tensor * 2 if name == "norm" else tensor)


def adds_in_place(model: Model, name: str, tensor: Tensor) -> None:
    load_plainly(model, name, tensor.add_(1) if name == "norm" else tensor)


def computes_with_what_was_loaded(model: Model, name: str, tensor: Tensor) -> None:
    load_plainly(model, name, tensor)
    if name == "norm":
        model.norm.data.copy_(model.norm.data + 1)


def asks_for_a_value(model: Model, name: str, tensor: Tensor) -> None:
    load_plainly(model, name, tensor)
    if name == "norm":
        model.norm.data.fill_(tensor[0].item())


def casts(model: Model, name: str, tensor: Tensor) -> None:
    load_plainly(model, name, tensor.double() if name == "norm" else tensor)


def gathers(model: Model, name: str, tensor: Tensor) -> None:
    load_plainly(model, name, torch.cat([tensor]) if name == "norm" else tensor)


def writes_twice(model: Model, name: str, tensor: Tensor) -> None:
    load_plainly(model, name, tensor)
    if name == "up":
        model.gate_up.data.narrow(0, 0, 3).copy_(tensor.t().narrow(0, 0, 3))


@pytest.mark.parametrize(
    "load",
    [
        *(computes, adds_in_place, computes_with_what_was_loaded, asks_for_a_value),
        *(casts, gathers, writes_twice),
    ],
)
def test_a_load_that_does_more_than_copy_once_is_not_recorded(
    load: Callable[[Model, str, Tensor], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Model, "load", load)
    model, version = Model(), Version(1)
    before = version.whole.clone()
    with pytest.raises(NotRecordable):
        recorded(model, version)
    assert torch.equal(version.whole, before), "staged bytes are not touched"


def test_memory_knows_what_it_lacks() -> None:
    version = Version(1)
    assert version.memory.has_tensors(SHAPES)
    version.starts["norm"] += 2
    assert not version.memory.has_tensors(SHAPES), "float32 begins at a multiple of four"
    del version.starts["norm"]
    assert not version.memory.has_tensors(SHAPES)
    assert version.memory.has_tensors({"up"})


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The loads that a model's own loaders did."""
    seen: list[str] = []
    load = Model.load_weights

    def counted(model: Model, weights: Iterable[tuple[str, Tensor]]) -> None:
        seen.append("load")
        load(model, weights)

    monkeypatch.setattr(Model, "load_weights", counted)
    monkeypatch.setattr(loader, "_last_load", None)
    return seen


def commit(model: Model, version: Version, experts: list[list[int]] | None = None) -> None:
    loader._load_recorded(model, ROWS, version.memory, version.read, experts)


def test_sglangs_second_commit_repeats_the_first(loads: list[str]) -> None:
    model, other, second = Model(), Model(), Version(2)
    commit(model, Version(1))
    commit(model, second)
    commit(model, second)
    assert len(loads) == 1
    Model.load_weights(other, second.read())
    for name, wanted in other.content().items():
        assert have_same_bytes(model.content()[name], wanted), name


def test_sglangs_load_is_recorded_again_where_parameters_have_moved(loads: list[str]) -> None:
    model = Model()
    commit(model, Version(1))
    model.norm.data = torch.zeros(4)
    commit(model, Version(2))
    assert len(loads) == 2
    assert have_same_bytes(model.norm.data, dict(Version(2).read())["norm"])


def test_sglangs_load_is_recorded_again_where_experts_have_moved(loads: list[str]) -> None:
    model = Model()
    for seed, experts in enumerate([[[0, 1]], [[0, 1]], [[1, 0]], [[1, 0]]]):
        commit(model, Version(seed), experts)
    assert len(loads) == 2


def test_sglangs_load_goes_on_by_its_loaders_where_it_computes(
    loads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Model, "load", computes)
    model = Model()
    for seed in (1, 2):
        commit(model, Version(seed))
        assert have_same_bytes(model.norm.data, dict(Version(seed).read())["norm"] * 2)
    assert len(loads) == 3, "the first one was begun twice"


def test_sglangs_copies_in_a_thread_are_not_missed(
    loads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(model: Model, name: str, tensor: Tensor) -> None:
        if name != "norm":
            return load_plainly(model, name, tensor)
        thread = threading.Thread(target=load_plainly, args=(model, name, tensor))
        thread.start()
        thread.join()
        return None

    monkeypatch.setattr(Model, "load", load)
    model = Model()
    for seed in (1, 2):
        commit(model, Version(seed))
        assert have_same_bytes(model.norm.data, dict(Version(seed).read())["norm"])


def test_sglangs_quantised_layers_are_loaded_by_sglang(loads: list[str]) -> None:
    model = Model()
    model.quant_method = type("Fp8LinearMethod", (), {})()
    for seed in (1, 2):
        commit(model, Version(seed))
    assert len(loads) == 2
    assert have_same_bytes(model.norm.data, dict(Version(2).read())["norm"])


# Copies that are made at once.

EXPERTS = 16
LEXICOGRAPHIC = sorted(range(EXPERTS), key=str)


def expert_copies(order: Sequence[int]) -> tuple[list[RecordedCopy], TensorMemory]:
    """What a loader does with two matrices of each expert, which lie in this order in a version of random bytes."""
    rows: TensorRows = [[f"{name}{e}", "F32", [2, 4]] for e in order for name in ("gate", "down")]
    starts = {str(name): 128 + 48 * place for place, (name, _, _) in enumerate(rows)}
    whole = torch.randint(0, 127, (128 + 48 * len(rows),), dtype=torch.uint8)
    plain, turned = StridedPart(0, (2, 4), (4, 1)), StridedPart(0, (4, 2), (1, 4))
    copies = []
    for e in range(EXPERTS):
        gate = StridedPart(16 * e + 4, (2, 4), (8, 1))
        copies.append(RecordedCopy("gate", gate, f"gate{e}", plain))
        copies.append(RecordedCopy("down", StridedPart(8 * e, (4, 2), (2, 1)), f"down{e}", turned))
    return copies, TensorMemory(whole, starts, rows)


def filled(copies: Sequence[RecordedCopy], memory: TensorMemory) -> dict[str, Tensor]:
    """What these copies make, one by one."""
    made = {"gate": torch.zeros(EXPERTS, 16), "down": torch.zeros(EXPERTS, 8)}
    for copy in copies:
        copy.target.view_of(made[copy.parameter]).copy_(memory.view_part(copy.tensor, copy.source))
    return made


@pytest.mark.parametrize(
    ("order", "left"),
    [(range(EXPERTS), 2), (range(EXPERTS)[::-1], 2 * EXPERTS), (LEXICOGRAPHIC, 6)],
    ids=["by number", "backwards", "by name"],
)
def test_one_copy_is_made_for_experts_that_lie_alike(order: Sequence[int], left: int) -> None:
    copies, memory = expert_copies(order)
    assert len(merge_copies(copies, memory)) == left


def test_a_version_that_lies_in_another_order_is_copied_by_its_own_places() -> None:
    copies, first = expert_copies(range(EXPERTS))
    _, second = expert_copies(LEXICOGRAPHIC)
    found = CopyList(copies)
    for memory in (first, second, first):
        wanted = filled(copies, memory)
        parameters = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
        repeat_copies(found, parameters, memory)
        assert all(torch.equal(parameters[name], tensor) for name, tensor in wanted.items())
        assert found.merged_for(memory) is found.merged_for(memory)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=12))
def test_whatever_lies_wherever_the_same_is_made(places: list[tuple[int, int]]) -> None:
    """Also parts that meet, overlap or are copied twice, as long as they agree on what they write."""
    whole = torch.arange(4 * 40, dtype=torch.uint8).view(torch.float32).view(torch.uint8)
    memory = TensorMemory(whole, {"a": 0}, [["a", "F32", [40]]])
    by_target = dict(places)  # one source for each place
    parts = [(4 * target, 4 * source) for target, source in by_target.items()]
    copies = [
        RecordedCopy("p", StridedPart(t, (2, 2), (2, 1)), "a", StridedPart(s, (2, 2), (2, 1)))
        for t, s in parts
    ]
    parameter, wanted = torch.zeros(40), torch.zeros(40)
    for copy in copies:
        copy.target.view_of(wanted).copy_(memory.view_part("a", copy.source))
    repeat_copies(CopyList(copies), {"p": parameter}, memory)
    assert have_same_bytes(parameter, wanted)
