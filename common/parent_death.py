"""Ends a process with its parent, even if the parent was killed."""

from __future__ import annotations

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1
PARENT_VARIABLE = "ROLLOUT_PARENT"
"""Environment variable with the process with which a local worker ends."""


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when its parent ends; `parent` may have ended already."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(1)
