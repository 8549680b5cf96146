"""A Unix socket at a path that other workers may want, too: a new one replaces the old, and only its owner removes it."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from rollout_worker.settings import InvalidSettings

from .settings import FOLDER_LOCK_SECONDS

logger = logging.getLogger(__name__)


def listen_at_path(path: Path, backlog: int) -> socket.socket:
    """Listen at a path; a socket there is replaced, for the worker that made it may be about to end.

    Raises:
        InvalidSettings: The path can't be used.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _lock_folder(path.parent):
            if socket_identity(path) is not None:
                if _is_listening(path):
                    logger.warning(
                        "another process listens at --weights-socket %s and gets no shared memory from now on:"
                        " give each worker a path of its own",
                        path,
                    )
                path.unlink()
            sock.bind(str(path))
            _allow_all_users(path)
        sock.listen(backlog)
    except OSError as error:
        sock.close()
        raise InvalidSettings(f"--weights-socket {path} can't be used: {error.strerror}") from error
    return sock


def remove_socket(path: Path, made: tuple[int, int] | None) -> None:
    """Remove the socket that was made here, unless a successor's has replaced it."""
    with contextlib.suppress(OSError), _lock_folder(path.parent):
        if made is not None and socket_identity(path) == made:
            path.unlink()


def socket_identity(path: Path) -> tuple[int, int] | None:
    """Return the identity of the socket at a path; None if there is none, or another file."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return None
    return (found.st_dev, found.st_ino) if stat.S_ISSOCK(found.st_mode) else None


def _is_listening(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except BlockingIOError:
            return True  # its backlog is full
        except OSError:
            return False
    return True


def _allow_all_users(path: Path) -> None:
    # The trainer may be another user, and the ticket says who may push. By a descriptor, since others that can
    # write the folder may have replaced the path by now.
    handle = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(handle)
        if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.geteuid():
            raise FileExistsError(0, "somebody else has put another file there")
        os.chmod(f"/proc/self/fd/{handle}", 0o666)
    finally:
        os.close(handle)


@contextlib.contextmanager
def _lock_folder(folder: Path) -> Iterator[None]:
    """Keep other workers from removing a socket that was made since they looked at its path; not for long."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        until = time.monotonic() + FOLDER_LOCK_SECONDS
        while time.monotonic() < until:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.01)
        yield
    finally:
        os.close(handle)
