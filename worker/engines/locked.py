"""Memory that a GPU reads at full speed: page-locked for CUDA's driver, as long as it is needed.

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


def lock(address: int, nbytes: int, driver: Any | None = None) -> Callable[[], None]:
    """Lock pages of this process; returns what undoes that, which must come before they go.

    The calling thread has a context of CUDA, who undoes it needs none. The driver's own interface leaves no error behind for
    somebody else's next call, as the runtime's does: memory that it can't lock is only slower.

    Args:
        address: Where it begins.
        nbytes: How much, in whole pages.
        driver: CUDA's; None: this machine's.
    """
    found = driver or _driver()
    if found is None or not nbytes:
        return _nothing
    error = found.cuMemHostRegister_v2(
        ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.c_uint(PORTABLE)
    )
    if error:
        logger.warning(
            "CUDA can't lock %d bytes of staged weights (error %d): commits take longer; see the "
            "limit of locked memory",
            nbytes,
            error,
        )
        return _nothing
    context = ctypes.c_void_p()
    found.cuCtxGetCurrent(ctypes.byref(context))

    def undo() -> None:
        # A thread without a context may be the one that gives the memory back, and pages that stay
        # locked are read by the driver even if others have come to their address.
        found.cuCtxPushCurrent_v2(context)
        error = found.cuMemHostUnregister(ctypes.c_void_p(address))
        found.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
        if error:
            logger.error("CUDA can't unlock %d bytes of staged weights (error %d)", nbytes, error)

    return undo


def _driver() -> Any | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def _nothing() -> None:
    """Undo nothing."""
