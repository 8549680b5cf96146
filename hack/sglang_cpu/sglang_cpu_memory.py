"""Memory of a CPU engine given back and taken again, with the contract of torch_memory_saver.

Tensors that are made inside `region(tag)` belong to the tag. `pause(tag)` gives their whole pages
back to the system and loses the content; after `resume(tag)` they read as zeros, as GPU memory
without a backup would hold anything.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

MADV_DONTNEED = 4


def _tensors() -> dict[int, torch.Tensor]:
    """Every tensor of the process that lies in main memory, by the address of its storage."""
    found = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and thing.device.type == "cpu":
            storage = thing.untyped_storage()
            if storage.nbytes():
                found[storage.data_ptr()] = thing
    return found


class Saver:
    """What SGLang calls; one per process, as the regions and the pauses come by other ways."""

    _regions: ClassVar[dict[str, dict[int, torch.Tensor]]] = {}
    enabled = True

    def check_validity(self, caller_name: str) -> None:
        """Nothing to warn of."""

    @contextmanager
    def configure_subprocess(self) -> Iterator[None]:
        """No library has to be preloaded."""
        yield

    @contextmanager
    def region(self, tag: str, enable_cpu_backup: bool = False) -> Iterator[None]:
        """Remember what is made inside."""
        before = _tensors()
        yield
        made = {at: tensor for at, tensor in _tensors().items() if at not in before}
        self._regions.setdefault(tag, {}).update(made)

    @contextmanager
    def cuda_graph(self, **_: Any) -> Iterator[None]:
        """A CPU has no graphs."""
        yield

    @contextmanager
    def disable(self) -> Iterator[None]:
        """Nested regions that must stay are none of ours."""
        yield

    def pause(self, tag: str) -> None:
        """Give the whole pages of a tag back; their content is lost."""
        libc = ctypes.CDLL(None, use_errno=True)
        page = mmap.PAGESIZE
        for tensor in self._regions.get(tag, {}).values():
            storage = tensor.untyped_storage()
            begin = -(-storage.data_ptr() // page) * page
            end = (storage.data_ptr() + storage.nbytes()) // page * page
            if end > begin and libc.madvise(
                ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), MADV_DONTNEED
            ):
                raise OSError(ctypes.get_errno(), "madvise failed")

    def resume(self, tag: str) -> None:
        """The pages come back by themselves, as zeros."""


def install(module: types.ModuleType) -> None:
    """Make SGLang's adapter module give out `Saver`."""
    saver = Saver()
    module.TorchMemorySaverAdapter.create = staticmethod(
        lambda enable: saver if enable else module._TorchMemorySaverAdapterNoop()
    )
