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

READ_ONLY = 8
"""The device only reads it: what memory that is mapped to be read needs (CUDA 11.1 and later)."""

NO_CONTEXT = 201
"""CUDA_ERROR_INVALID_CONTEXT."""

_told: set[int] = set()
"""Errors of the driver that were logged: one version after the other would say the same."""


def lock(
    address: int,
    nbytes: int,
    *,
    readable: bool = False,
    context: int | None = None,
    driver: Any | None = None,
) -> Callable[[], None] | None:
    """Lock pages of this process.

    The driver's own interface leaves no error behind for somebody else's next call, as the runtime's
    does: memory that it can't lock is only slower.

    Args:
        address: Where it begins.
        nbytes: How much, in whole pages.
        readable: It is mapped to be read only, and so the device only reads it.
        context: CUDA's, from `current_context`; None: the calling thread has one.
        driver: CUDA's; None: this machine's.

    Returns:
        What undoes that, which must come before the memory goes, in any thread; None: it isn't locked.
    """
    found = driver or _driver()
    if found is None or not nbytes:
        return None
    mine = context or current_context(found)
    flags = PORTABLE | (READ_ONLY if readable else 0)
    error = NO_CONTEXT
    if mine is not None:
        with _Context(found, mine):
            error = found.cuMemHostRegister_v2(
                ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.c_uint(flags)
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

    held = _Context(found, mine or 0)

    def undo() -> None:
        # A thread without a context may be the one that gives the memory back, and pages that stay
        # locked are read by the driver even if others have come to their address.
        with held:
            error = found.cuMemHostUnregister(ctypes.c_void_p(address))
        if error:
            logger.error("CUDA can't unlock %d bytes of weights (error %d)", nbytes, error)

    return undo


def current_context(driver: Any | None = None) -> int | None:
    """Return the calling thread's context of CUDA, for other threads of this process; None: it has none."""
    found = driver or _driver()
    if found is None:
        return None
    context = ctypes.c_void_p()
    found.cuCtxGetCurrent(ctypes.byref(context))
    return context.value or None


class _Context:
    """Makes a context the calling thread's for a while."""

    def __init__(self, driver: Any, context: int) -> None:
        self._driver, self._context = driver, context

    def __enter__(self) -> None:
        self._driver.cuCtxPushCurrent_v2(ctypes.c_void_p(self._context))

    def __exit__(self, *_: object) -> None:
        self._driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


def _driver() -> Any | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
