"""A rank's share of a version to the GPU: through its ring, from a version whose pages are locked, and from neither.

    PYTHONPATH=hack:src python -m gpu_smoke.ring_speed [MIB]

Prints seconds as JSON. The share is what one of two ranks takes of each tensor: half of its rows, or half of each row,
which is strided.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import torch

from rollout_common.transfer.memory.slot import Slot
from rollout_worker.engines.shared_memory.copy_ring import CopyRing, TensorCopy, open_ring

ROWS, COLUMNS = 4096, 8192
TENSOR_BYTES = ROWS * COLUMNS * 2
VERSION_MIB = 1024
"""Small enough for what an engine leaves free on its GPU."""
ROUNDS = 3


@dataclass(frozen=True, slots=True)
class WaySeconds:
    """What copies of a share take, the best of some rounds: half of the rows, half of the columns."""

    rows: float
    columns: float


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds. `nbytes`: of the version; a share is half. `making`: the ring. `locking`: the version."""

    nbytes: int
    making: float
    locking: float
    ring: WaySeconds
    locked: WaySeconds
    plain: WaySeconds


@dataclass(frozen=True, slots=True)
class TargetDevice:
    """Where shares are copied to. `settle` waits for it, `lock` locks a version's pages if it can."""

    device: torch.device
    make_ring: Callable[[], CopyRing | None]
    settle: Callable[[], object]
    lock: Callable[[Slot], bool]

    def time_work(self, work: Callable[[], object]) -> float:
        """Return the seconds until the device has done this."""
        self.settle()
        began = time.perf_counter()
        work()
        self.settle()
        return time.perf_counter() - began


class Share:
    """Parts of a version's tensors, and the same parts on a device."""

    def __init__(self, sources: list[torch.Tensor], on: TargetDevice) -> None:
        self._on, self._sources = on, sources
        self._targets = [torch.zeros(s.shape, dtype=s.dtype, device=on.device) for s in sources]

    def time_directly(self, *, locked: bool) -> float:
        """Return the seconds that direct copies take."""
        work = partial(torch._foreach_copy_, self._targets, self._sources, non_blocking=locked)
        return min(self._on.time_work(work) for _ in range(ROUNDS))

    def time_ring(self, ring: CopyRing) -> float:
        """Return the seconds that copies through a ring take.

        Raises:
            RuntimeError: They make something else.
        """
        for each in self._targets:
            each.zero_()
        ends = zip(self._targets, self._sources, strict=True)
        copies = [TensorCopy("share", *each) for each in ends]
        best = min(self._on.time_work(lambda: ring.copy_tensors(copies)) for _ in range(ROUNDS))
        if not all(torch.equal(each.target.cpu(), each.source) for each in copies):
            raise RuntimeError("what the ring copied is not the version")
        return best


def measure_ways(nbytes: int, on: TargetDevice) -> Measured:
    """Measure copies of the halves of a version of `nbytes` bytes, a multiple of `TENSOR_BYTES`.

    Raises:
        RuntimeError: The ring's copies differ from the version, or nothing can be locked.
    """
    slot = Slot(nbytes)
    release = slot.lend_slot()
    whole = torch.frombuffer(slot.view_bytes(0, nbytes), dtype=torch.int16).random_()
    tensors = whole.view(-1, ROWS, COLUMNS)
    rows = Share([each[: ROWS // 2] for each in tensors], on)
    columns = Share([each[:, COLUMNS // 2 :] for each in tensors], on)
    plain = WaySeconds(rows.time_directly(locked=False), columns.time_directly(locked=False))
    rings: list[CopyRing | None] = []
    making = on.time_work(lambda: rings.append(on.make_ring()))
    done: list[bool] = []
    if rings[0] is None:
        raise RuntimeError("no memory can be locked for a ring")
    ring = WaySeconds(rows.time_ring(rings[0]), columns.time_ring(rings[0]))
    locking = on.time_work(lambda: done.append(on.lock(slot)))
    if not done[0]:
        raise RuntimeError("a version in shared memory can't be locked")
    locked = WaySeconds(rows.time_directly(locked=True), columns.time_directly(locked=True))
    release()
    slot.close()
    return Measured(nbytes, making, locking, ring, locked, plain)


def measure_gpu(mib: int) -> Measured:
    """Measure the GPU that is the first here, by as many of torch's threads as engines leave it."""
    torch.set_num_threads(1)
    device = torch.zeros(1, device="cuda").device
    make_ring = partial(open_ring, device, mib << 20)
    return measure_ways(
        mib << 20, TargetDevice(device, make_ring, torch.cuda.synchronize, Slot.lock_pages)
    )


if __name__ == "__main__":
    result = measure_gpu(int(sys.argv[1]) if len(sys.argv) > 1 else VERSION_MIB)
    sys.stdout.write(json.dumps(asdict(result)) + "\n")
