"""What page-locking sees of CUDA's driver, on machines without one."""

from __future__ import annotations

import ctypes
import threading
from typing import Any


class Driver:
    """CUDA's, as far as locking pages goes; it says how many bytes are locked.

    Its contexts are those of threads, as CUDA's are: who has none can neither lock nor unlock.
    """

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.locked: dict[int, int] = {}
        self.flags: set[int] = set()
        self.contexts: dict[int, list[int]] = {threading.get_ident(): [77]}

    @property
    def _mine(self) -> list[int]:
        return self.contexts.setdefault(threading.get_ident(), [])

    def cuCtxGetCurrent(self, found: Any) -> int:
        found._obj.value = self._mine[-1] if self._mine else 0
        return 0

    def cuCtxPushCurrent_v2(self, context: ctypes.c_void_p) -> int:
        self._mine.append(context.value or 0)
        return 0

    def cuCtxPopCurrent_v2(self, found: Any) -> int:
        found._obj.value = self._mine.pop()
        return 0

    def cuMemHostRegister_v2(
        self, address: ctypes.c_void_p, nbytes: ctypes.c_size_t, flags: ctypes.c_uint
    ) -> int:
        if not self._mine:
            return 201
        self.flags.add(flags.value)
        if not self.error:
            self.locked[address.value or 0] = nbytes.value
        return self.error

    def cuMemHostUnregister(self, address: ctypes.c_void_p) -> int:
        if not self._mine:
            return 201  # CUDA_ERROR_INVALID_CONTEXT
        del self.locked[address.value or 0]
        return 0
