"""Tensors of this process as a source of weights: named, described, read chunk by chunk for their hash.

Bytes are those that a file of safetensors would hold, so the same values have the same root hash. Those
on a device come through main memory in chunks, never as a whole. torch is imported inside functions: not
every worker has it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import xxhash

from rollout_worker.engine import Entry, Layout, Sink, Tensors, TensorSpec, WeightsRejected
from rollout_worker.threads import in_thread
from rollout_worker.weights import check_layout, check_ties, root_hash

from .files import ReadCancelled, Report

if TYPE_CHECKING:
    from torch import Tensor

DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
"""Dtypes of torch as those of safetensors."""

CHUNK_BYTES = 8 << 20
"""Bytes between two looks at progress and cancellation, and of main memory that a device's need."""


class OpenSlot(Protocol):
    """As `Engine.open_slot`."""

    def __call__(self, entries: Sequence[Entry], *, given: Tensors) -> Awaitable[Sink]:
        """Give memory for these entries, or take what is given."""
        ...


def named(given: Any) -> dict[str, Tensor]:
    """Return tensors by name, of a module, a mapping or pairs of name and tensor; nothing is copied.

    Raises:
        WeightsRejected: a name comes twice, or something is no plain tensor.
    """
    from torch.nn import Module

    if isinstance(given, Module):
        given = given.state_dict(keep_vars=True)
    pairs: Iterable[tuple[str, Any]] = given.items() if isinstance(given, Mapping) else given
    found: dict[str, Tensor] = {}
    for name, tensor in pairs:
        if name in found:
            raise WeightsRejected(f"tensor {name!r} is handed over twice: keep one", tensor=name)
        found[name] = _plain(name, tensor)
    return found


def _plain(name: str, tensor: Any) -> Tensor:
    import torch

    if not isinstance(tensor, torch.Tensor):
        kind = type(tensor).__name__
        raise WeightsRejected(f"{name!r} is a {kind}: hand over tensors of torch", tensor=name)
    if hasattr(tensor, "full_tensor"):
        raise WeightsRejected(
            f"tensor {name!r} is a shard of several ranks: hand over its full_tensor()", tensor=name
        )
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        raise WeightsRejected(
            f"tensor {name!r} has no dense values here: hand over strided tensors", tensor=name
        )
    return tensor.detach()


def entries_of(tensors: Mapping[str, Tensor]) -> tuple[Entry, ...]:
    """Describe tensors as their checkpoint's file would, ordered by name.

    Raises:
        WeightsRejected: safetensors have no such dtype.
    """
    found = []
    for name, tensor in sorted(tensors.items()):
        dtype = DTYPES.get(str(tensor.dtype).removeprefix("torch."))
        if dtype is None:
            raise WeightsRejected(
                f"tensor {name!r} has the dtype {tensor.dtype}, which safetensors have not",
                tensor=name,
            )
        found.append(Entry(name, TensorSpec(dtype, tuple(tensor.shape))))
    return tuple(found)


def chunks(tensor: Tensor) -> Iterator[memoryview]:
    """Yield a tensor's bytes in order."""
    import torch

    if not tensor.numel():
        return
    # Of a tensor with gaps this is a copy, on its own device.
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    for begin in range(0, flat.numel(), CHUNK_BYTES):
        array: Any = flat[begin : begin + CHUNK_BYTES].cpu().numpy()
        yield memoryview(array).cast("B")


def settled(tensors: Mapping[str, Tensor]) -> None:
    """Wait until what the caller's streams still write to these tensors is written."""
    import torch

    for device in {each.device for each in tensors.values() if each.device.type == "cuda"}:
        torch.cuda.synchronize(device)


async def fill(
    open_slot: OpenSlot,
    layout: Layout,
    given: Tensors,
    verify: Callable[[str], None],
    report: Report = lambda done, total: None,
) -> Sink:
    """Return a sealed sink with what was handed over: the tensors themselves, or a copy of them.

    Args:
        open_slot: Takes the tensors, or gives the memory.
        layout: What they must be.
        given: The tensors; who copies them releases them.
        verify: Raises unless the root hash is the right one; called in the loop.
        report: Told of progress, in a thread.

    Raises:
        WeightsRejected: a missing, unexpected or ill-shaped tensor, or one that was changed meanwhile.
        EngineError: the engine has no room.
    """
    cancel = threading.Event()
    entries = entries_of(given.tensors)
    check_layout(layout, entries, "what was handed over")
    sink = await open_slot(entries, given=given)
    try:
        if sink.memory != "host":
            raise WeightsRejected(
                f"tensors can't be copied into {sink.memory} memory by their bytes"
            )
        verify(
            await in_thread(
                lambda cancelled: _read(entries, layout, given, sink.allocate, report, cancelled),
                cancel,
            )
        )
        await in_thread(lambda _: sink.seal(), cancel)
    except BaseException:
        await asyncio.to_thread(sink.close)
        raise
    if not sink.took:
        given.release()
    return sink


async def content_of(given: Tensors) -> str:
    """Return the root hash of what was handed over.

    Raises:
        WeightsRejected: a dtype that no file has.
    """
    entries = entries_of(given.tensors)
    nothing = Layout({}, {}, {})
    return await in_thread(
        lambda cancelled: _read(entries, nothing, given, _unneeded, _untold, cancelled),
        threading.Event(),
    )


def _unneeded(entry: Entry) -> None:
    """Give no buffer: only the hash is wanted."""


def _untold(done: int, total: int) -> None:
    """Tell nobody."""


def _read(
    entries: Sequence[Entry],
    layout: Layout,
    given: Tensors,
    allocate: Callable[[Entry], memoryview | None],
    report: Report,
    cancelled: Callable[[], bool],
) -> str:
    """Hash all tensors, copy those that have a buffer; return the root hash."""
    done, total = 0, sum(entry.spec.nbytes for entry in entries)
    digests: dict[str, str] = {}
    for entry in entries:
        digest, begin, view = xxhash.xxh3_128(), 0, allocate(entry)
        with memoryview(b"") if view is None else view:
            for chunk in chunks(given.tensors[entry.name]):
                if cancelled():
                    raise ReadCancelled
                digest.update(chunk)
                if view is not None:
                    view[begin : begin + len(chunk)] = chunk
                begin += len(chunk)
                report(done + begin, total)
        done += begin
        digests[entry.name] = digest.hexdigest()
    check_ties(layout.tied, digests)
    return root_hash(entries, digests)
