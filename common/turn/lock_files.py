"""The lock files of a node: one for each device, in one directory that every pod mounts.

The process that holds `flock(LOCK_EX)` on a device's file has the turn for it. The text in the file names the
holder for people; it decides nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self
from urllib.parse import quote, unquote

from rollout_common.turn.errors import TurnError

from .settings import QUEUE_COURTESY_SECONDS, QUEUE_POLL_SECONDS

UNNAMED = "a process that left no name"
_NOTE_BYTES = 4096
_NAME_BYTES = 255
_OPEN_TRIES = 100
"""Ends the loop if somebody removes the lock file each time that it is made."""


def lock_name(device: str) -> str:
    """Return the name of a device's lock file.

    Raises:
        TurnError: no file can have this name.
    """
    name = quote(device, safe="")
    if not name or name.startswith(".") or len(name) > _NAME_BYTES:
        raise TurnError(
            f"{device!r} can't name a device: give 1 to {_NAME_BYTES} bytes (escaped), no dot in front"
        )
    return name


class LockFile:
    """The open lock file of one device; every process with a copy of its descriptors shares its lock.

    Attributes:
        filenos: Its descriptors: the file, and the keeper that makes its lock outlive all else in a dying process.
    """

    def __init__(self, directory: Path, device: str) -> None:
        """Open the file, and make it if it is missing; this locks nothing.

        Raises:
            TurnError: the directory is missing, full, or not writable for this user; or this user has too many
                files in queues.
        """
        self._path = directory / lock_name(device)
        self._file = _open_lock(self._path)
        try:
            self.filenos = (self._file, _make_keeper(self._file))
        except TurnError:
            os.close(self._file)
            raise

    @classmethod
    def adopt(cls, directory: Path, device: str, filenos: tuple[int, int]) -> Self:
        """Return the lock file that another process holds and has passed; its descriptors belong to the result.

        Args:
            directory: Of the node's lock files.
            device: Whose lock it is.
            filenos: As `filenos` of that process.

        Raises:
            TurnError: It is not this device's lock file, or that process does not have the lock.
        """
        found = cls.__new__(cls)
        found._path, found._file, found.filenos = directory / lock_name(device), filenos[0], filenos
        if not found.is_current() or not _is_open(filenos[1]):
            raise TurnError(f"what was passed is not the lock file of {device}")
        try:
            # A lock may be taken again through the file that has it. One that nobody had is held from here on.
            fcntl.flock(found._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise TurnError(f"the turn for {device} is somebody else's") from error
        return found

    def lock(self, on_wait: Callable[[], None]) -> None:
        """Wait until this process has the lock; call `on_wait` if it is not free.

        Raises:
            OSError: the file system has no such locks.
        """
        try:
            if not self._enter_queue():
                on_wait()
                # Pass a process that stays in the queue, because it may be stopped.
                until = time.monotonic() + QUEUE_COURTESY_SECONDS
                while not self._enter_queue() and time.monotonic() < until:
                    time.sleep(QUEUE_POLL_SECONDS)
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                on_wait()
                fcntl.flock(self._file, fcntl.LOCK_EX)
        finally:
            with contextlib.suppress(OSError):
                self._set_queue_lock(fcntl.F_UNLCK)

    def unlock(self) -> None:
        """Free the lock, for every process that shares it."""
        fcntl.flock(self._file, fcntl.LOCK_UN)

    # A process that unlocks a flock and locks it again at once is faster than a waiter, which must be woken first.
    # So each process stands in a queue of length one before it locks: a lock on the file's first byte that belongs
    # to the open file, as the flock does (OFD). The queue only orders; the flock alone excludes.

    def _enter_queue(self) -> bool:
        try:
            self._set_queue_lock(fcntl.F_WRLCK)
        except BlockingIOError:
            return False
        except OSError:
            return True  # the file system has no such locks: go on without an order
        return True

    def _set_queue_lock(self, kind: int) -> None:
        # The bytes are a `struct flock` for the first byte of the file.
        fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, struct.pack("hhqqi", kind, os.SEEK_SET, 0, 1, 0))

    def is_waited_for(self) -> bool:
        """Return whether another open file stands in the queue for the lock."""
        asked = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
        try:
            found = fcntl.fcntl(self._file, fcntl.F_OFD_GETLK, asked)
        except OSError:
            return False  # the file system has no such locks
        return bool(struct.unpack("hhqqi", found)[0] != fcntl.F_UNLCK)

    def is_current(self) -> bool:
        """Return whether others still find this file by its name."""
        try:
            return os.path.samestat(os.fstat(self._file), os.stat(self._path))
        except OSError:
            return False

    def write_note(self, holder: str) -> None:
        """Write the holder's name into the file; an empty name says that nobody holds it."""
        note = json.dumps({"holder": holder, "since": time.time()}) + "\n" if holder else ""
        # On a full disk people miss a name; the lock itself needs no space.
        with contextlib.suppress(OSError):
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, note.encode(), 0)

    def noted_holder(self) -> str | None:
        """Return the holder that the file names, or None; any user may have written it."""
        return _noted_holder(self._file)

    def close(self) -> None:
        """Close the file; its lock stays with other processes that share it."""
        for file in self.filenos:
            os.close(file)


def _is_open(file: int) -> bool:
    try:
        os.fstat(file)
    except OSError:
        return False
    return True


def _open_lock(path: Path) -> int:
    try:
        for _ in range(_OPEN_TRIES):
            with contextlib.suppress(FileNotFoundError):
                # No O_CREAT: with fs.protected_regular the kernel forbids it on a file of another user.
                return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            _make_lock(path)
    except OSError as error:
        raise TurnError(
            f"can't open the lock {str(path)!r} ({error.strerror}): mount the node's lock directory "
            f"there, with mode 1777 and room for a small file per device"
        ) from error
    raise TurnError(f"the lock {str(path)!r} vanishes again and again: find out who removes it")


def _make_lock(path: Path) -> None:
    # Linked once its mode is set: from the first moment on every user can open it.
    new = path.parent / f".new-{secrets.token_hex(8)}"
    file = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(file, 0o666)
        with contextlib.suppress(FileExistsError):
            os.link(new, path)
    finally:
        os.close(file)
        os.unlink(new)


def _make_keeper(file: int) -> int:
    """Return a socket that makes the lock of an open file outlive all else that a dying process has open.

    The kernel closes a dying process's descriptors one after the other, the highest first, and a lock ends with
    the last copy of its open file. If the device was opened before the lock, the next holder would get the turn
    while the memory is still there. So one more copy of the file waits in the queue of this socket, which nobody
    reads: the kernel closes queued files only after all descriptors of the process.
    """
    try:
        sender, keeper = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        with sender, keeper:
            socket.send_fds(sender, [b"turn"], [file])
            return keeper.detach()
    except OSError as error:
        raise TurnError(
            f"can't keep a lock until this process has ended ({error.strerror}): allow this user more open files "
            "(RLIMIT_NOFILE)"
        ) from error


def _noted_holder(file: int) -> str | None:
    try:
        holder = json.loads(os.pread(file, _NOTE_BYTES, 0))["holder"]
    except (OSError, ValueError, TypeError, LookupError, RecursionError):
        return None
    if not isinstance(holder, str) or not holder.isprintable():
        return None
    return holder[:_NAME_BYTES] or None


def read_note(directory: Path, device: str) -> str:
    """Return the name that the holder of a device has left; any user may have written it."""
    with _open_to_read(directory, device) as file:
        return (None if file is None else _noted_holder(file)) or UNNAMED


def holders(directory: Path) -> dict[str, str | None]:
    """Return the holder of each device that has a lock file here, or None if it is free; for people.

    Raises:
        TurnError: the directory is missing or not readable.
    """
    try:
        names = sorted(entry.name for entry in os.scandir(directory) if entry.is_file())
    except OSError as error:
        raise TurnError(
            f"can't read the lock directory {str(directory)!r}: {error.strerror}"
        ) from error
    devices = [unquote(name) for name in names if not name.startswith(".")]
    return {device: _find_holder(directory, device) for device in devices}


def _find_holder(directory: Path, device: str) -> str | None:
    with _open_to_read(directory, device) as file:
        if file is None:
            return None
        try:
            # Shared, and closed at once: two processes that look don't see each other's lock.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _noted_holder(file) or UNNAMED
        return None


@contextlib.contextmanager
def _open_to_read(directory: Path, device: str) -> Iterator[int | None]:
    # O_NONBLOCK: whatever stands there may be a pipe that a stranger has made.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        file = os.open(directory / lock_name(device), flags)
    except OSError:
        yield None
        return
    try:
        yield file
    finally:
        os.close(file)
