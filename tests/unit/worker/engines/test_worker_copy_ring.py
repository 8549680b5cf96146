"""Copies through a rank's two buffers, for a device that copies as late as it may."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rollout_worker.engines.shared_memory import copy_plan, copy_ring
from rollout_worker.engines.shared_memory.copy_plan import (
    CopyList,
    RecordedCopy,
    StridedPart,
    TensorMemory,
    repeat_copies,
)
from rollout_worker.engines.shared_memory.copy_ring import CopyRing, TensorCopy, cut_copy, open_ring


class LateDevice:
    """Makes the copies that were begun only when one of its events is waited for."""

    def __init__(self) -> None:
        self.begun: list[tuple[Tensor, Tensor]] = []
        self.done = 0
        self.waits = 0

    def begin_copies(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        self.begun += zip(targets, sources, strict=True)

    def finish(self, count: int | None = None) -> None:
        for target, source in self.begun[self.done : count]:
            target.copy_(source)
        self.done = max(self.done, len(self.begun) if count is None else count)


class LateEvent:
    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self._count = 0

    def record(self) -> None:
        self._count = len(self._device.begun)

    def synchronize(self) -> None:
        self._device.waits += 1
        self._device.finish(self._count)


def ring_of(device: LateDevice, size: int, begin_copies: Any = None) -> CopyRing:
    buffers = [torch.full((size,), 85, dtype=torch.uint8) for _ in range(2)]
    events = [LateEvent(device) for _ in buffers]
    return CopyRing(buffers, events, begin_copies or device.begin_copies)


def copy_now(ring: CopyRing, device: LateDevice, copies: Iterable[TensorCopy]) -> None:
    ring.copy_tensors(copies)
    device.finish()


DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.float8_e4m3fn]
MEMORY = torch.randint(0, 120, (4096,), generator=torch.Generator().manual_seed(1)).byte()
"""Bytes of a version; no dtype has a number in them that is none."""
Copy = tuple[torch.dtype, torch.dtype, tuple[int, ...], StridedPart, StridedPart]


@st.composite
def parts(draw: st.DrawFn, shape: tuple[int, ...], *, writable: bool) -> StridedPart:
    """A part of memory: dense in any order of its dimensions, with gaps, or (if only read) repeating itself."""
    order = draw(st.permutations(range(len(shape))))
    strides, step = [0] * len(shape), 1
    for dim in order:
        strides[dim] = 0 if not writable and draw(st.integers(0, 9)) == 0 else step
        step *= shape[dim] + draw(st.sampled_from([0, 0, 0, 1]))
    return StridedPart(draw(st.integers(0, 64)), shape, tuple(strides))


@st.composite
def plans(draw: st.DrawFn) -> list[Copy]:
    made = []
    for _ in range(draw(st.integers(1, 6))):
        shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
        read, written = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(DTYPES))
        source = draw(parts(shape[draw(st.integers(0, 1)) :], writable=False))  # may be broadcast
        made.append((read, written, shape, source, draw(parts(shape, writable=True))))
    return made


def copies_of(plan: Sequence[Copy]) -> tuple[Tensor, list[TensorCopy]]:
    """Memory for the targets, which may overlap, and the copies of a plan into it."""
    written = torch.zeros(4096, dtype=torch.uint8)
    return written, [
        TensorCopy(str(n), to.view_of(written.view(into)), part.view_of(MEMORY.view(of)))
        for n, (of, into, _, part, to) in enumerate(plan)
    ]


@given(plans(), st.sampled_from([16, 64, 100, 256, 4096]))
def test_any_plan_makes_what_direct_copies_make(plan: Sequence[Copy], size: int) -> None:
    wanted, direct = copies_of(plan)
    torch._foreach_copy_([each.target for each in direct], [each.source for each in direct])
    device = LateDevice()
    ring = ring_of(device, size)
    for _ in range(2):  # the second time from where the first one has left the ring
        found, copies = copies_of(plan)
        copy_now(ring, device, copies)
        assert torch.equal(found, wanted)


def test_a_buffer_is_filled_again_only_when_the_device_has_read_it() -> None:
    device = LateDevice()
    ring = ring_of(device, 64)
    sources = [torch.full((16,), float(n)) for n in range(10)]
    targets = [torch.zeros(16) for _ in sources]
    for n, (target, source) in enumerate(zip(targets, sources, strict=True)):
        ring.copy_tensors([TensorCopy("a", target, source)])
        assert len(device.begun) == n + 1, "it is begun at once"
        assert device.done == max(0, n - 1), "two are under way"
    device.finish()
    assert all(map(torch.equal, targets, sources))


def test_small_copies_share_a_buffer() -> None:
    device = LateDevice()
    ring = ring_of(device, 4096)
    for _ in range(16):
        ring.copy_tensors([TensorCopy("a", torch.zeros(16), torch.ones(16))])
    assert device.waits == 0


@pytest.mark.parametrize(
    ("target", "source", "sizes"),
    [
        (torch.zeros(100), torch.ones(100), [32, 32, 32, 4]),
        (torch.zeros(10, 10), torch.ones(10, 10), [32, 32, 32, 4]),
        (torch.zeros(10, 10), torch.ones(10, 10).t(), [30, 30, 30, 10]),
        (torch.zeros(2, 3, 20), torch.ones(2, 20, 3).transpose(1, 2), [20] * 6),
        (torch.zeros(4, 100), torch.ones(100, 4).t(), [32, 32, 32, 4] * 4),
        (torch.zeros(0, 100), torch.ones(0, 100), []),
    ],
    ids=["flat", "contiguous", "strided", "third dimension", "a row too large", "empty"],
)
def test_a_copy_that_is_too_large_is_cut(target: Tensor, source: Tensor, sizes: list[int]) -> None:
    found = list(cut_copy(TensorCopy("a", target, source), 128))
    assert [each.source.numel() for each in found] == sizes
    for each in found:
        each.target.copy_(each.source)
    assert bool((target == 1).all())


class Reading(Tensor):
    """A tensor that takes a while to be read, and notes that it was."""

    read: list[str]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.copy_:
            time.sleep(0.2)
            args[1].read.append("read")
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]


def test_a_tensor_that_cannot_be_read_is_named_once_no_thread_writes_any_more() -> None:
    device = LateDevice()
    ring = ring_of(device, 4096)
    slow: Any = torch.ones(16).as_subclass(Reading)
    slow.read = []
    absent = torch.empty(16, device="meta")
    target = torch.zeros(16)
    with pytest.raises(RuntimeError, match=r"tensor 'model.norm' can't be read: .*meta"):
        ring.copy_tensors(
            [TensorCopy("model.norm", torch.zeros(16), absent), TensorCopy("slow", target, slow)]
        )
    assert slow.read == ["read"]
    assert not device.begun, "nothing of it goes to the device"
    copy_now(ring, device, [TensorCopy("next", target, torch.full((16,), 2.0))])
    assert bool((target == 2).all())


def test_a_buffer_is_safe_after_a_device_has_failed_half_way() -> None:
    device, wrong = LateDevice(), [True]

    def begin_copies(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        device.begin_copies(targets, sources)
        if wrong:
            raise RuntimeError(f"CUDA error {wrong.pop()}")

    ring = ring_of(device, 64, begin_copies)
    targets = [torch.zeros(16) for _ in range(3)]
    copies = [TensorCopy("a", t, torch.full((16,), n + 1.0)) for n, t in enumerate(targets)]
    with pytest.raises(RuntimeError, match="CUDA error"):
        ring.copy_tensors(copies[:1])
    copy_now(ring, device, copies[1:])
    assert [float(each[0]) for each in targets] == [1, 2, 3]


@pytest.mark.parametrize("made", [False, True], ids=["made outside", "made inside"])
def test_engines_load_in_inference_mode(*, made: bool) -> None:
    """In which torch refuses other threads to write to what was made there."""
    device = LateDevice()
    with torch.inference_mode(mode=made):
        ring = ring_of(device, 4096)
    for mode in (True, False):
        with torch.inference_mode(mode=mode):
            targets = [torch.zeros(8) for _ in range(3)]
            sources = [torch.ones(16)[4:12] for _ in targets]
            copy_now(ring, device, map(TensorCopy, "abc", targets, sources))
            assert all(map(torch.equal, targets, sources))


def test_copies_to_a_device_that_has_a_ring_go_through_it(monkeypatch: pytest.MonkeyPatch) -> None:
    device = LateDevice()
    ring = ring_of(device, 64)
    asked = []

    def found(where: torch.device, nbytes: int) -> CopyRing:
        asked.append((where.type, nbytes))
        return ring

    monkeypatch.setattr(copy_plan, "open_ring", found)
    memory = TensorMemory(MEMORY, {"a": 128}, [["a", "F32", [8, 8]]])
    parameters = {"p": torch.nn.Parameter(torch.zeros(4, 8), requires_grad=False)}
    part, top = StridedPart(4, (3, 4), (8, 1)), StridedPart(0, (3, 4), (8, 1))
    rest = StridedPart(24, (8,), (1,))
    copies = [RecordedCopy("p", top, "a", part), RecordedCopy("p", rest, "", part, 7.0)]
    repeat_copies(CopyList(copies), parameters, memory)
    device.finish()
    wanted = MEMORY[128:384].view(torch.float32).view(8, 8)
    assert torch.equal(parameters["p"][:3, :4], wanted[:3, 4:])
    assert parameters["p"][3].tolist() == [7.0] * 8
    assert asked == [("cpu", 4096)]


@pytest.mark.parametrize(
    ("processors", "gpus", "threads"), [(2, 1, 4), (16, 1, 12), (64, 8, 8), (224, 8, 12), (8, 0, 8)]
)
def test_threads_are_the_gpus_share_of_the_processors(
    processors: int, gpus: int, threads: int
) -> None:
    assert copy_ring.gather_thread_count(processors, gpus) == threads


def test_main_memory_needs_no_ring() -> None:
    assert open_ring(torch.device("cpu"), 1 << 30) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="memory can be locked here")
def test_without_memory_that_can_be_locked_there_is_no_ring(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(copy_ring, "_rings", {})
    for _ in range(2):
        assert open_ring(torch.device("cuda"), 1000) is None
    assert [each.message.partition(":")[0] for each in caplog.records] == [
        "2000 bytes can't be page-locked, so commits copy weights to the GPU more slowly"
    ]
