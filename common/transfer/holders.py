"""Whether any other process has memory of ours: the kernel is asked, since a silent process can't be."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
from collections.abc import Iterator


def open_again(handle: int) -> int:
    """Return another descriptor of this memory, to read it alone; to be closed by who asked.

    Raises:
        OSError: It can't be opened, or was given up.
    """
    return os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_CLOEXEC)


def nobody_has(handle: int) -> bool:
    """Whether the kernel proves that nobody has this memory by a descriptor of `open_again`, or a mapping of it.

    It grants an exclusive lease of a file only if no process, of whatever container, has it open otherwise;
    what `memfd_create` returned does not count. A kernel that can't tell proves nothing.
    """
    try:
        with _opened(handle) as probe:
            with _opened(handle):
                alone_too = _leased(probe)  # if granted now, its word is worth nothing
            return not alone_too and _leased(probe)
    except OSError:
        return False


@contextlib.contextmanager
def _opened(handle: int) -> Iterator[int]:
    made = open_again(handle)
    try:
        yield made
    finally:
        os.close(made)


def _leased(probe: int) -> bool:
    """Whether an exclusive lease was granted; it ends with the descriptor."""
    try:
        # Whoever opens the file meanwhile has the kernel send a signal: by default one that ends the process.
        fcntl.fcntl(probe, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(probe, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except BlockingIOError:
        return False
    return True
