"""Memory of one device that other processes of the node map by a descriptor, and copy from there.

A trainer copies its tensors into such memory, bucket by bucket, and sends the descriptor over a Unix socket. On a GPU
both processes then have the same memory of the device (`cuda_mapping`); on a CPU it is a slot, which readers map
privately: they see what its owner writes, and change nothing of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .cuda_mapping import ExportError as ExportError
from .cuda_mapping import export_memory, import_memory
from .mapped_memory import SharedMemoryError, map_private
from .slot import Slot

if TYPE_CHECKING:
    import torch


class ExportedMemory:
    """Memory of one device, mapped in this process; `allocate` and `open` make it.

    Attributes:
        device: `cpu`, or `cuda:<index>` as torch counts in this process.
        nbytes: Its size, as it was asked for.
        address: Where it begins; 0: it is closed.
        handle: The descriptor to send, which stays this object's; -1: another process allocated the memory, or it is closed.
    """

    def __init__(self, device: str, nbytes: int) -> None:
        if not 0 < nbytes <= sys.maxsize:
            raise ExportError(f"memory of {nbytes} bytes can't be shared: it has at least one byte")
        self.device, self.nbytes = device, nbytes
        self.address, self.handle = 0, -1
        self._index = _device_index(device)
        self._undo = contextlib.ExitStack()

    @classmethod
    def allocate(cls, device: str, nbytes: int, *, driver: Any | None = None) -> ExportedMemory:
        """Allocate memory of this device, and a descriptor by which other processes map it.

        Args:
            device: `cpu` or `cuda:<index>`.
            nbytes: At least 1; a GPU allocates whole units of some MiB.
            driver: CUDA's; None: this machine's.

        Raises:
            ExportError: There is no room, or the device does not share memory.
        """
        made = cls(device, nbytes)
        with made._kept_if_whole():
            if made._index is None:
                slot = Slot(nbytes)
                made._undo.callback(slot.close)
                with slot.view_bytes(0, nbytes) as view:
                    made.address, made.handle = _find_address(view), slot.handle
            else:
                made.address, made.handle = export_memory(made._index, nbytes, made._undo, driver)
        return made

    @classmethod
    def open(
        cls, device: str, nbytes: int, handle: int, *, driver: Any | None = None
    ) -> ExportedMemory:
        """Map memory that another process allocated.

        Args:
            device: The same device as this process calls it: compare `device_identity`.
            nbytes: As the other process said.
            handle: Its descriptor, which is always closed.
            driver: CUDA's; None: this machine's.

        Raises:
            ExportError: The descriptor is not one of such memory, or the memory is smaller or may shrink.
        """
        try:
            made = cls(device, nbytes)
            with made._kept_if_whole():
                if made._index is None:
                    mapped = map_private(handle, nbytes)
                    made._undo.callback(mapped.close)
                    made.address = _find_address(mapped)
                else:
                    made.address = import_memory(made._index, nbytes, handle, made._undo, driver)
        finally:
            with contextlib.suppress(OSError):  # the caller may have sent a closed one
                os.close(handle)
        return made

    def as_tensor(self) -> torch.Tensor:
        """Return the memory as a tensor of bytes on its device, without a copy.

        The tensor does not keep the memory: it, and each view of it, must be gone before `close`.

        Raises:
            ExportError: It is closed, or torch can't use such memory in place.
        """
        import torch

        if not self.address:
            raise ExportError("this memory is closed")
        if self._index is None:
            content = (ctypes.c_uint8 * self.nbytes).from_address(self.address)
            return torch.frombuffer(content, dtype=torch.uint8)
        # torch asks the runtime which device has this address.
        torch.cuda.init()  # type: ignore[no-untyped-call]
        tensor = torch.as_tensor(CudaArray(self.address, self.nbytes), device=self.device)
        if tensor.data_ptr() != self.address:
            raise ExportError(f"torch copies memory of {self.device}: is it of another device?")
        return tensor

    def close(self) -> None:
        """Unmap the memory and close the descriptor; the device first ends all its work. May be called again.

        The memory itself is freed once no process has it mapped or has a descriptor of it.
        """
        self.address, self.handle = 0, -1
        self._undo.close()

    @contextlib.contextmanager
    def _kept_if_whole(self) -> Iterator[None]:
        """Undo what was done if the block fails, and say why in an `ExportError`."""
        try:
            yield
        except BaseException as error:
            self.close()
            if isinstance(error, OSError | SharedMemoryError):
                raise ExportError(f"{self.nbytes} bytes can't be shared: {error}") from error
            raise


class CudaArray:
    """Memory of a GPU as libraries of arrays exchange it, in version 3 of CUDA's array interface."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def device_identity(device: str) -> str:
    """Return what processes of the node with other `CUDA_VISIBLE_DEVICES` call this device, too: `cpu` or a GPU's UUID.

    Raises:
        ExportError: It is neither `cpu` nor `cuda:<index>`.
    """
    index = _device_index(device)
    if index is None:
        return device
    import torch

    return str(torch.cuda.get_device_properties(index).uuid)


def _device_index(device: str) -> int | None:
    """Return a GPU's index, None for a CPU."""
    kind, _, index = device.partition(":")
    if device == "cpu":
        return None
    if kind != "cuda" or not (index.isascii() and index.isdigit()):
        raise ExportError(f"memory of {device!r} can't be shared: name cpu or cuda:<index>")
    return int(index)


def _find_address(content: Any) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(content))
