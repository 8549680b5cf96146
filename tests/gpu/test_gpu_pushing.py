"""Tensors of a real GPU into shared memory, and pages that CUDA locks; skipped where there is no GPU."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from rollout_client.steering.pushing.copying import Copier
from rollout_common.transfer.arena import Slot
from rollout_common.transfer.locked import lock
from rollout_worker.engine import TensorEntry, TensorSpec
from rollout_worker.engines.shared_memory.rank_mappings import RankMapping
from rollout_worker.engines.shared_memory.sinks import MappedSink

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
    there = torch.frombuffer(slot.bytes(0, NBYTES), dtype=torch.float32)
    told = []

    def done(count: int) -> None:
        told.append(count)
        assert bool((there[: count // 4] == 20).all())

    release = slot.lend()
    page_locked = slot.page_locked if locked else lambda: False
    copier = Copier()
    copier.copy("a", tensor, slot.bytes(0, NBYTES), done, page_locked)
    assert told[-1] == NBYTES
    assert slot.page_locked() or not locked, "CUDA can't lock shared memory here: see the log"
    view = slot.bytes(0, NBYTES)
    took = seconds(lambda: copier.copy("a", tensor, view, lambda _: None, page_locked))
    pinned = torch.empty(NBYTES // 4, pin_memory=True)
    plain = seconds(lambda: pinned.copy_(tensor))
    record_property("GB/s, and of a copy to locked memory", (NBYTES / took / 1e9, plain / took))
    if locked:
        assert took < 2 * plain
    release()


def held(path: str, *, lent: bool) -> RankMapping:
    torch.zeros(1, device="cuda")  # what gives this thread a context
    made = RankMapping(path, NBYTES, ("", ""), borrowed=lent, gpu=True)
    made.wait_until_ready(60)
    assert made.is_ready
    return made


def rate(found: RankMapping) -> float:
    """Bytes a second into the GPU."""
    [(_, tensor)] = found.read_views([("a", "U8", (NBYTES,), 0)])
    there = torch.empty_like(tensor, device="cuda")
    return NBYTES / seconds(lambda: there.copy_(tensor))


def test_a_rank_locks_memory_of_its_own_worker(record_property: Record) -> None:
    sink = MappedSink([TensorEntry("a", TensorSpec("U8", (NBYTES,)))])
    found = held(sink.path, lent=False)
    assert found.is_locked, "CUDA can't lock memory without a name here: see the log"
    record_property("GB/s", rate(found) / 1e9)
    found.close()
    for thread in found.closing:
        thread.join(60)
    sink.close()


def test_a_rank_reads_memory_that_a_trainer_lends(slot: Slot, record_property: Record) -> None:
    """It can be mapped to be read only; where CUDA can't lock it so, it is read unlocked."""
    slot.bytes(0, 8)[:] = b"12345678"
    found = held(f"/proc/self/fd/{slot.handle}", lent=True)
    assert found.whole[:8].numpy().tobytes() == b"12345678"
    record_property("locked, GB/s", (found.is_locked, rate(found) / 1e9))
    found.close()
    for thread in found.closing:
        thread.join(60)


def test_a_thread_without_a_context_unlocks() -> None:
    torch.zeros(1, device="cuda")
    memory = torch.zeros(NBYTES, dtype=torch.uint8)
    for _ in range(2):  # the second time only if the first one was undone
        unlock = lock(memory.data_ptr(), NBYTES)
        assert unlock is not None
        thread = threading.Thread(target=unlock)
        thread.start()
        thread.join(60)
