"""The payload of one frame while it moves between its memory and a socket, in a thread if it is large.

One thread reads and hashes 3 to 4 GB/s, and it holds the interpreter's lock for little of that time. So payloads of
several connections move at once, while the transfer loop only decides what comes next.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from rollout_common.transfer.settings import TURN_SECONDS

from .frame_sockets import is_socket_ready

THREADED_BYTES = 2 << 20
"""Payloads of this size and more move in threads: handing one over costs about as much as reading a quarter of it."""

THREADS = min(8, max(2, (os.cpu_count() or 1) // 2))
"""Most threads of a process that move payloads."""

_lock = threading.Lock()
_pool: tuple[int, ThreadPoolExecutor] | None = None

Step = Callable[[memoryview], int]
"""Moves some bytes of a buffer and returns how many; raises BlockingIOError if none can move now."""


def payload_threads() -> ThreadPoolExecutor:
    """Return the threads of this process that move payloads; start them if there are none yet, as after a fork."""
    global _pool
    with _lock:
        if _pool is None or _pool[0] != os.getpid():
            _pool = os.getpid(), ThreadPoolExecutor(THREADS, "weights-payload")
        return _pool[1]


class Payload:
    """The bytes of one payload.

    Args:
        view: Their memory. Once `revoke` has returned, no thread reads or writes it any more.
        on_bytes: Called with the number of bytes that have moved, in the thread that moves them.
    """

    def __init__(self, view: memoryview, on_bytes: Callable[[int], None] | None = None) -> None:
        self._view, self._on_bytes = view, on_bytes
        self._lock = threading.Lock()
        self._wanted = True
        self.size, self.count = len(view), 0
        """How many bytes there are, and how many have moved."""

    @property
    def is_moving(self) -> bool:
        """Whether there are bytes left to move to or from its memory."""
        return self._wanted and self.count < self.size

    def revoke(self) -> None:
        """Leave its memory alone from now on; waits for at most one call of the socket."""
        with self._lock:
            self._wanted = False

    def move(self, step: Step, sock: socket.socket, event: int, linger: float) -> bool:
        """Move what can be moved now, and what can soon, for `TURN_SECONDS` at most.

        Args:
            step: Moves some bytes.
            sock: What it uses.
            event: Of `select.poll`: the socket's state in which it can move more.
            linger: How many seconds to wait for that state.

        Returns:
            Whether the socket has to be waited for.
        """
        until = time.monotonic() + TURN_SECONDS
        while self.is_moving and time.monotonic() < until:
            if not self.move_some(step) and not is_socket_ready(sock, event, linger):
                return True
        return False

    def move_some(self, step: Step) -> bool:
        """Move what one step can; return whether that was something. Nothing is moved once it was revoked."""
        with self._lock:
            if not self._wanted:
                return True
            try:
                with self._view[self.count :] as rest:
                    self.count += step(rest)
            except BlockingIOError:
                return False
            if self._on_bytes is not None:
                self._on_bytes(self.count)
        return True
