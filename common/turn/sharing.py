"""How the processes of one holder share its turn: they get its open lock files over a Unix socket.

A lock ends when the last copy of its open file is closed, or when the holder unlocks it. So a process that joined
keeps the turn after its parent was killed, until it has ended itself (see `lock_files.make_keeper`). A holder that gives
the turn back unlocks for all of them and needs no answer from any.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from rollout_common.turn.errors import TurnError

from .settings import JOIN_TIMEOUT_SECONDS

logger = logging.getLogger(__name__)

SOCKET = "ROLLOUT_TURN_SOCKET"
_MAX_FILES = 253
"""Linux passes at most 253 descriptors in one message (SCM_MAX_FD)."""

# Never closed: these copies keep the turn for as long as this process may have memory of the device.
_joined: dict[str, list[int]] = {}
_join_guard = threading.Lock()
_own: set[str] = set()
"""Sockets of this process, and of the process that it was forked from."""


class Sharing:
    """A socket in a private folder that gives the open lock files to processes of this user."""

    def __init__(self, files: Callable[[], list[int]]) -> None:
        """Listen.

        Args:
            files: returns the descriptors to share (`Turn.fileno_list`).
        """
        self._files = files
        self._folder = Path(tempfile.mkdtemp(prefix="rollout-turn-"))
        self.path = self._folder / "turn"
        _own.add(str(self.path))
        self._closed = threading.Event()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.bind(str(self.path))
            self._socket.listen(64)
        except OSError as error:
            self.close()
            raise TurnError(
                f"can't listen at {str(self.path)!r} ({error}): let TMPDIR name a writable folder with a "
                f"short path"
            ) from error
        threading.Thread(target=self._serve, name="turn-sharing", daemon=True).start()

    @property
    def environment(self) -> dict[str, str]:
        """The environment variable by which a process finds the socket."""
        return {SOCKET: str(self.path)}

    def close(self) -> None:
        """Stop listening; processes that have joined keep their copies."""
        self._closed.set()
        # A thread in accept() notices a shutdown, not a close.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
            except OSError:
                # Perhaps out of descriptors: the process that wants to join waits until there are some.
                if self._closed.wait(0.1):
                    return
                continue
            with peer:
                try:
                    peer.settimeout(JOIN_TIMEOUT_SECONDS)
                    socket.send_fds(peer, [b"turn"], self._files())
                except (OSError, TurnError):
                    logger.warning("a process could not join the turn", exc_info=True)


def join() -> None:
    """Share the turn of the process that started this one; call it before touching a device.

    Does nothing without `ROLLOUT_TURN_SOCKET`, on a repeated call, and in the process that shares the turn or a
    fork of it, which have the files already.

    Raises:
        TurnError: the process that shared the turn is gone or hasn't the turn, so others may use the device.
    """
    if os.environ.get(SOCKET) not in _joined:
        share_again()


def share_again() -> None:
    """Share the turn that the process which started this one has now, in place of the one that it had before.

    Call it before memory of a device is taken again: the turn may be one that a trainer has lent. Does nothing where
    `join` does nothing.

    Raises:
        TurnError: As `join`.
    """
    path = os.environ.get(SOCKET)
    if not path or path in _own:
        return
    with _join_guard:
        former = _joined.get(path, [])
        _joined[path] = _receive_files(path)
        for file in former:
            os.close(file)


def _receive_files(path: str) -> list[int]:
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
            peer.settimeout(JOIN_TIMEOUT_SECONDS)
            peer.connect(path)
            data, files, _, _ = socket.recv_fds(peer, 16, _MAX_FILES, socket.MSG_CMSG_CLOEXEC)
    except OSError as error:
        raise TurnError(
            f"the process that shares its turn for the devices at {path!r} is gone "
            f"({error.strerror or error}): this one must not touch them"
        ) from error
    if not data or not files:
        raise TurnError(
            f"the process at {path!r} has no turn for the devices to share: see its log; this one "
            f"must not touch them"
        )
    return files
