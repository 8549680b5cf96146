"""Stand-ins that let SGLang run on a CPU, for tests and development; never shipped.

A `.pth` file of the environment (`make $(CACHE)/env-sglang`) imports this module in every Python
process of it, SGLang's own children included. It costs nothing until SGLang is imported:

- `sgl_kernel` exists for GPUs only. Any `sgl_kernel.*` name is found here and raises when called;
  the models of the tests call none, as SGLang also has torch-native paths.
- SGLang's recorder of experts, and its layers for adapters, lock memory for a GPU. Here it is plain memory.
- `torch_memory_saver` needs CUDA's virtual memory. `sglang_cpu_memory` gives pages back by madvise.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Sequence
from typing import Any

ADAPTER = "sglang.srt.utils.torch_memory_saver_adapter"
HOST_POOLS = "sglang.srt.mem_cache.pool_host.common"
ADAPTER_LAYERS = "sglang.srt.lora.layers"
ADAPTER_BATCHES = "sglang.srt.lora.backend.torch_backend"


class _Absent:
    """Anything of a kernel library: has every attribute, raises when called."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> _Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(f"{self._name}.{name}")

    def __call__(self, *_: object, **__: object) -> object:
        raise NotImplementedError(f"{self._name} exists on GPUs only")


class _Kernels(types.ModuleType):
    """A module that has every name."""

    __path__ = []  # noqa: RUF012 - what makes a module a package

    def __getattr__(self, name: str) -> _Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(f"{self.__name__}.{name}")


class _KernelFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "sgl_kernel" and not name.startswith("sgl_kernel."):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Kernels(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _replace_saver(module: types.ModuleType) -> None:
    import sglang_cpu_memory

    sglang_cpu_memory.install(module)


def _replace_allocator(module: types.ModuleType) -> None:
    def allocate_plain(
        dims: tuple[int, ...], dtype: object, device: str, allocator: Any, **_: object
    ) -> object:
        return allocator.allocate(dims, dtype=dtype, device=device)

    module.ALLOC_MEMORY_FUNCS["cpu"] = allocate_plain


class _PlainTorch:
    """torch, whose tensors are never locked."""

    def __init__(self, torch: types.ModuleType) -> None:
        self._torch = torch

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._torch, name)
        if name not in ("tensor", "zeros"):
            return found
        return lambda *args, pin_memory=False, **fields: found(*args, **fields)


def _leave_unlocked(module: Any) -> None:
    module.torch.Tensor.pin_memory = lambda self, *_: self
    module.torch = _PlainTorch(module.torch)


REPLACEMENTS = {
    ADAPTER: _replace_saver,
    HOST_POOLS: _replace_allocator,
    ADAPTER_LAYERS: _leave_unlocked,
    ADAPTER_BATCHES: _leave_unlocked,
}
"""What is done to a module right after it was loaded."""


class _ReplacingFinder(importlib.abc.MetaPathFinder):
    """Changes modules of SGLang right after they were loaded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        replace = REPLACEMENTS.get(name)
        if replace is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def load_and_replace(module: types.ModuleType) -> None:
            load(module)
            replace(module)

        spec.loader.exec_module = load_and_replace  # type: ignore[method-assign]
        return spec


def install() -> None:
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    sys.meta_path.insert(0, _KernelFinder())
    sys.meta_path.insert(0, _ReplacingFinder())


install()
