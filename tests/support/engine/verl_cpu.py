"""verl's platform interface for a machine without accelerators, so that its trainer runs in a test.

verl picks its platform by name (`VERL_PLATFORM=cpu`) and imports this module through
`VERL_USE_EXTERNAL_MODULES`. What verl asks of device memory is answered with zeros.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any

import torch
import torch.distributed
from torch.distributed.fsdp import _init_utils
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry
from verl.utils import fsdp_utils, import_utils

DEVICE = torch.device("cpu")


def _nothing(*_: object, **__: object) -> int:
    return 0


def _module() -> ModuleType:
    """Return what takes the place of `torch.cuda`."""
    module = ModuleType("verl_cpu_device")
    module.__dict__.update(dict.fromkeys(ZEROS, _nothing))
    module.__dict__.update(
        is_available=lambda: True,
        current_device=lambda: DEVICE,
        device_count=lambda: 1,
        device=lambda *_: nullcontext(),
        mem_get_info=lambda *_: (2**30, 2**30),
        get_device_name=lambda *_: "cpu",
        get_rng_state=torch.get_rng_state,
        set_rng_state=torch.set_rng_state,
        memory=ModuleType("memory"),
    )
    return module


ZEROS = (
    *("empty_cache", "ipc_collect", "manual_seed", "manual_seed_all", "max_memory_allocated"),
    *("max_memory_reserved", "memory_allocated", "memory_reserved", "reset_peak_memory_stats"),
    *("set_device", "synchronize"),
)
MODULE = _module()

_init_process_group = torch.distributed.init_process_group


def _one_backend(backend: str | None = None, **named: Any) -> None:
    """verl asks for a backend of the processor and one of its device, here the same."""
    _init_process_group("gloo" if backend == "cpu:gloo,cpu:gloo" else backend, **named)


torch.distributed.init_process_group = _one_backend  # type: ignore[assignment]
# FSDP sends the states of a module between accelerators alone, though gloo could.
_init_utils._check_module_states_for_sync_module_states = lambda module_states: None
# verl patches a class of TRL that the TRL of this environment keeps with packages we have not.
import_utils.is_trl_available = lambda: False
# Here the index of a device becomes the text "cpu:0"; elsewhere tensors are moved to what it is.
fsdp_utils.get_device_id = lambda: 0


@PlatformRegistry.register(platform="cpu")
class PlatformCpu(PlatformBase):  # type: ignore[misc]
    """The processor as verl's accelerator; Ray counts it as a GPU."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = MODULE

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return DEVICE

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> Any:
        return None
