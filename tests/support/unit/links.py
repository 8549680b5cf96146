"""A network between a sender and a port that a test slows down, freezes and cuts."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

PIECE = 16 << 10


class Link:
    """Passes on what goes to a port, and what comes back.

    Args:
        port: On loopback, of who is behind it.
    """

    def __init__(self, port: int) -> None:
        self._behind = port
        self.passed = 0
        """Bytes that went to the port, of all connections."""
        self.returned = 0
        """Bytes that came back from it."""
        self.rate: float | None = None
        """Bytes a second of each connection, each way."""
        self.cut_at: int | None = None
        """After how many bytes everything breaks: in the middle of a piece, say."""
        self.freeze_at: int | None = None
        """After how many bytes that came back it freezes."""
        self.frozen = threading.Event()
        """Set: nothing moves, and nothing is closed."""
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self._run(self._accept)

    def close(self) -> None:
        self.frozen.clear()
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._break()
        for thread in self._threads:
            thread.join(5)
        for each in (self._server, *self._open):
            each.close()

    def _run(self, work: Callable[..., None], *given: Any) -> None:
        thread = threading.Thread(target=work, args=given, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _break(self) -> None:
        for each in tuple(self._open):  # not those that come meanwhile
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._server.accept()
                # Small buffers, so that who sends feels how little passes.
                near.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, PIECE)
                try:
                    far = socket.create_connection(("127.0.0.1", self._behind))
                except ConnectionRefusedError:  # nobody is there any more
                    near.close()
                    continue
                self._open += [near, far]
                for pair in ((near, far, True), (far, near, False)):
                    self._run(self._pass, *pair)

    def _pass(self, source: socket.socket, target: socket.socket, there: bool) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(PIECE):
                while self.frozen.is_set():
                    time.sleep(0.01)
                if there:
                    self.passed += len(piece)
                    if self.cut_at is not None and self.passed >= self.cut_at:
                        self.cut_at = None
                        return self._break()
                else:
                    self.returned += len(piece)
                    if self.freeze_at is not None and self.returned >= self.freeze_at:
                        self.freeze_at = None
                        self.frozen.set()
                if self.rate is not None:
                    time.sleep(len(piece) / self.rate)
                target.sendall(piece)
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
