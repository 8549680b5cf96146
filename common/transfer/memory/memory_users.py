"""Whether another process has memory of this one: the kernel answers, since a silent process can't."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
from collections.abc import Iterator


def open_again(handle: int) -> int:
    """Return another descriptor of this memory, for reading only; the caller closes it.

    Raises:
        OSError: It can't be opened, or was closed.
    """
    return os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_CLOEXEC)


def nobody_has(handle: int) -> bool:
    """Whether the kernel proves that no process has this memory by a descriptor of `open_again`, or maps it.

    The kernel grants an exclusive lease of a file only if no process, in any container, has the file open;
    the descriptor of `memfd_create` does not count. A kernel without leases of memory proves nothing.
    """
    try:
        with _opened_again(handle) as probe:
            with _opened_again(handle):
                alone_too = _is_leased(probe)  # a lease that is granted here too proves nothing
            return not alone_too and _is_leased(probe)
    except OSError:
        return False


@contextlib.contextmanager
def _opened_again(handle: int) -> Iterator[int]:
    made = open_again(handle)
    try:
        yield made
    finally:
        os.close(made)


def _is_leased(probe: int) -> bool:
    """Whether the kernel grants an exclusive lease; it ends with the descriptor."""
    try:
        # If a process opens the file during the lease, the kernel sends a signal: the default one would end this process.
        fcntl.fcntl(probe, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(probe, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except BlockingIOError:
        return False
    return True
