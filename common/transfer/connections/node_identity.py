"""Whether two processes see the same Unix socket: paths alone say nothing across containers."""

from __future__ import annotations

import os
import stat
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def node_of(path: str) -> str | None:
    """Return an id that two processes share only if this path is the same socket for both; None: it is not a socket.

    It is the kernel's boot id with the device and inode of the socket.
    """
    try:
        found = os.stat(path)
        boot = BOOT_ID.read_text().strip()
    except (OSError, ValueError):
        return None
    if not stat.S_ISSOCK(found.st_mode):
        return None
    return f"{boot}:{found.st_dev}:{found.st_ino}"
