"""The model's weights in memory: swapped for new ones, spilled to a file, dropped.

The engine never calls `WeightsMemory` while a step runs. New weights come in memory of their
own next to the serving ones (`open_sink`).
"""

from __future__ import annotations

import ctypes
import gc
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
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
from rollout_worker.engines.shared_memory.lent_reading import read_lent
from rollout_worker.engines.shared_memory.spill_file import SpillFile
from rollout_worker.engines.shared_memory.staging_budget import StagingBudget

from .borrowed import MappedTensorSink, TrainerTensorSink, WriteWatch, can_serve_from
from .buffers import (
    BOUNCE_NAME,
    DeviceAllocator,
    NamedSpec,
    TensorAllocation,
    TensorSink,
    allocate_host,
    bounce_bytes,
    tensor_nbytes,
)
from .loading import LoadedModel, fuse_tensors

NOT_UPDATABLE = (
    "transformers converts this model's tensors on loading, so the hf engine can neither update its "
    "weights nor load them again: use the vllm or sglang engine, or sleep at level 1"
)


class WeightsMemory:
    """The tensors of one model, wherever they are.

    `spill_weights` writes to `spill_dir`, None: the temporary folder. Memory of another version is charged to `staging`.
    `allocate_on_device` takes memory on the model's device; None: that is main memory.
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
        self._all: list[Tensor] = list(loaded.model.parameters())  # tied ones once
        self._spill_dir = spill_dir
        self._spill: SpillFile | None = None
        self._pinned: list[tuple[Tensor, Tensor]] = []
        self._active: list[tuple[Tensor, Tensor]] = []
        self._watch, self._pinned_watch = WriteWatch({}), WriteWatch({})
        self.resident = True

    @property
    def is_updatable(self) -> bool:
        """Whether other weights can replace these."""
        return bool(self._targets)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights that are in memory, those of pinned outputs included."""
        return sum(map(tensor_nbytes, (*self._all, *(tensor for _, tensor in self._pinned))))

    def open_sink(
        self,
        entries: Sequence[TensorEntry],
        given: GivenWeights | None = None,
        *,
        on_device: bool = True,
    ) -> TensorSink:
        """Return a sink for another version of the weights, with these tensors; blocks.

        Given tensors and memory serve as they are, where they can. Else all memory is taken at once, on the
        model's device if that may be used (`on_device`) and has enough next to the serving weights, else in
        main memory; tensors of another dtype or device pass through more main memory.

        Raises:
            WeightsRejected: this model's weights can't be updated.
            EngineError: there is not enough memory.
        """
        if not self.is_updatable:
            raise WeightsRejected(NOT_UPDATABLE)
        if isinstance(given, MappedWeights) and can_serve_from(entries, self._targets):
            return MappedTensorSink(entries, given, self._targets)
        if isinstance(given, TrainerTensors):
            allocate = partial(self._allocate_tensors, on_device=on_device)
            return TrainerTensorSink(entries, given, self._targets, allocate)
        specs: list[NamedSpec] = [
            (each.name, each.spec.shape, self._targets[each.name].dtype)
            for each in entries
            if each.name in self._targets
        ]
        allocation = self._allocate_tensors(specs, on_device=on_device)
        bounce = None
        if size := bounce_bytes(entries, allocation):
            # Page-locked if there is a GPU, which then reads it several times as fast.
            locked = self._allocate_on_device is not None
            whole = [(BOUNCE_NAME, (size,), torch.uint8)]
            try:
                bounce = allocate_host(whole, self._staging, off_device=locked)
            except EngineError:
                allocation.free()
                raise
        return TensorSink(allocation=allocation, bounce=bounce)

    def read_lent_tensors(self, ticket: Mapping[str, Any]) -> TensorSink:
        """Return a sink with the tensors that a trainer lends, on the model's device; blocks.

        Raises:
            WeightsRejected: These are not the model's tensors, or they can't be updated.
            EngineError: What came is damaged, or the trainer lends no more.
        """
        if not self.is_updatable:
            raise WeightsRejected(NOT_UPDATABLE)
        device = next(iter(self._targets.values())).device
        sink = TensorSink()
        try:
            for name, tensor in read_lent(ticket, device):
                if name in self._targets:
                    sink.tensors[name] = tensor.to(self._targets[name].dtype)
        except RuntimeError as error:  # out of memory is one, too
            sink.close()
            raise EngineError(str(error)) from error
        return sink

    def _allocate_tensors(self, specs: Sequence[NamedSpec], *, on_device: bool) -> TensorAllocation:
        self._staging.wait_until_freed()
        if self._allocate_on_device is not None and on_device:
            try:
                return TensorAllocation(self._allocate_on_device(specs), lambda: None)
            except torch.OutOfMemoryError:
                release_freed()
        return allocate_host(specs, self._staging, off_device=self._allocate_on_device is not None)

    def swap_weights(self, staged: TensorSink, *, pin: bool = False) -> None:
        """Make these tensors serve: by pointers alone, or by a copy if they are `off_device`.

        With `pin` the former ones stay for `use_weights` until `release_pinned`; they replace any that
        stayed before.

        Raises:
            EngineError: no memory for both, or the trainer's tensors were changed; the former ones serve on.
        """
        watch = staged.watch if isinstance(staged, TrainerTensorSink) else WriteWatch({})
        watch.check_unchanged()
        if pin:
            self._watch.check_unchanged()
        views = {id(self._targets[name]) for name in watch.names}
        self._exchange_tensors(staged.tensors, views, pin=pin, off_device=staged.off_device)
        former, self._watch = self._watch, watch
        watch.serving = True
        self._pinned_watch.release_tensors()
        if pin:
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
            # Another thread frees the former ones: no step may wait for that.
            former = self._pinned if pin else gone
            former.extend((target, target.data) for target, _ in pairs)
            _point_tensors(pairs)
        if gone:
            self.free_in_thread(gone.clear)

    def free_in_thread(self, free: Callable[[], object]) -> None:
        """Call `free` in a thread, once the engine steps again; the next claim of memory waits for it."""
        self._staging.freeing.free_soon(free)

    def release_memory(self) -> None:
        """Give dropped memory back to the system; waits a limited time for what a thread still frees."""
        self._staging.wait_until_freed()
        release_freed()

    def check_unchanged(self) -> None:
        """Raise `EngineError` if the trainer has changed a tensor since it handed it over."""
        self._watch.check_unchanged()
        self._pinned_watch.check_unchanged()

    @property
    def is_intact(self) -> bool:
        """Whether the serving weights are those that were committed."""
        return self._watch.changed_tensor() is None

    def _move_to_device(self, pairs: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        """Return the new weights on the model's device, next to the former."""
        assert self._allocate_on_device is not None, "only weights for a device can be off it"
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
        """Copy new weights over the serving ones, or to new memory where those are not ours to overwrite.

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
        """Write the weights to a file without a name, or raise `EngineError`; they stay in memory, too."""
        try:
            self._spill = SpillFile(self._spill_dir or Path(tempfile.gettempdir()), self._all)
        except OSError as error:
            raise EngineError(
                f"cannot spill the weights: {error}; free space there, "
                "set another spill_dir, or sleep at level 2"
            ) from error

    def drop_weights(self) -> None:
        """Drop the weights; `release_memory` gives their memory back."""
        for tensor in self._all:
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self._watch.release_tensors()
        self.resident = False

    def forget_spill(self) -> None:
        """Remove the spilled copy, if there is one."""
        if self._spill is not None:
            self._spill.close()
            self._spill = None

    @property
    def has_spill(self) -> bool:
        """Whether there is a spilled copy."""
        return self._spill is not None

    def restore_weights(self) -> None:
        """Read the spilled weights back, bit for bit, or raise `EngineError`."""
        if self._spill is None:
            raise EngineError("no weights were spilled: wake them from their source")
        try:
            read = zip(self._all, self._spill.read_tensors(), strict=True)
            tensors = [tensor.to(target.device) for target, tensor in read]
        except OSError as error:
            raise EngineError(f"the spilled weights cannot be read back: {error}") from error
        for target, tensor in zip(self._all, tensors, strict=True):
            target.data = tensor
        self.resident = True
        self.forget_spill()


def _point_tensors(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    for target, tensor in pairs:
        target.data = tensor


def release_freed() -> None:
    """Give freed memory back to the system, which allocators put off."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, musl has not
    if trim is not None:
        trim(0)
