"""Copies of a load that are recorded once and repeated at every further commit.

An engine finds out at each load where every tensor goes, in Python, one tensor after the other, while requests stand
still. What it finds is always the same. So the first load of a version in a rank is watched: each copy from a tensor's
bytes into a parameter is noted, and later loads only repeat these copies. A loader that does anything else with the
bytes, or with what they were copied into, can't be recorded.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from . import rank_mappings
from .copy_ring import TensorCopy, open_ring
from .tensor_views import TORCH_DTYPES

aten = torch.ops.aten

TensorRows = list[list[Any]]
"""Name, dtype as safetensors call it, and shape of every tensor of a version."""


class NotRecordable(Exception):
    """The load does more than copy; the text says what."""


COPYING_METHODS = frozenset(
    {"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod"}
)
"""The methods of a layer, as vLLM and SGLang call them, whose loaders only copy; others may count shards, or note scales."""


def check_method(layer: Any) -> None:
    """Refuse a layer whose loaders may do more than copy.

    Raises:
        NotRecordable: Its method is not one of `COPYING_METHODS`.
    """
    method = getattr(layer, "quant_method", None)
    if method is not None and type(method).__name__ not in COPYING_METHODS:
        raise NotRecordable(f"{type(method).__name__} may do more than copy")


class StridedPart(NamedTuple):
    """A part of a tensor: where it begins, counted in elements, its size and strides."""

    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def view_of(self, tensor: Tensor) -> Tensor:
        """Return this part of a tensor, as a view."""
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset)


class RecordedCopy(NamedTuple):
    """One copy of a load.

    Attributes:
        parameter: Name of what is written.
        target: The part of it.
        tensor: Name in the checkpoint; empty where a constant is written.
        source: The part of that tensor.
        value: The constant.
    """

    parameter: str
    target: StridedPart
    tensor: str
    source: StridedPart
    value: float = 0.0


_NOTHING = StridedPart(0, (), ())


class SourceIndex:
    """The checkpoint's tensors by their addresses. It keeps them, so that nothing else comes to lie there."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._tensors: list[tuple[str, Tensor]] = []

    def track_tensors(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Pass tensors on, and know them from then on."""
        for name, tensor in tensors:
            if type(tensor) is Tensor and tensor.numel():
                at = bisect.bisect(self._starts, tensor.data_ptr())
                self._starts.insert(at, tensor.data_ptr())
                self._tensors.insert(at, (name, tensor))
            yield name, tensor

    def find_source(self, part: object) -> tuple[str, StridedPart] | None:
        """Return the tensor that this is a part of, and which part; None: it is none of them."""
        if not isinstance(part, Tensor) or part.device.type != "cpu" or not part.numel():
            return None
        at = bisect.bisect(self._starts, part.data_ptr()) - 1
        if at < 0:
            return None
        name, whole = self._tensors[at]
        ahead = part.data_ptr() - whole.data_ptr()
        if ahead >= whole.nbytes or part.dtype != whole.dtype:
            return None
        return name, StridedPart(ahead // whole.itemsize, tuple(part.shape), part.stride())

    def by_name(self) -> dict[str, Tensor]:
        """Return the tensors by their names."""
        return dict(self._tensors)


class CopyRecorder(TorchDispatchMode):
    """Notes the copies into parameters while loaders run in its block.

    Args:
        sources: The checkpoint's tensors.
        parameters: What the loaders fill, by name.
    """

    def __init__(self, sources: SourceIndex, parameters: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.copies: list[RecordedCopy] = []
        self._sources = sources
        self._parameters = parameters
        self._by_storage = {
            tensor.untyped_storage().data_ptr(): (name, tensor)
            for name, tensor in parameters.items()
            if tensor.numel()
        }

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Note what one call of torch's does, then do it.

        Raises:
            NotRecordable: It is not a copy from a checkpoint's tensor.
        """
        declared = func._schema.arguments
        written = [
            arg
            for arg, each in zip(args, declared, strict=False)
            if isinstance(arg, Tensor) and each.alias_info and each.alias_info.is_write
        ]
        if written:
            self._note_write(func, args, written)
        elif not func.is_view:
            self._check_read(func, (*args, *(kwargs or {}).values()))
        return func(*args, **(kwargs or {}))

    def _check_read(self, func: Any, args: Sequence[Any]) -> None:
        for arg in args:
            for each in arg if isinstance(arg, list | tuple) else (arg,):
                if self._sources.find_source(each) is not None or self._find_target(each):
                    raise NotRecordable(f"a loader computes with {func}")

    def _note_write(self, func: Any, args: Sequence[Any], written: Sequence[Tensor]) -> None:
        targets = [self._find_target(tensor) for tensor in written]
        if len(targets) == 1 and targets[0] is not None:
            self._note_copy(func, args, *targets[0])
        elif any(targets) or any(map(self._sources.find_source, written)):
            raise NotRecordable(f"a loader writes by {func}")
        else:  # a loader's own scratch memory
            self._check_read(func, args)

    def _note_copy(self, func: Any, args: Sequence[Any], name: str, target: StridedPart) -> None:
        if func is aten.copy_.default and (source := self._sources.find_source(args[1])):
            self.copies.append(RecordedCopy(name, target, *source))
        elif func in (aten.fill_.Scalar, aten.zero_.default):
            value = float(args[1]) if func is aten.fill_.Scalar else 0.0
            self.copies.append(RecordedCopy(name, target, "", _NOTHING, value))
        else:
            raise NotRecordable(f"a loader fills {name} by {func}")

    def _find_target(self, tensor: object) -> tuple[str, StridedPart] | None:
        if not isinstance(tensor, Tensor) or not tensor.numel() or tensor.is_meta:
            return None
        found = self._by_storage.get(tensor.untyped_storage().data_ptr())
        if found is None:
            return None
        name, whole = found
        offset = int(tensor.storage_offset() - whole.storage_offset())
        return name, StridedPart(offset, tuple(tensor.shape), tensor.stride())

    def check_copies(self) -> None:
        """Prove that the copies make what was loaded.

        Raises:
            NotRecordable: They don't.
        """
        tensors = self._sources.by_name()
        for copy in self.copies:
            made = copy.target.view_of(self._parameters[copy.parameter])
            wanted = torch.empty_like(made)
            if copy.tensor:
                wanted.copy_(copy.source.view_of(tensors[copy.tensor]))
            else:
                wanted.fill_(copy.value)
            if not have_same_bytes(made, wanted):
                raise NotRecordable(f"{copy.parameter} is not what was copied into it")


class TensorMemory:
    """The bytes of a version in this process.

    Args:
        whole: All of them ([n] uint8).
        starts: By name of a tensor: where it begins.
        rows: What they are.
    """

    def __init__(self, whole: Tensor, starts: Mapping[str, int], rows: TensorRows) -> None:
        self.nbytes = whole.numel()
        self.starts = starts
        self._dtypes = {name: TORCH_DTYPES[dtype] for name, dtype, _ in rows}
        self._typed = {
            dtype: whole[: whole.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
            for dtype in set(self._dtypes.values())
        }

    def has_tensors(self, names: Collection[str]) -> bool:
        """Whether they are all here, each where a view of its dtype may begin."""
        return all(
            name in self.starts and self.starts[name] % self._dtypes[name].itemsize == 0
            for name in names
        )

    def view_part(self, name: str, part: StridedPart) -> Tensor:
        """Return a part of a tensor."""
        offset = self.first_element(name) + part.offset
        return self._typed[self._dtypes[name]].as_strided(part.size, part.stride, offset)

    def first_element(self, name: str) -> int:
        """Return where a tensor begins, counted in elements of its dtype."""
        return self.starts[name] // self._dtypes[name].itemsize

    def dtype_of(self, name: str) -> torch.dtype:
        """Return a tensor's dtype."""
        return self._dtypes[name]


def open_tensor_memory(sink: Mapping[str, Any], rows: TensorRows) -> TensorMemory:
    """Return the bytes of a sink.

    Args:
        sink: What its `MappedSink.make_ticket` says.
        rows: Its tensors.
    """
    whole, starts = rank_mappings.open_memory(sink)
    return TensorMemory(whole, starts, rows)


def source_names(copies: Iterable[RecordedCopy]) -> set[str]:
    """Return the tensors that copies read."""
    return {copy.tensor for copy in copies if copy.tensor}


class CopyList:
    """Recorded copies, as few as do the same.

    A loader fills a parameter expert by expert. These parts mostly lie as far apart from each other in the parameter as
    their tensors do in a version, so one copy of one more dimension makes many of them. What a copy costs in addition to its
    bytes is most of what it costs with small experts.

    Args:
        copies: In the order of the load. Each makes what it was checked to make, in whatever order they are repeated.
    """

    def __init__(self, copies: Sequence[RecordedCopy]) -> None:
        self.recorded = copies
        self._names = sorted(source_names(copies))
        self._starts: list[int] = []
        self._merged: list[RecordedCopy] = []

    def merged_for(self, memory: TensorMemory) -> list[RecordedCopy]:
        """Return copies that do the same with a version's bytes; where its tensors begin is compared with the last version."""
        starts = [memory.starts[name] for name in self._names]
        if starts != self._starts or not self._merged:
            self._starts, self._merged = starts, merge_copies(self.recorded, memory)
        return self._merged


def merge_copies(copies: Sequence[RecordedCopy], memory: TensorMemory) -> list[RecordedCopy]:
    """Return copies of one more dimension for those that lie in one distance from each other, at both ends."""
    alike: dict[object, list[tuple[int, int, RecordedCopy]]] = {}
    merged = []
    for copy in copies:
        if not copy.tensor:
            merged.append(copy)
            continue
        target, source = copy.target, copy.source
        begin = memory.first_element(copy.tensor) + source.offset
        shape = (copy.parameter, *target[1:], *source[1:], memory.dtype_of(copy.tensor))
        alike.setdefault(shape, []).append((target.offset, begin, copy))
    for found in alike.values():
        found.sort(key=lambda each: each[:2])
        merged += _merge_runs(found)
    return merged


def _merge_runs(found: Sequence[tuple[int, int, RecordedCopy]]) -> Iterator[RecordedCopy]:
    """Merge copies of one shape; each comes with where its ends begin, which are in order."""
    first = 0
    while first < len(found):
        past, step = first + 1, None
        while past < len(found):
            next_step = tuple(
                now - last for now, last in zip(found[past][:2], found[past - 1][:2], strict=True)
            )
            if step is None and min(next_step) > 0:
                step = next_step
            if next_step != step:
                break
            past += 1
        copy, count = found[first][2], past - first
        if step is None:
            yield copy
        else:
            target, source = (
                StridedPart(part.offset, (count, *part.size), (apart, *part.stride))
                for part, apart in zip((copy.target, copy.source), step, strict=True)
            )
            yield copy._replace(target=target, source=source)
        first = past


def repeat_copies(copies: CopyList, parameters: Mapping[str, Tensor], memory: TensorMemory) -> None:
    """Repeat recorded copies with another version's bytes; a device may still be copying when this returns."""
    make_copies(resolve_copies(copies, parameters, memory), memory)


def resolve_copies(
    copies: CopyList, parameters: Mapping[str, Tensor], memory: TensorMemory
) -> list[TensorCopy]:
    """Return the copies that repeat recorded ones; what is filled with one value is filled at once."""
    plain = {name: tensor.data for name, tensor in parameters.items()}
    made = []
    for copy in copies.merged_for(memory):
        target = copy.target.view_of(plain[copy.parameter])
        if copy.tensor:
            source = memory.view_part(copy.tensor, copy.source)
            made.append(TensorCopy(copy.tensor, target, source))
        else:
            target.fill_(copy.value)
    return made


def make_copies(made: Sequence[TensorCopy], memory: TensorMemory) -> None:
    """Make copies; many at once keep all threads of a ring busy. A device may still be copying when this returns."""
    if not made:
        return
    ring = open_ring(made[0].target.device, memory.nbytes)
    if ring is not None:
        ring.copy_tensors(made)
    else:
        torch._foreach_copy_([each.target for each in made], [each.source for each in made])


def have_same_bytes(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of a shape and dtype have the same bits, whatever numbers these are."""
    bits = (each.contiguous().view(-1).view(torch.uint8) for each in (one, other))
    return torch.equal(*bits)
