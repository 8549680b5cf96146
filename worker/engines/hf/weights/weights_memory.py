"""The model's weights in memory: swapped for new ones, spilled to a file, dropped.

`Memory` never runs while a step runs; the engine sees to that. New weights come in buffers of their
own next to the serving ones (`open_sink`).
"""

from __future__ import annotations

import ctypes
import gc
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollout_worker.engine import (
    EngineError,
    GivenWeights,
    MappedWeights,
    TensorEntry,
    TrainerTensors,
    WeightsRejected,
)
from rollout_worker.engines.shared_memory.staging_budget import StagingBudget

from .allocations import DeviceAllocator, NamedSpec, TensorAllocation, allocate_host
from .borrowed import MappedTensorSink, TrainerTensorSink, WriteWatch, can_serve_from
from .buffers import BOUNCE_NAME, SpillFile, TensorSink, bounce_bytes, tensor_nbytes
from .fused import fuse_tensors
from .loading import LoadedModel

NOT_UPDATABLE = (
    "transformers converts this model's tensors on loading, so the hf engine can neither update its "
    "weights nor load them again: use the vllm or sglang engine, or sleep at level 1"
)


class WeightsMemory:
    """Holds the tensors of one model and what became of them.

    Args:
        loaded: The model.
        spill_dir: Where `spill` writes; None: the temporary folder.
        staging: What memory of another version is charged to.
        allocate_on_device: Takes memory on the model's device; None where that is main memory.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        spill_dir: Path | None,
        staging: StagingBudget,
        allocate_on_device: DeviceAllocator | None = None,
    ) -> None:
        self._targets, self._parts = loaded.targets, loaded.parts
        self._staging = staging
        self._allocate_on_device = allocate_on_device
        self._all = _distinct_tensors(loaded.model)
        self._spill_dir = spill_dir
        self._spill: SpillFile | None = None
        self._pinned: list[tuple[Tensor, Tensor]] = []
        self._active: list[tuple[Tensor, Tensor]] = []
        self._watch, self._pinned_watch = WriteWatch({}), WriteWatch({})
        self.resident = True

    @property
    def is_updatable(self) -> bool:
        """Whether other weights can be put in place of these."""
        return bool(self._targets)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights that are in memory, those of pinned outputs included."""
        return sum(map(tensor_nbytes, self._all)) + sum(
            tensor_nbytes(tensor) for _, tensor in self._pinned
        )

    def open_sink(
        self, entries: Sequence[TensorEntry], given: GivenWeights | None = None
    ) -> TensorSink:
        """Return buffers for another version of the weights, with these tensors; blocks.

        Tensors of this process and memory that is given serve as they are, where they can. Else all
        of the memory is taken at once, on the model's device if that has room next to the serving
        weights, else in main memory; so is what tensors of another dtype or device come through.

        Raises:
            WeightsRejected: this model's can't be put in place.
            EngineError: there is no room.
        """
        if not self.is_updatable:
            raise WeightsRejected(NOT_UPDATABLE)
        if isinstance(given, MappedWeights) and can_serve_from(entries, self._targets):
            return MappedTensorSink(entries, given, self._targets)
        if isinstance(given, TrainerTensors):
            return TrainerTensorSink(entries, given, self._targets, self._allocate_tensors)
        specs: list[NamedSpec] = [
            (each.name, each.spec.shape, self._targets[each.name].dtype)
            for each in entries
            if each.name in self._targets
        ]
        allocation = self._allocate_tensors(specs)
        try:
            return TensorSink(
                allocation=allocation,
                bounce=self._allocate_bounce(bounce_bytes(entries, allocation)),
            )
        except EngineError:
            allocation.free()
            raise

    def _allocate_tensors(self, specs: Sequence[NamedSpec]) -> TensorAllocation:
        self._staging.wait_until_freed()
        if self._allocate_on_device is not None:
            try:
                return TensorAllocation(self._allocate_on_device(specs), lambda: None)
            except torch.OutOfMemoryError:
                release_freed()
        return allocate_host(specs, self._staging, off_device=self._allocate_on_device is not None)

    def _allocate_bounce(self, size: int) -> TensorAllocation | None:
        """Take main memory, page-locked where there is a GPU, which reads it several times as fast."""
        whole = [(BOUNCE_NAME, (size,), torch.uint8)]
        locked = self._allocate_on_device is not None
        return allocate_host(whole, self._staging, off_device=locked) if size else None

    def swap_weights(self, staged: TensorSink, *, pin: bool = False) -> None:
        """Make these tensors the serving ones: pointers only, or a copy of what is `off_device`.

        With `pin` the former ones stay for `use` until `release_pinned`, in place of any kept
        before.

        Raises:
            EngineError: no room for both, or somebody's tensors were changed; the former ones serve on.
        """
        watch = staged.watch if isinstance(staged, TrainerTensorSink) else WriteWatch({})
        watch.check_unchanged()
        if pin:
            self._watch.check_unchanged()
        views = {id(self._targets[name]) for name in watch.names}
        self._exchange_tensors(staged.tensors, views, pin=pin, off_device=staged.off_device)
        former, self._watch = self._watch, watch
        watch.serving = True
        if pin:
            self._pinned_watch.release_tensors()
            self._pinned_watch = former
        else:
            former.release_tensors()
        self.resident = True

    def _exchange_tensors(
        self, tensors: Mapping[str, Tensor], views: Collection[int], *, pin: bool, off_device: bool
    ) -> None:
        whole = [name for name in self._targets if name not in self._parts]
        pairs = [(self._targets[name], tensors[name]) for name in whole]
        pairs += fuse_tensors(self._parts, tensors)
        for target, tensor in pairs:
            if target.dtype != tensor.dtype:
                raise RuntimeError("a staged tensor has another dtype than the model's")
        if off_device and pin:
            pairs = self._move_to_device(pairs)
        gone, self._pinned = self._pinned, []
        self._active = pairs if pin else []
        if off_device and not pin:
            self._copy_weights(pairs, views)
        else:
            # Nothing of the former ones is freed in this thread: no step may wait for that.
            former = self._pinned if pin else gone
            former.extend((target, target.data) for target, _ in pairs)
            _point_tensors(pairs)
        if gone:
            self.free_in_thread(gone.clear)

    def free_in_thread(self, free: Callable[[], object]) -> None:
        """Call this in a thread, once the engine steps again; who takes memory next waits for it."""
        self._staging.freeing.free_soon(free)

    def release_memory(self) -> None:
        """Return once what was let go of is the system's again, also what a thread still frees; not for ever."""
        self._staging.wait_until_freed()
        release_freed()

    def check_unchanged(self) -> None:
        """Refuse to compute with tensors of somebody else that were changed meanwhile.

        Raises:
            EngineError: names one, and the fix.
        """
        self._watch.check_unchanged()
        self._pinned_watch.check_unchanged()

    @property
    def is_intact(self) -> bool:
        """Whether the serving weights are what was committed."""
        return self._watch.changed_tensor() is None

    def _move_to_device(self, pairs: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        """Return the new ones on the model's device, next to the former."""
        assert self._allocate_on_device is not None, (
            "nothing is off the device where there is no device"
        )
        try:
            moved = self._allocate_on_device(
                [(str(n), t.shape, t.dtype) for n, (_, t) in enumerate(pairs)]
            )
        except torch.OutOfMemoryError as error:
            raise EngineError(
                "the GPU has no room for two versions of the weights, which Pin needs: set "
                "spec.weights.inFlight.policy to another one, or lower the engine's KV cache"
            ) from error
        for number, (_, tensor) in enumerate(pairs):
            moved[str(number)].copy_(tensor)
        return [(target, moved[str(number)]) for number, (target, _) in enumerate(pairs)]

    def _copy_weights(self, pairs: Iterable[tuple[Tensor, Tensor]], views: Collection[int]) -> None:
        """Copy new ones over the serving ones, or to where nothing of ours serves.

        `views`: ids of the targets whose new tensors serve as they are.
        """
        borrowed = {id(self._targets[name]) for name in self._watch.names}
        for target, tensor in pairs:
            if id(target) in views:
                target.data = tensor
            elif self.resident and id(target) not in borrowed:
                target.data.copy_(tensor)
            else:
                target.data = tensor.to(target.device, copy=True)

    def use_weights(self, *, pinned: bool) -> None:
        """Let the model compute with the pinned or the serving weights."""
        _point_tensors(self._pinned if pinned else self._active)

    def release_pinned(self) -> None:
        """Give the pinned weights back."""
        if self._pinned:
            gone, self._pinned, self._active = self._pinned, [], []
            self._pinned_watch.release_tensors()

            def free() -> None:
                gone.clear()
                release_freed()

            self.free_in_thread(free)

    def spill_weights(self) -> None:
        """Write the weights to a file without a name; they stay in memory until `drop`.

        Raises:
            EngineError: no room in the folder.
        """
        try:
            self._spill = SpillFile(self._spill_dir or Path(tempfile.gettempdir()), self._all)
        except OSError as error:
            raise EngineError(
                f"cannot spill the weights: {error}; free space there, "
                "set another spill_dir, or sleep at level 2"
            ) from error

    def drop_weights(self) -> None:
        """Let go of the weights; `give_back` gives their memory back."""
        for tensor in self._all:
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self._watch.release_tensors()
        self.resident = False

    def forget_spill(self) -> None:
        """Give up a spilled copy."""
        if self._spill is not None:
            self._spill.close()
            self._spill = None

    @property
    def has_spill(self) -> bool:
        """Whether there is a spilled copy."""
        return self._spill is not None

    def restore_weights(self) -> None:
        """Take the spilled weights back, bit for bit.

        Raises:
            EngineError: the file cannot be read back.
        """
        if self._spill is None:
            raise EngineError("no weights were spilled: wake them from their source")
        try:
            tensors = list(self._spill.read_tensors())
        except OSError as error:
            raise EngineError(f"the spilled weights cannot be read back: {error}") from error
        for target, tensor in zip(self._all, tensors, strict=True):
            target.data = tensor
        self.resident = True
        self.forget_spill()


def _point_tensors(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    for target, tensor in pairs:
        target.data = tensor


def _distinct_tensors(model: Any) -> list[Tensor]:
    """Return the tensors of a model, tied ones once."""
    return [parameter for _, parameter in model.named_parameters()]


def freeze_heap() -> None:
    """Take what is alive now out of every later collection: it stays for the engine's whole life.

    A collection stops all threads. Over the objects of torch and transformers it lasts a quarter of
    a second, over what came since some milliseconds. So it stays that way for the engines that
    follow in this process, unless one could not be freed without (`HfEngine.stop`).
    """
    gc.collect()
    gc.freeze()


def release_freed() -> None:
    """Make the process give freed memory back to the system, which allocators put off."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, musl has not
    if trim is not None:
        trim(0)
