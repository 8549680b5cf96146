"""Callers that have no business at a port, by the hundred: silent, slow, endless, or talking nonsense."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator

from rollout_common.transfer.connections.frames import Kind
from tests.support.unit.plain_dialing import raw_frame

Connect = Callable[[], socket.socket]
MANY = 150
"""More than any of these ports has places for strangers."""
ENDLESS = 4
ENDLESS_BYTES = 24 << 20
"""What each of a few endless callers tries to get read."""
TICK_SECONDS = 0.02
AGAIN_SECONDS = 0.5
"""After which one that was turned away calls again: all together 300 times a second."""
PING = raw_frame(Kind.PING, b"{}")
HTTP = b"POST /v1/generate HTTP/1.1\r\nHost: a\r\nContent-Length: 9000\r\nX: "
FRAMES = raw_frame(Kind.HELLO, b'{"ticket":"' + b"0" * 32 + b'","protocol":2}')


def silent(http: bool) -> Iterator[bytes]:
    """Says nothing, and stays."""
    while True:
        yield b""


def loris(http: bool) -> Iterator[bytes]:
    """Says something sensible, byte by byte, without an end."""
    for byte in HTTP if http else raw_frame(Kind.HELLO, b" " * 1000):
        yield bytes([byte])
    while True:
        yield b" "


def pinging(http: bool) -> Iterator[bytes]:
    """Says again and again that it is there."""
    while True:
        yield b"\r\n" if http else PING


def half(http: bool) -> Iterator[bytes]:
    """Says half of what it should, and waits."""
    yield HTTP[:40] if http else FRAMES[: len(FRAMES) // 2]
    while True:
        yield b""


def garbage(http: bool) -> Iterator[bytes]:
    """Says nonsense."""
    yield random.Random(7).randbytes(4096)
    while True:
        yield b""


def endless(http: bool) -> Iterator[bytes]:
    """Says more than anybody should read, all of which would have to be parsed."""
    yield HTTP if http else raw_frame(Kind.HELLO, b"[", 64 << 20)
    while True:
        yield b"{}," * (1 << 16)


KINDS = (silent, loris, pinging, half, garbage, endless)
Kind_ = Callable[[bool], Iterator[bytes]]


@contextlib.contextmanager
def crowd(connect: Connect, kind: Kind_, *, http: bool) -> Iterator[None]:
    """Have a crowd of them at a port; who is turned away calls again, as long as this lasts."""
    over = threading.Event()
    count = ENDLESS if kind is endless else MANY
    callers = [_Caller(connect, kind, http=http) for _ in range(count)]

    def run() -> None:
        while not over.is_set():
            for each in callers:
                each.step()
            time.sleep(TICK_SECONDS)

    for each in callers:
        each.step()
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        for each in callers:
            each.leave()


class _Caller:
    def __init__(self, connect: Connect, kind: Kind_, *, http: bool) -> None:
        self._connect, self._kind, self._http = connect, kind, http
        self._sock: socket.socket | None = None
        self._left = ENDLESS_BYTES
        self._called = -AGAIN_SECONDS

    def step(self) -> None:
        """Say the next thing; call again if the other end has hung up."""
        try:
            if self._sock is None:
                if time.monotonic() - self._called < AGAIN_SECONDS:
                    return
                self._called = time.monotonic()
                self._sock = self._connect()
                self._sock.setblocking(False)
                self._words = self._kind(self._http)
            self._say()
        except OSError:
            self.leave()

    def _say(self) -> None:
        assert self._sock is not None
        with contextlib.suppress(BlockingIOError):
            if not self._sock.recv(4096):
                return self.leave()
        with contextlib.suppress(BlockingIOError):
            for _ in range(64):
                words = next(self._words)
                self._sock.send(words[: self._left])
                self._left -= len(words)
                if len(words) < 4096:  # one thing at a time, unless it floods
                    break
                if self._left <= 0:
                    return self.leave()
        return None

    def leave(self) -> None:
        sock, self._sock = self._sock, None
        if sock is not None:
            sock.close()
