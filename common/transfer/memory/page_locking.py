"""Memory that a GPU reads and writes at full speed: page-locked for CUDA's driver, as long as it is needed.

Other memory passes through a buffer of the driver, at a third of the speed or less. `torch` is not
needed here.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

PORTABLE = 1
"""Locked for every context of the process."""

NO_CONTEXT = 201
"""CUDA_ERROR_INVALID_CONTEXT."""

_warned: set[int] = set()
"""Errors of the driver that were logged: each is logged once, not for every version."""


def lock_pages(
    address: int, nbytes: int, *, driver: Any | None = None
) -> Callable[[], None] | None:
    """Lock pages of this process, for the CUDA context of the calling thread.

    It calls the driver's interface, since an error of the runtime's interface would appear in the next call
    of other code. Memory that can't be locked is only slower.

    Args:
        address: Where it begins.
        nbytes: How much, in whole pages.
        driver: CUDA's; None: this machine's.

    Returns:
        A function that unlocks the pages, to be called before the memory is freed, in any thread; None: they are not locked.
    """
    found = driver or find_driver()
    if found is None or not nbytes:
        return None
    context = ctypes.c_void_p()
    found.cuCtxGetCurrent(ctypes.byref(context))
    error = NO_CONTEXT
    if context.value:
        error = found.cuMemHostRegister_v2(
            ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.c_uint(PORTABLE)
        )
    if error:
        if error not in _warned:
            _warned.add(error)
            logger.warning(
                "CUDA can't lock %d bytes of weights (error %d): they are copied more slowly; see "
                "the limit of locked memory",
                nbytes,
                error,
            )
        return None

    def undo() -> None:
        # A thread without a context may free the memory. Pages that stayed locked would be read by the driver
        # even after other memory is mapped at their address.
        found.cuCtxPushCurrent_v2(context)
        error = found.cuMemHostUnregister(ctypes.c_void_p(address))
        found.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
        if error:
            logger.error("CUDA can't unlock %d bytes of weights (error %d)", nbytes, error)

    return undo


def find_driver() -> Any | None:
    """Return CUDA's driver, None if this machine has none."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
