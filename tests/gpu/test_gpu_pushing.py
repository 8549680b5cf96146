"""Tensors of a real GPU into shared memory, and pages that CUDA locks; skipped where there is no GPU."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from rollout_client.steering.pushing.tensor_copying import Copier
from rollout_common.transfer.memory.page_locking import lock_pages
from rollout_common.transfer.memory.slot import Slot

NBYTES = 256 << 20
Record = Callable[[str, object], None]

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="torch finds no NVIDIA GPU here"
)


@pytest.fixture
def slot() -> Iterator[Slot]:
    made = Slot(NBYTES)
    yield made
    made.close()


def seconds(work: Callable[[], object]) -> float:
    """The best of three."""
    best = float("inf")
    for _ in range(3):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return best


@pytest.mark.parametrize("locked", [True, False])
def test_a_gpu_writes_shared_memory(slot: Slot, record_property: Record, *, locked: bool) -> None:
    """Straight, or through buffers; also what a stream still computes when it is asked for."""
    tensor = torch.zeros(NBYTES // 4, device="cuda")
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        for _ in range(20):
            tensor += 1
    there = torch.frombuffer(slot.view_bytes(0, NBYTES), dtype=torch.float32)
    told = []

    def done(count: int) -> None:
        told.append(count)
        assert bool((there[: count // 4] == 20).all())

    release = slot.lend_slot()
    page_locked = slot.lock_pages if locked else lambda: False
    copier = Copier()
    copier.copy("a", tensor, slot.view_bytes(0, NBYTES), done, page_locked)
    assert told[-1] == NBYTES
    assert slot.lock_pages() or not locked, "CUDA can't lock shared memory here: see the log"
    view = slot.view_bytes(0, NBYTES)
    took = seconds(lambda: copier.copy("a", tensor, view, lambda _: None, page_locked))
    pinned = torch.empty(NBYTES // 4, pin_memory=True)
    plain = seconds(lambda: pinned.copy_(tensor))
    record_property("GB/s, and of a copy to locked memory", (NBYTES / took / 1e9, plain / took))
    if locked:
        assert took < 2 * plain
    release()


def test_a_thread_without_a_context_unlocks() -> None:
    torch.zeros(1, device="cuda")
    memory = torch.zeros(NBYTES, dtype=torch.uint8)
    for _ in range(2):  # the second time only if the first one was undone
        unlock = lock_pages(memory.data_ptr(), NBYTES)
        assert unlock is not None
        thread = threading.Thread(target=unlock)
        thread.start()
        thread.join(60)
