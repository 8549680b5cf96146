"""Payloads that threads move: their memory can be taken from them at any time."""

from __future__ import annotations

import socket
import threading

import pytest

from rollout_common.transfer.connections.payload import Payload


def test_memory_that_was_revoked_is_left_alone() -> None:
    """To revoke it takes as long as the call that writes to it, and no later call is made."""
    payload = Payload(memoryview(bytearray(1 << 24)))
    began, may_end = threading.Event(), threading.Event()

    def write_slowly(view: memoryview) -> int:
        began.set()
        assert may_end.wait(10)
        view[0] = 1
        return 1

    with socket.socket() as unused:
        moving = threading.Thread(target=payload.move, args=(write_slowly, unused, 0, 0))
        moving.start()
        assert began.wait(10)
        revoking = threading.Thread(target=payload.revoke)
        revoking.start()
        revoking.join(0.05)
        assert revoking.is_alive(), "the memory is still being written"
        may_end.set()
        revoking.join(10)
        count = payload.count
        moving.join(10)
    assert not revoking.is_alive()
    assert not moving.is_alive()
    assert payload.count == count >= 1
    assert not payload.is_moving


def test_bytes_are_noted_as_they_move() -> None:
    counts: list[int] = []
    ours, theirs = socket.socketpair()
    with ours, theirs, memoryview(bytearray(6)) as view:
        ours.setblocking(False)
        payload = Payload(view, counts.append)
        theirs.sendall(b"abc")
        assert payload.move(ours.recv_into, ours, 1, 0), "more has to come"
        theirs.sendall(b"defg")
        assert not payload.move(ours.recv_into, ours, 1, 0)
        assert (bytes(view), counts) == (b"abcdef", [3, 6])
        assert ours.recv(9) == b"g"


def test_an_error_of_the_socket_is_the_callers() -> None:
    def fail(_: memoryview) -> int:
        raise ConnectionResetError

    with socket.socket() as unused, pytest.raises(ConnectionResetError):
        Payload(memoryview(bytearray(1))).move(fail, unused, 0, 0)
