"""Memory of a GPU that other processes map by a descriptor: CUDA's virtual memory management, through its driver.

Structures and numbers are those of CUDA's driver API (`cuda.h`). The descriptor keeps the memory alive: a process that
has mapped it reads it also after the process that made it was killed. `cudaIpcGetMemHandle` has no such descriptor, wants
a common namespace of process ids, and refuses memory of torch's `expandable_segments`. `torch` is not needed here.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
from typing import Any

from .page_locking import find_driver

logger = logging.getLogger(__name__)

PINNED, POSIX_DESCRIPTOR, DEVICE, READ_WRITE = 1, 1, 1, 3
"""CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, CU_MEM_LOCATION_TYPE_DEVICE,
CU_MEM_ACCESS_FLAGS_PROT_READWRITE."""

_UNSUPPORTED = (
    "this device or container doesn't let processes share its memory: push through main memory"
)
FIXES = {
    2: "send smaller buckets, or free what torch caches (torch.cuda.empty_cache())",
    101: "name a device that this process sees, see CUDA_VISIBLE_DEVICES",
    800: _UNSUPPORTED,
    801: _UNSUPPORTED,
}
"""What helps, by number of the error: out of memory, invalid device, not permitted, not supported."""

NO_FLAGS = ctypes.c_ulonglong(0)


class ExportError(Exception):
    """Memory can't be made, exported or mapped; the text names the call that failed, and the fix if there is one."""


class MemoryLocation(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class AllocationProperties(ctypes.Structure):
    """CUmemAllocationProp, with the fields of `allocFlags` as its own."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("requested_handle_types", ctypes.c_int),
        ("location", MemoryLocation),
        ("win32_handle_metadata", ctypes.c_void_p),
        ("compression_type", ctypes.c_ubyte),
        ("gpu_direct_rdma_capable", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class AccessDescription(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", MemoryLocation), ("flags", ctypes.c_int))


def export_memory(
    index: int, nbytes: int, undo: contextlib.ExitStack, driver: Any | None
) -> tuple[int, int]:
    """Allocate memory of this device; return its address and a descriptor of it.

    Args:
        index: Of the device, as torch counts in this process.
        nbytes: At least this much is allocated.
        undo: Gets what undoes each call, also if a later one fails.
        driver: CUDA's; None: this machine's.

    Raises:
        ExportError: A call of the driver failed.
    """
    calls = DriverCalls(driver)
    context = _enter_context(calls, index, undo)
    properties = _describe_memory(index)
    size = _round_size(calls, properties, nbytes)
    allocation = ctypes.c_ulonglong()
    calls.make_call(
        "cuMemCreate",
        *(ctypes.byref(allocation), ctypes.c_size_t(size), ctypes.byref(properties), NO_FLAGS),
    )
    undo.callback(calls.undo_call, "cuMemRelease", allocation)
    handle = ctypes.c_int(-1)
    calls.make_call(
        "cuMemExportToShareableHandle",
        *(ctypes.byref(handle), allocation, ctypes.c_int(POSIX_DESCRIPTOR), NO_FLAGS),
    )
    undo.callback(os.close, handle.value)
    os.set_inheritable(handle.value, False)
    address = _map_allocation(calls, allocation, size, index, undo)
    _leave_context(calls, context, undo)
    return address, handle.value


def import_memory(
    index: int, nbytes: int, handle: int, undo: contextlib.ExitStack, driver: Any | None
) -> int:
    """Map memory of another process by its descriptor; return its address.

    The driver refuses more bytes than the memory has. The caller may close the descriptor at once. Arguments and errors
    are as for `export_memory`.
    """
    calls = DriverCalls(driver)
    context = _enter_context(calls, index, undo)
    size = _round_size(calls, _describe_memory(index), nbytes)
    allocation = ctypes.c_ulonglong()
    calls.make_call(
        "cuMemImportFromShareableHandle",
        *(ctypes.byref(allocation), ctypes.c_void_p(handle), ctypes.c_int(POSIX_DESCRIPTOR)),
    )
    undo.callback(calls.undo_call, "cuMemRelease", allocation)
    address = _map_allocation(calls, allocation, size, index, undo)
    _leave_context(calls, context, undo)
    return address


class DriverCalls:
    """Calls of CUDA's driver whose errors have names.

    Raises:
        ExportError: This machine has no driver.
    """

    def __init__(self, driver: Any | None) -> None:
        self._driver: Any = driver or find_driver()
        if self._driver is None:
            raise ExportError(
                "libcuda.so.1 can't be loaded: run where NVIDIA's driver is, or use the device cpu"
            )

    def make_call(self, name: str, *arguments: Any) -> None:
        """Make this call; an error becomes an `ExportError`."""
        error = getattr(self._driver, name)(*arguments)
        if error:
            fix = f": {FIXES[error]}" if error in FIXES else ""
            raise ExportError(f"{name} failed with error {error} ({self._name_error(error)}){fix}")

    def undo_call(self, name: str, *arguments: Any) -> None:
        """Make a call that undoes another one; log an error, since the calls after it must be made as well."""
        try:
            self.make_call(name, *arguments)
        except ExportError as error:
            logger.error("exported memory is not freed completely: %s", error)  # noqa: TRY400 - no trace needed

    def _name_error(self, error: int) -> str:
        name = ctypes.c_char_p()
        self._driver.cuGetErrorName(ctypes.c_int(error), ctypes.byref(name))
        return name.value.decode() if name.value else "unknown to the driver"


def _enter_context(calls: DriverCalls, index: int, undo: contextlib.ExitStack) -> ctypes.c_void_p:
    """Make the device's primary context, which is torch's, the current one of this thread."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    calls.make_call("cuInit", ctypes.c_uint(0))
    calls.make_call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(index))
    calls.make_call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    undo.callback(calls.undo_call, "cuDevicePrimaryCtxRelease_v2", device)
    calls.make_call("cuCtxPushCurrent_v2", context)
    undo.callback(calls.undo_call, "cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
    return context


def _leave_context(
    calls: DriverCalls, context: ctypes.c_void_p, undo: contextlib.ExitStack
) -> None:
    """Give the thread back its own context; whichever thread undoes all enters this one first."""
    calls.make_call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
    # A copy that still runs when its memory is unmapped would be an error of the whole context, for good.
    undo.callback(calls.undo_call, "cuCtxSynchronize")
    undo.callback(calls.undo_call, "cuCtxPushCurrent_v2", context)


def _describe_memory(index: int) -> AllocationProperties:
    return AllocationProperties(
        type=PINNED,
        requested_handle_types=POSIX_DESCRIPTOR,
        location=MemoryLocation(DEVICE, index),
    )


def _round_size(calls: DriverCalls, properties: AllocationProperties, nbytes: int) -> int:
    """Return the size rounded up to whole units of the device's memory."""
    unit = ctypes.c_size_t()
    calls.make_call(
        "cuMemGetAllocationGranularity",
        *(ctypes.byref(unit), ctypes.byref(properties), ctypes.c_int(0)),  # the minimum
    )
    return -(-nbytes // unit.value) * unit.value


def _map_allocation(
    calls: DriverCalls,
    allocation: ctypes.c_ulonglong,
    size: int,
    index: int,
    undo: contextlib.ExitStack,
) -> int:
    """Map an allocation of this device for reading and writing; return its address."""
    address, length = ctypes.c_ulonglong(), ctypes.c_size_t(size)
    anywhere = (ctypes.c_size_t(0), ctypes.c_ulonglong(0))  # alignment and address
    calls.make_call("cuMemAddressReserve", *(ctypes.byref(address), length, *anywhere, NO_FLAGS))
    undo.callback(calls.undo_call, "cuMemAddressFree", address, length)
    calls.make_call("cuMemMap", address, length, ctypes.c_size_t(0), allocation, NO_FLAGS)
    undo.callback(calls.undo_call, "cuMemUnmap", address, length)
    access = AccessDescription(MemoryLocation(DEVICE, index), READ_WRITE)
    calls.make_call("cuMemSetAccess", address, length, ctypes.byref(access), ctypes.c_size_t(1))
    return address.value
