"""Memory that a GPU reads and writes at full speed: page-locked for CUDA's driver, as long as it is needed.

Memory that isn't passes through a buffer of the driver, at a third of the speed and less. `torch` is
not needed here.
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

_told: set[int] = set()
"""Errors of the driver that were logged: one version after the other would say the same."""


def lock(address: int, nbytes: int, *, driver: Any | None = None) -> Callable[[], None] | None:
    """Lock pages of this process, for the calling thread's context of CUDA.

    The driver's own interface leaves no error behind for somebody else's next call, as the runtime's
    does: memory that it can't lock is only slower.

    Args:
        address: Where it begins.
        nbytes: How much, in whole pages.
        driver: CUDA's; None: this machine's.

    Returns:
        What undoes that, which must come before the memory goes, in any thread; None: it isn't locked.
    """
    found = driver or _driver()
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
        if error not in _told:
            _told.add(error)
            logger.warning(
                "CUDA can't lock %d bytes of weights (error %d): they are copied more slowly; see "
                "the limit of locked memory",
                nbytes,
                error,
            )
        return None

    def undo() -> None:
        # A thread without a context may be the one that gives the memory back, and pages that stay
        # locked are read by the driver even if others have come to their address.
        found.cuCtxPushCurrent_v2(context)
        error = found.cuMemHostUnregister(ctypes.c_void_p(address))
        found.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
        if error:
            logger.error("CUDA can't unlock %d bytes of weights (error %d)", nbytes, error)

    return undo


def _driver() -> Any | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
