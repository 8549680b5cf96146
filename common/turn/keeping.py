"""Why the turn outlives whatever else a dying process has open.

The kernel closes a dying process's descriptors one after the other, the highest first, and a lock falls with the last
one of its file. A device opened before the lock would be closed after it: somebody else would get the turn while
the memory is still there. So one more copy of the open lock file lies in the queue of a socket, which nobody reads. The kernel drops
what is queued when it closes the socket, and closes what it has dropped only when all that the process had open is closed.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from rollout_common.turn.errors import TurnError
from rollout_common.turn.lock_files import open_lock


def open_kept(directory: Path, device: str) -> tuple[int, int]:
    """Open a device's lock file; return it and its keeper, which are closed together.

    Raises:
        TurnError: see `open_lock` and `keeper`.
    """
    file = open_lock(directory, device)
    try:
        return file, keeper(file)
    except BaseException:
        os.close(file)
        raise


def keeper(file: int) -> int:
    """Return a socket that has a copy of an open lock file; close it where the file is closed.

    Raises:
        TurnError: so many files of this user are queued already.
    """
    try:
        queued, kept = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        with queued, kept:
            socket.send_fds(queued, [b"turn"], [file])
            return kept.detach()
    except OSError as error:
        raise TurnError(
            f"can't keep a lock until this process has ended ({error.strerror}): allow this user more open files "
            "(RLIMIT_NOFILE)"
        ) from error
