"""Small messages with descriptors: their bounds, what is no message, ends that are closed, and no descriptor left."""

from __future__ import annotations

import array
import contextlib
import gc
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollout_common.transfer.connections.descriptor_messages import (
    MAX_DESCRIPTORS,
    MESSAGE_BYTES,
    close_descriptors,
    dial_messages,
    make_socket,
    receive_message,
    send_message,
)
from rollout_common.transfer.connections.frames import Ended, Malformed, Silent

Ends = tuple[socket.socket, socket.socket]
EMPTY = len(json.dumps({"x": ""}, separators=(",", ":")))


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Every descriptor that a test opened is closed again."""
    gc.collect()
    before = sorted(os.listdir("/proc/self/fd"))
    yield
    assert sorted(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def ends(nothing_left: None) -> Iterator[Ends]:
    del nothing_left
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here, there:
        there.settimeout(5)
        yield here, there


def filled(nbytes: int) -> dict[str, Any]:
    """A message of this length."""
    return {"x": "y" * (nbytes - EMPTY)}


@pytest.mark.parametrize("handles", [0, 1, MAX_DESCRIPTORS])
@pytest.mark.parametrize("nbytes", [EMPTY, MESSAGE_BYTES])
def test_a_message_arrives_whole_with_its_descriptors(
    ends: Ends, tmp_path: Path, nbytes: int, handles: int
) -> None:
    with (tmp_path / "file").open("wb") as file:
        send_message(ends[0], filled(nbytes), [file.fileno()] * handles)
        head, found = receive_message(ends[1])
        assert (head, len(found)) == (filled(nbytes), handles)
        assert all(os.path.sameopenfile(each, file.fileno()) for each in found)
        assert not any(os.get_inheritable(each) for each in found)
    close_descriptors(found)


@pytest.mark.parametrize(
    ("nbytes", "handles"), [(MESSAGE_BYTES + 1, 0), (EMPTY, MAX_DESCRIPTORS + 1)]
)
def test_what_is_too_much_is_not_sent(ends: Ends, nbytes: int, handles: int) -> None:
    with pytest.raises(ValueError, match="too much to send"):
        send_message(ends[0], filled(nbytes), [0] * handles)
    send_message(ends[0], {})
    assert receive_message(ends[1]) == ({}, [])


@pytest.mark.parametrize(
    ("sent", "handles"),
    [
        (b'{"x":"' + b"y" * MESSAGE_BYTES + b'"}', 2),
        (b"{}", MAX_DESCRIPTORS + 3),
        (b"{}}", 2),
        (b'{"x":', 2),
        (b"\xff", 2),
        (b"[" * 100_000, 2),
        (b'{"x":' * 30_000, 2),
        (b'{"x":' + b"9" * 10_000 + b"}", 2),
        (b"[]", 2),
        (b"null", 2),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_what_is_no_message_is_refused_and_its_descriptors_closed(
    ends: Ends, sent: bytes, handles: int
) -> None:
    files = array.array("i", [0] * handles)
    ends[0].sendmsg([sent], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)])
    with pytest.raises(Malformed):
        receive_message(ends[1])
    send_message(ends[0], {"next": 1})
    assert receive_message(ends[1]) == ({"next": 1}, [])


def test_an_end_that_is_closed_shows_at_the_other(ends: Ends) -> None:
    here, there = ends
    send_message(here, {"last": 1}, [0])
    here.close()
    head, found = receive_message(there)
    assert head == {"last": 1}
    close_descriptors([*found, -1])
    for _ in range(2):
        with pytest.raises(Ended):
            receive_message(there)
        with pytest.raises(Ended):
            send_message(there, {}, [0])
    for act in (lambda: send_message(here, {}), lambda: receive_message(here)):
        with pytest.raises(Ended):
            act()


def test_unread_messages_close_their_descriptors_with_their_socket(ends: Ends) -> None:
    reader, writer = os.pipe()
    send_message(ends[0], {}, [writer])
    os.close(writer)
    os.set_blocking(reader, False)
    with pytest.raises(BlockingIOError):
        os.read(reader, 1)
    ends[1].close()
    assert os.read(reader, 1) == b""
    os.close(reader)


@pytest.mark.parametrize("seconds", [0, 0.05])
def test_who_does_not_block_or_waits_long_enough_is_told(ends: Ends, seconds: float) -> None:
    for each in ends:
        each.settimeout(seconds)
    began = time.monotonic()
    with pytest.raises(Silent, match="no message"):
        receive_message(ends[1])

    def send_on() -> None:
        while True:
            send_message(ends[0], filled(MESSAGE_BYTES), [0])

    with pytest.raises(Silent, match="does not read"):
        send_on()
    assert time.monotonic() - began < 5


def test_where_nobody_listens_the_path_is_named(tmp_path: Path, nothing_left: None) -> None:
    del nothing_left
    (tmp_path / "file").touch()
    with make_socket() as stale:
        stale.bind(str(tmp_path / "stale"))
    for name in ("missing", "file", "stale", "x" * 200):
        with pytest.raises(Ended, match=f"nobody listens at .*{name[:50]}"):
            dial_messages(tmp_path / name, 1)


def test_a_listener_that_is_busy_is_waited_for(tmp_path: Path, nothing_left: None) -> None:
    del nothing_left
    path = tmp_path / "busy"
    with make_socket() as listener, contextlib.ExitStack() as others:
        listener.bind(str(path))
        listener.listen(1)
        for _ in range(2):
            others.enter_context(dial_messages(path, 1))
        with pytest.raises(Ended):
            dial_messages(path, 0.05)
        timer = threading.Timer(0.1, lambda: others.enter_context(listener.accept()[0]))
        timer.start()
        dial_messages(path, 5).close()
        timer.join()
