"""Tensors of a device into shared memory: what is told of is there, and nothing is written afterwards.

The device is a fake one: it writes nothing before it is waited for, and writes only locked memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import given as hypothesis_given
from hypothesis import settings
from hypothesis import strategies as st

from rollout_client.steering.plain_tensors import check_readable
from rollout_client.steering.pushing.push_tensors import given
from rollout_client.steering.pushing.shards.shard_writing import InMemory
from rollout_client.steering.pushing.stream_filling import Filling
from rollout_client.steering.pushing.tensor_copying import (
    AHEAD,
    DEVICE_PIECE_BYTES,
    PIECE_BYTES,
    PINNED_BYTES,
    REPORT_BYTES,
    Accelerator,
    Copier,
    accelerator_of,
    flat_bytes,
)
from rollout_client.steering.spool import spool_blocking
from rollout_common.transfer.layout import LayoutError
from rollout_common.transfer.memory.arena import Arena
from rollout_common.transfer.memory.page_locking import lock_pages
from rollout_common.transfer.memory.slot import Slot
from tests.support.unit.cuda_driver import Driver

SIZES = {
    "one-byte": 1,
    "one-piece": DEVICE_PIECE_BYTES,
    "more-pieces-than-are-ahead": (AHEAD + 2) * DEVICE_PIECE_BYTES + 3,
    "more-than-both-buffers": 2 * PINNED_BYTES + 5,
}


class Lazy(Accelerator):
    """A device with copies that happen when they are waited for, in their order."""

    def __init__(self, driver: Driver, *, lockable: bool = True) -> None:
        self.lockable = lockable
        self.settled = 0
        self.own: list[torch.Tensor] = []
        self.under_way: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._driver = driver

    def wait_for_queued_work(self) -> None:
        self.settled += 1

    def begin_copy(self, source: torch.Tensor, target: torch.Tensor) -> Callable[[], None]:
        assert self.settled, "whatever writes the tensor may still be under way"
        assert self._locked(target), "a device can't write this by itself"
        job = (source, target)
        self.under_way.append(job)

        def wait() -> None:
            while any(each is job for each in self.under_way):
                first, there = self.under_way.pop(0)
                there.copy_(first)

        return wait

    def _locked(self, target: torch.Tensor) -> bool:
        begin, end = target.data_ptr(), target.data_ptr() + target.numel()
        places = [*self._driver.locked.items(), *((t.data_ptr(), t.numel()) for t in self.own)]
        return any(first <= begin and end <= first + size for first, size in places)

    def allocate_pinned(self, nbytes: int) -> torch.Tensor:
        self.own.append(torch.empty(nbytes, dtype=torch.uint8))
        return self.own[-1]


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
def size() -> int:
    return SIZES["more-pieces-than-are-ahead"]


@pytest.fixture
def slot(driver: Driver, size: int) -> Iterator[Slot]:
    made = Slot(size, lambda begin, size: lock_pages(begin, size, driver=driver))
    yield made
    made.close()
    assert driver.locked == {}


def noise(nbytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8)


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("way", ["straight", "unlocked", "no-cuda"])
def test_what_is_told_of_is_there(driver: Driver, slot: Slot, size: int, way: str) -> None:
    device = Lazy(driver, lockable=way != "no-cuda")
    driver.error = 2 if way == "unlocked" else 0
    tensor, view, told = noise(size), slot.view_bytes(0, size), [0]
    there = torch.frombuffer(view, dtype=torch.uint8)

    def done(count: int) -> None:
        begin, told[0] = told[0], count
        assert torch.equal(there[begin:count], tensor[begin:count])

    Copier(lambda _: device).copy("a", tensor, view, done, slot.lock_pages)
    assert told == [size]
    assert device.under_way == []
    assert bool(device.own) == (way != "straight")


@pytest.mark.parametrize("way", ["straight", "through-buffers"])
@pytest.mark.parametrize("size", [SIZES["more-than-both-buffers"]])
def test_nothing_is_written_any_more_after_a_failure(
    driver: Driver, slot: Slot, size: int, way: str
) -> None:
    device = Lazy(driver)

    def done(count: int) -> None:
        raise RuntimeError("given up")

    page_locked = slot.lock_pages if way == "straight" else lambda: False
    with pytest.raises(RuntimeError, match="given up"):
        Copier(lambda _: device).copy("a", noise(size), slot.view_bytes(0, size), done, page_locked)
    assert device.under_way == []


def test_a_device_tensor_of_any_strides_comes_in_its_order(driver: Driver, slot: Slot) -> None:
    tensor = torch.randn(64, 48).t()
    copier = Copier(lambda _: Lazy(driver))
    view = slot.view_bytes(0, tensor.nbytes)
    copier.copy("a", tensor, view, lambda _: None, slot.lock_pages)
    assert bytes(view) == tensor.contiguous().numpy().tobytes()


@pytest.mark.parametrize(
    "tensor",
    [
        noise(REPORT_BYTES + PIECE_BYTES + 3),
        noise(1)[0],
        torch.randn(3000, 700).t(),
        torch.randn(7, 5, 3).permute(2, 0, 1),
        torch.randn(1).expand(600_000),
        torch.randn(2, 700_000)[:, ::2],
        torch.randn(5, dtype=torch.complex64).conj(),
    ],
    ids=["pieces", "number", "transposed", "permuted", "expanded", "steps", "conjugated"],
)
def test_what_lies_in_main_memory_is_copied_told_of_and_hashed_in_order(
    tensor: torch.Tensor,
) -> None:
    slot, told, running = Slot(tensor.nbytes), [0], xxhash.xxh3_128()
    view = slot.view_bytes(0, tensor.nbytes)
    flat = tensor.contiguous().resolve_conj().reshape(-1).view(torch.uint8)
    expected = flat.numpy().tobytes()

    def done(count: int) -> None:
        assert told[-1] < count
        assert view[told[-1] : count] == expected[told[-1] : count]
        told.append(count)

    Copier().copy("a", tensor, view, done, hashed=running.update)
    assert told[-1] == tensor.nbytes
    assert all(end - begin >= REPORT_BYTES for begin, end in pairwise(told[:-1]))
    assert running.digest() == xxhash.xxh3_128_digest(expected)
    view.release()
    slot.close()


def test_a_tensor_without_values_is_refused_by_name(slot: Slot) -> None:
    tensor = torch.empty(4, device="meta")
    assert accelerator_of(tensor) is None
    with pytest.raises(LayoutError, match="'a' has no plain values"):
        Copier().copy("a", tensor, slot.view_bytes(0, 16), lambda _: None, slot.lock_pages)


def freed(tensor: torch.Tensor, left: int = 0) -> torch.Tensor:
    tensor.untyped_storage().resize_(left)
    return tensor


@pytest.mark.parametrize(
    "tensor",
    [
        freed(torch.ones(16)),
        freed(torch.ones(4, 4).t()),
        freed(torch.ones(2, 16)[:, ::2]),
        freed(torch.ones(17)[1:], 67),
        freed(torch.nn.Parameter(torch.ones(16))),
        freed(torch.ones(8, dtype=torch.complex64).conj()),
        freed(torch.ones(4, 1).expand(4, 4), 15),
    ],
    ids=["whole", "transposed", "steps", "in-part", "parameter", "conjugated", "expanded"],
)
def test_a_tensor_whose_memory_was_freed_is_refused_by_name(
    driver: Driver, tensor: torch.Tensor
) -> None:
    slot, devices = Slot(64), iter((None, Lazy(driver)))
    for _ in range(2):
        copier = Copier(lambda _: next(devices))
        with pytest.raises(LayoutError, match="the memory of tensor 'a' was freed"):
            copier.copy("a", tensor, slot.view_bytes(0, 64), lambda _: None)
    slot.close()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(17)[1:],
        torch.ones(16, 2)[:, 1],
        torch.ones(1).expand(16),
        torch.ones(16, dtype=torch.complex64).conj().imag,
        freed(torch.ones(0)),
    ],
    ids=["the-last", "steps", "expanded", "negative", "empty"],
)
def test_a_tensor_whose_memory_is_there_is_not_refused(tensor: torch.Tensor) -> None:
    check_readable("a", tensor)


def test_a_stream_of_a_freed_tensor_is_refused_by_name() -> None:
    arena = Arena()
    filling = Filling(arena, None, Copier())
    filling.plan(None)
    with pytest.raises(LayoutError, match="the memory of tensor 'a' was freed"):
        filling.take("a", freed(torch.ones(300, 300)))
    filling.close()
    arena.close()


def test_a_shard_that_is_freed_or_not_the_one_of_its_placements_is_refused_by_name() -> None:
    """Before memory behind it is read."""
    written = bytearray(4 * 300 * 600)

    def told(*_: object) -> None:
        raise AssertionError("nothing is there")

    place = InMemory(lambda *_: memoryview(written), told, told, Copier())
    spec, columns = ("a", "F32", (300, 600)), ((0, 300), (0, 300))
    why = r"tensor 'a': this rank's shard is \[100, 300\], and by its placements it would be \[300"
    with pytest.raises(LayoutError, match=why):
        place.put(spec, torch.ones(300, 300)[:100], columns)
    with pytest.raises(LayoutError, match="the memory of tensor 'a' was freed"):
        place.put(spec, freed(torch.ones(300, 300)), columns)
    assert not any(written)


def test_a_tensor_that_only_acts_like_one_is_copied_by_torch() -> None:
    class Wrapped(torch.Tensor):
        """Has no memory of its own, as quantised tensors of other libraries."""

        held: torch.Tensor

        @staticmethod
        def __new__(cls, inner: torch.Tensor) -> Wrapped:
            made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
            made.held = inner
            return made

        @classmethod
        def __torch_dispatch__(  # type: ignore[override]
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            plain = [each.held if isinstance(each, Wrapped) else each for each in args]
            made = func(*plain, **(kwargs or {}))
            return cls(made) if isinstance(made, torch.Tensor) and made is not args[0] else made

    slot, inner = Slot(64), torch.randn(16)
    told: list[int] = []
    Copier().copy("a", Wrapped(inner), slot.view_bytes(0, 64), told.append)
    assert bytes(slot.view_bytes(0, 64)) == inner.numpy().tobytes()
    assert told == [64]
    slot.close()


def test_a_slot_is_locked_once_and_has_the_same_content_as_without_a_device(driver: Driver) -> None:
    """Locking takes as long as a copy: it is done for the first version that a slot holds."""
    asked = []

    def counted(begin: int, size: int) -> Callable[[], None] | None:
        asked.append(size)
        return lock_pages(begin, size, driver=driver)

    values = {"a": torch.randn(3, 5), "b": torch.randn(7).to(torch.bfloat16), "c": torch.empty(0)}
    hashes = set()
    arena = Arena(counted)
    for copier in (Copier(), *[Copier(lambda _: Lazy(driver))] * 5):
        found = given(values)
        filling = Filling(arena, None, copier)
        filling.plan(found.specs)
        for name, tensor in values.items():
            filling.take(name, tensor)
        filling.end()
        hashes.add(filling.root_hash)
        filling.close()
    assert len(hashes) == 1
    assert len(asked) == len(driver.locked) == 1
    arena.close()
    assert driver.locked == {}


def test_a_slot_that_is_given_up_stays_locked_until_nobody_writes_it(driver: Driver) -> None:
    slot = Slot(4096, lambda begin, size: lock_pages(begin, size, driver=driver))
    release = slot.lend_slot()
    assert slot.lock_pages()
    slot.close()
    assert list(driver.locked.values()) == [4096]
    release()
    release()
    assert driver.locked == {}


# Bytes in order.

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn, torch.uint8]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Any plain tensor: whole, empty, a number, a slice, transposed, expanded."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    count = torch.Size(shape).numel() + 3
    base = torch.randint(0, 2, (count * dtype.itemsize,), dtype=torch.uint8).view(dtype)
    skip = draw(st.integers(0, 3))
    made = base[skip : count - 3 + skip].view(shape)  # begins anywhere in its storage
    match draw(st.integers(0, 3)):
        case 1 if made.dim() > 1:
            made = made.transpose(0, -1)
        case 2 if made.dim() and made.shape[0] > 1:
            made = made[::2]
        case 3:
            made = made.unsqueeze(-1).expand(*made.shape, 3)
    return made


@settings(deadline=None)
@hypothesis_given(tensors())
def test_the_bytes_of_any_tensor_come_in_their_order(tensor: torch.Tensor) -> None:
    flat = flat_bytes("t", tensor)
    assert torch.equal(flat.view(tensor.dtype).reshape(tensor.shape).double(), tensor.double())
    assert (flat.dim(), flat.dtype) == (1, torch.uint8)


class Stubborn(torch.Tensor):
    """Answers nothing, as tensors that are sharded in older ways."""

    @classmethod
    def __torch_function__(cls, *_: Any) -> Any:
        raise RuntimeError("not supported for Stubborn\nand much more")


class Packed(torch.Tensor):
    """Says what it is, but has no bytes, as quantised tensors of other libraries."""

    @staticmethod
    def __new__(cls) -> Packed:
        return torch.Tensor._make_wrapper_subclass(cls, torch.Size([2, 2]), dtype=torch.float32)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"{cls.__name__} dispatch: {func}")


ODD = {
    "sparse": (lambda: torch.eye(2).to_sparse(), "no plain values .* dense tensor"),
    "rows": (lambda: torch.eye(2).to_sparse_csr(), "no plain values .* dense tensor"),
    "meta": (lambda: torch.empty(2, device="meta"), "no plain values .* dense tensor"),
    "wide": (lambda: torch.ones(2, dtype=torch.complex128), "complex128, which no worker takes"),
    "lazy": (torch.nn.parameter.UninitializedParameter, "is a UninitializedParameter, which can't"),
    "stubborn": (
        lambda: torch.randn(3).as_subclass(Stubborn),
        r"is a Stubborn, which can't be read as a plain tensor \(RuntimeError: not .* Stubborn\): give",
    ),
    "freed": (lambda: freed(torch.ones(16)), "the memory of tensor 'odd' was freed"),
    "nested": (
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        "is nested",
    ),
    "nothing": (lambda: None, "leave it out"),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("way", ["known", "stream", "cast", "files"])
@pytest.mark.parametrize(("odd", "why"), ODD.values(), ids=ODD)
def test_what_has_no_plain_values_is_refused_by_name_on_every_way(
    tmp_path: Path, odd: Callable[[], Any], why: str, way: str
) -> None:
    """Torch itself raises anything for these, without a name, or reads memory that is not there."""
    arena, state = Arena(), {"odd": odd()}
    filling = Filling(arena, None, Copier(), {"odd": "BF16"} if way == "cast" else None)

    def publish() -> None:
        if way == "files":
            spool_blocking(state, tmp_path / "1")
        filling.plan(given(state).specs if way == "known" else None)
        filling.take("odd", state["odd"])
        filling.end()

    with pytest.raises(LayoutError, match=why) as caught:
        publish()
    assert caught.value.tensor == "odd"
    filling.close()
    arena.close()
    assert not list(tmp_path.iterdir())


def test_a_subclass_without_bytes_is_refused_by_name() -> None:
    with pytest.raises(
        LayoutError, match=r"tensor 'odd' is a Packed, .*NotImplementedError: Packed"
    ):
        flat_bytes("odd", Packed())
