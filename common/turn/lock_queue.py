"""Who waits for a device goes before who has just given it back and wants it again.

Whoever unlocks a flock and locks it again at once is faster than who waits for it and has to be woken. So everybody stands
in a door before the lock, one at a time: a second lock on the same open file, of the kind that belongs to the
description, too (OFD). Who stands there and does not move, because it was stopped, is passed after a while: the door
is a courtesy, and only the lock excludes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import time

from .settings import COURTESY_SECONDS, QUEUE_POLL_SECONDS


def try_enter(file: int) -> bool:
    """Stand in the door of an open lock file, if nobody else does."""
    try:
        _set(file, fcntl.F_WRLCK)
    except BlockingIOError:
        return False
    except OSError:
        return True  # a file system without such locks: then it goes without courtesy
    return True


def enter(file: int) -> None:
    """Wait for the door, but not for ever."""
    until = time.monotonic() + COURTESY_SECONDS
    while not try_enter(file) and time.monotonic() < until:
        time.sleep(QUEUE_POLL_SECONDS)


def leave(file: int) -> None:
    """Leave the door to the next one."""
    with contextlib.suppress(OSError):
        _set(file, fcntl.F_UNLCK)


def _set(file: int, kind: int) -> None:
    """Change the lock on the file's first byte; what is asked for is a `struct flock`."""
    fcntl.fcntl(file, fcntl.F_OFD_SETLK, struct.pack("hhqqi", kind, os.SEEK_SET, 0, 1, 0))
