"""The lock files of a node: one for each device, in one directory that every pod mounts.

Whoever holds `flock(LOCK_EX)` on a device's file has the turn for it. What stands in the file names the
holder for people; nothing is decided by it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, unquote

from rollout_common.turn.errors import TurnError

UNNAMED = "a process that left no name"
_NOTE_BYTES = 4096
_NAME_BYTES = 255
# Somebody who replaces a lock file each time we have opened it would keep us here for ever.
_TRIES = 100


def lock_name(device: str) -> str:
    """Return the name of a device's lock file.

    Raises:
        TurnError: no file can be called so.
    """
    name = quote(device, safe="")
    if not name or name.startswith(".") or len(name) > _NAME_BYTES:
        raise TurnError(
            f"{device!r} can't name a device: give 1 to {_NAME_BYTES} bytes (escaped), no dot in front"
        )
    return name


def open_lock(directory: Path, device: str) -> int:
    """Open a device's lock file, which is made where there is none; nothing is locked yet.

    Raises:
        TurnError: the directory is missing, full, or not ours to write in.
    """
    path = directory / lock_name(device)
    try:
        for _ in range(_TRIES):
            with contextlib.suppress(FileNotFoundError):
                # No O_CREAT: with fs.protected_regular the kernel forbids it on a file of another user.
                return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            _make(path)
    except OSError as error:
        raise TurnError(
            f"can't open the lock {str(path)!r} ({error.strerror}): mount the node's lock directory "
            f"there, with mode 1777 and room for a small file per device"
        ) from error
    raise TurnError(f"the lock {str(path)!r} vanishes again and again: find out who removes it")


def _make(path: Path) -> None:
    """Make a lock file that every user can open from its first moment on: linked with its mode set."""
    new = path.parent / f".new-{secrets.token_hex(8)}"
    file = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(file, 0o666)
        with contextlib.suppress(FileExistsError):
            os.link(new, path)
    finally:
        os.close(file)
        os.unlink(new)


def is_current(file: int, directory: Path, device: str) -> bool:
    """Tell whether an open lock file is still the one that others find by its name."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(directory / lock_name(device)))
    except OSError:
        return False


def write_note(file: int, holder: str) -> None:
    """Say in a lock file who holds it; an empty `holder` says that nobody does."""
    note = json.dumps({"holder": holder, "since": time.time()}) + "\n" if holder else ""
    # A full disk or a strange file system costs people a name, and nobody the turn.
    with contextlib.suppress(OSError):
        os.ftruncate(file, 0)
        os.pwrite(file, note.encode(), 0)


def read_note(directory: Path, device: str) -> str:
    """Return who says that they hold a device; any user may have written there, so trust nothing."""
    try:
        file = os.open(
            directory / lock_name(device),
            os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK,
        )
    except OSError:
        return UNNAMED
    try:
        return noted(file) or UNNAMED
    finally:
        os.close(file)


def noted(file: int) -> str | None:
    """Return whom an open lock file names, None for nobody."""
    try:
        holder = json.loads(os.pread(file, _NOTE_BYTES, 0))["holder"]
    except (OSError, ValueError, TypeError, LookupError, RecursionError):
        return None
    if not isinstance(holder, str) or not holder.isprintable():
        return None
    return holder[:_NAME_BYTES] or None


def holders(directory: Path) -> dict[str, str | None]:
    """Return who holds each device that has a lock file here, None where nobody does; for people.

    Raises:
        TurnError: there is no such directory, or it isn't readable.
    """
    try:
        names = sorted(entry.name for entry in os.scandir(directory) if entry.is_file())
    except OSError as error:
        raise TurnError(
            f"can't read the lock directory {str(directory)!r}: {error.strerror}"
        ) from error
    devices = [unquote(name) for name in names if not name.startswith(".")]
    return {
        device: read_note(directory, device) if _is_locked(directory, device) else None
        for device in devices
    }


def _is_locked(directory: Path, device: str) -> bool:
    """Try the lock, shared and for a moment: two who look don't see each other."""
    with _opened(directory / lock_name(device)) as file:
        if file is None:
            return False
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int | None]:
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        yield None
        return
    try:
        yield file
    finally:
        os.close(file)
