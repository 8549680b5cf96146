"""What ranks tell of the tensors that they read, and what becomes of a load that reads another one all the same."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollout_worker.engine import TensorEntry, TensorSpec
from rollout_worker.engines.shared_memory import rank_mappings, ranks
from rollout_worker.engines.shared_memory.sinks import SLOTS_VARIABLE, MappedSink
from rollout_worker.engines.shared_memory.tensor_views import (
    AbsentTensor,
    AbsentTensorRead,
    ReadWatch,
)

ENTRIES = tuple(TensorEntry(name, TensorSpec("F32", (2, 3))) for name in ("a", "b", "c"))
DESCRIBED = [(each.name, each.spec.dtype, each.spec.shape) for each in ENTRIES]
SLOT = "5" * 32

Read = Callable[[torch.Tensor, torch.nn.Parameter], object]


def assigned(tensor: torch.Tensor, parameter: torch.nn.Parameter) -> None:
    parameter.data = tensor


READS: dict[str, Read] = {
    "copy": lambda tensor, parameter: parameter.data.copy_(tensor),
    "copy to no values": lambda tensor, _: torch.empty(2, 3, device="meta").copy_(tensor),
    "a part": lambda tensor, parameter: parameter.data[0].copy_(tensor[0]),
    "in a list": lambda tensor, _: torch.cat([tensor, tensor]),
    "by keyword": lambda tensor, parameter: torch.add(parameter, other=tensor),
    "by operator": lambda tensor, parameter: parameter == tensor,
    "its op": lambda tensor, parameter: torch.ops.aten.add(parameter, tensor),
    "numpy": lambda tensor, _: tensor.numpy(),
    "numpy's own way": lambda tensor, _: np.asarray(tensor),
    "dlpack": lambda tensor, _: np.from_dlpack(tensor),
    "a number": lambda tensor, _: tensor[0, 0].item(),
    "a list": lambda tensor, _: tensor.tolist(),
    "its address": lambda tensor, _: tensor.data_ptr(),
    "its shape": lambda tensor, _: tensor.shape,
    "its dtype": lambda tensor, _: tensor.dtype,
    "its device": lambda tensor, _: tensor.to("cpu"),
    "detached": lambda tensor, _: tensor.detach(),
    "as a parameter": lambda tensor, parameter: parameter.data.copy_(
        torch.nn.Parameter(tensor, requires_grad=False)
    ),
    "as a module's": lambda tensor, _: setattr(
        torch.nn.Identity(), "weight", torch.nn.Parameter(tensor, requires_grad=False)
    ),
    "its text": lambda tensor, _: str(tensor),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_whatever_is_done_with_a_tensor_is_seen(read: Read) -> None:
    parameter = torch.nn.Parameter(torch.zeros(2, 3), requires_grad=False)
    watching = ReadWatch((name, torch.ones(2, 3)) for name in "abc")

    def load() -> None:
        for name, tensor in watching:
            if name == "b":
                read(tensor, parameter)
            tensor.shard_id = name  # type: ignore[attr-defined]  # as vLLM marks them, unread

    with watching:
        load()
    assert watching.untouched_names == {"a", "c"}


@pytest.mark.parametrize("read", [*READS.values(), assigned], ids=[*READS, "assigned"])
def test_a_tensor_that_is_not_here_can_be_passed_by_but_not_read(read: Read) -> None:
    parameter = torch.nn.Parameter(torch.zeros(2, 3), requires_grad=False)
    absent = AbsentTensor.stand_in_for("b", "F32", (2, 3))
    absent.shard_id = 1  # type: ignore[attr-defined]
    assert isinstance(absent, torch.Tensor)
    with pytest.raises((AbsentTensorRead, RuntimeError)) as caught:
        read(absent, parameter)
    if read is not assigned:  # which torch refuses by itself
        assert "'b'" in str(caught.value)
        assert "--gang-fetch all" in str(caught.value)
    assert not parameter.any()


def test_a_tensor_that_somebody_keeps_is_no_untouched_one() -> None:
    """A buffer, or any other name of it: no call is made for that."""
    module = torch.nn.Identity()
    watching = ReadWatch((name, torch.ones(2, 3)) for name in "abcde")
    with watching:
        found = dict(watching)
        module.register_buffer("kept", found["b"])
        module.scale = found["d"]
        del found
    assert watching.untouched_names == {"a", "c", "e"}


def test_tensors_that_lie_side_by_side_are_told_apart() -> None:
    """As in a slot: all are views of one memory, and those without elements share their place."""
    whole = torch.zeros(64)
    places = [("a", 0, 8), ("empty", 8, 8), ("b", 8, 16), ("none", 16, 16), ("c", 16, 17)]
    names = {name for name, *_ in places}

    def load(watching: ReadWatch, read: str) -> None:
        for name, tensor in watching:
            if name == read:
                tensor[-1:].clone()
        torch.zeros(8).add_(1)

    for read in ("a", "b", "c"):
        with ReadWatch((name, whole[begin:end]) for name, begin, end in places) as watching:
            load(watching, read)
        assert watching.untouched_names == names - {read}


def test_what_torch_has_compiled_is_watched_and_compiled_again_after() -> None:
    """A loader may call such a function, and torch refuses to compile the watching itself."""
    eager: list[bool] = []

    @torch.compile(backend="eager", fullgraph=True)
    def doubled(tensor: torch.Tensor) -> torch.Tensor:
        eager.append(not torch.compiler.is_compiling())
        return tensor * 2

    watching = ReadWatch((name, torch.ones(2)) for name in "ab")

    def load() -> None:
        for name, tensor in watching:
            if name == "a":
                assert doubled(tensor).sum() == 4

    with watching:
        load()
    assert watching.untouched_names == {"b"}
    assert eager == [True]
    assert doubled(torch.ones(3)).sum() == 6
    assert eager[1:] in ([], [False])


def test_a_note_that_cannot_be_written_fails_no_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ranks.note_unread(tmp_path, DESCRIBED, {"a"})
    before = sorted(each.name for each in tmp_path.iterdir())

    def full(file: Path, content: str) -> None:
        file.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    ranks.note_unread(tmp_path, DESCRIBED, {"b"})
    assert "No space left on device" in caplog.text
    assert sorted(each.name for each in tmp_path.iterdir()) == before, "no half of it"
    assert ranks.unread_by_all(tmp_path, [os.getpid()], ENTRIES) == {"a"}


def test_only_what_all_ranks_left_alone_is_unread(tmp_path: Path) -> None:
    own = os.getpid()
    assert ranks.unread_by_all(tmp_path, {own}, ENTRIES) == frozenset()
    ranks.note_unread(tmp_path, DESCRIBED, {"a", "b"})
    assert ranks.unread_by_all(tmp_path, {own}, ENTRIES) == {"a", "b"}
    assert ranks.unread_by_all(tmp_path, {own, 1}, ENTRIES) == frozenset(), "one has not told"
    (tmp_path / f"rank-{own}.json").rename(tmp_path / "rank-1.json")
    ranks.note_unread(tmp_path, DESCRIBED, {"b", "c"})
    assert ranks.unread_by_all(tmp_path, {own, 1}, ENTRIES) == {"b"}
    for said in ("", "{", "{}"):
        (tmp_path / "rank-1.json").write_text(said)
        assert ranks.unread_by_all(tmp_path, {own, 1}, ENTRIES) == frozenset()
    assert ranks.unread_by_all(tmp_path, (), ENTRIES) == frozenset(), "no ranks, no knowledge"


@pytest.mark.parametrize(
    "other",
    [
        ENTRIES[:2],
        (*ENTRIES, TensorEntry("lm_head.weight", TensorSpec("F32", (2, 3)))),
        (ENTRIES[1], ENTRIES[0], ENTRIES[2]),
        (*ENTRIES[:2], TensorEntry("c", TensorSpec("F32", (3, 2)))),
        (*ENTRIES[:2], TensorEntry("c", TensorSpec("BF16", (2, 3)))),
    ],
    ids=["fewer", "more", "another order", "another shape", "another dtype"],
)
def test_it_holds_for_just_these_tensors(tmp_path: Path, other: tuple[TensorEntry, ...]) -> None:
    ranks.note_unread(tmp_path, DESCRIBED, {"a"})
    assert ranks.unread_by_all(tmp_path, {os.getpid()}, ENTRIES) == {"a"}
    assert ranks.unread_by_all(tmp_path, {os.getpid()}, other) == frozenset()


# A slot that has a part of a version.


@pytest.fixture
def ticket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """What the head's ticket says, and a slot of this node that lacks `b`."""
    head, member = tmp_path / "head", tmp_path / "member"
    head.mkdir()
    member.mkdir()
    whole = MappedSink(ENTRIES, slots=head, slot=SLOT)
    part = MappedSink(ENTRIES, slots=member, slot=SLOT, skip={"b"})
    for sink, value in ((whole, 1.0), (part, 2.0)):
        for entry in ENTRIES:
            view = sink.allocate(entry)
            if view is not None:
                view[:] = np.full(6, value, np.float32).tobytes()
                view.release()
        sink.seal()
    monkeypatch.setenv(SLOTS_VARIABLE, str(member))
    yield json.loads(whole.make_ticket())
    rank_mappings.close_mappings({"slot": SLOT})
    whole.close()
    part.close()


def hold(ticket: Any) -> None:
    """Map it before it is loaded, as the head has all ranks do: with its own size."""
    rank_mappings.begin_mapping({"slot": SLOT}, ticket["size"], ("", ""))
    rank_mappings._mappings[0].wait_until_ready(10)
    assert rank_mappings.find_mapped({"slot": SLOT}) is not None


@pytest.mark.parametrize("ahead", [False, True], ids=["now", "ahead"])
def test_a_rank_gets_what_its_own_node_has(ticket: Any, *, ahead: bool) -> None:
    if ahead:
        hold(ticket)
    found = list(rank_mappings.read_tensors(ticket))
    assert [name for name, _ in found] == ["a", "b", "c"], "in their order"
    assert [float(tensor.sum()) for name, tensor in found if name != "b"] == [12.0, 12.0]
    with pytest.raises(AbsentTensorRead, match="'b'"):
        found[1][1].sum()
    assert rank_mappings.is_partial(ticket)


def test_a_slot_with_all_tensors_lacks_none(
    ticket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SLOTS_VARIABLE, str(tmp_path / "head"))
    assert not rank_mappings.is_partial(ticket)
    assert [float(tensor.sum()) for _, tensor in rank_mappings.read_tensors(ticket)] == [6.0] * 3


def test_a_slot_takes_no_room_for_what_does_not_come(tmp_path: Path) -> None:
    big = (TensorEntry("big", TensorSpec("U8", (1 << 20,))), ENTRIES[0])
    sink = MappedSink(big, slots=tmp_path, skip={"big"})
    assert sink.nbytes < 1024
    assert sink.allocate(big[0]) is None
    sink.close()
    nothing = MappedSink(big, slots=tmp_path, skip={"big", "a"})
    assert [nothing.allocate(each) for each in big] == [None, None]
    nothing.close()
