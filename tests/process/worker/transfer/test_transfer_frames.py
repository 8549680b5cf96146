"""Frames between the ranks of a trainer, over real sockets: what is sent arrives whole, and what is no frame ends the connection."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from rollout_common.transfer.connections import blocking_connection as connection
from rollout_common.transfer.connections import frames
from rollout_common.transfer.connections.blocking_connection import Connection
from rollout_common.transfer.connections.frames import (
    MAX_PAYLOAD_BYTES,
    Ended,
    Kind,
    Malformed,
    Refused,
    Silent,
    TransferError,
)
from tests.support.unit.plain_dialing import NO_FRAMES, keep_alive, raw_frame

SHORT = 0.2
"""Silence that the impatient ends of these tests bear, in seconds."""


@pytest.fixture(params=["unix", "tcp"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Connection, Connection]]:
    """Both ends of a connection."""
    if request.param == "unix":
        socks = socket.socketpair(socket.AF_UNIX)
    else:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            first = socket.create_connection(listening.getsockname())
            socks = first, listening.accept()[0]
    ends = Connection(socks[0], silence=5), Connection(socks[1], silence=5)
    yield ends
    for end in ends:
        end.close()


def test_head_and_payload_arrive_as_they_were_sent(pair: tuple[Connection, Connection]) -> None:
    ours, theirs = pair
    payload = os.urandom(MAX_PAYLOAD_BYTES)
    sending = threading.Thread(
        target=lambda: ours.send(Kind.DATA, {"offset": 7, "hash": "ü"}, payload)
    )
    sending.start()
    frame = theirs.receive()
    assert (frame.kind, frame.integer("offset"), frame.text("hash")) == (Kind.DATA, 7, "ü")
    assert frame.payload == len(payload)
    got = bytearray(frame.payload)
    theirs.read_into(memoryview(got))
    sending.join()
    assert got == payload
    theirs.send(Kind.END)
    assert ours.expect(Kind.END).head == {}


def test_payload_that_nobody_wants_is_skipped(pair: tuple[Connection, Connection]) -> None:
    ours, theirs = pair
    ours.send(Kind.DATA, {}, b"12345")
    ours.send(Kind.END)
    theirs.skip(theirs.receive())
    assert theirs.receive().kind is Kind.END


def test_a_descriptor_comes_along_with_memory() -> None:
    ours, theirs = map(Connection, socket.socketpair(socket.AF_UNIX))
    handle = os.memfd_create("test")
    os.write(handle, b"weights")
    ours.send(Kind.MEMORY, {"size": 7}, handle=handle)
    os.close(handle)
    theirs.takes_memory = True
    frame = theirs.expect(Kind.MEMORY)
    assert frame.handle is not None
    assert os.pread(frame.handle, 7, 0) == b"weights"
    assert not os.get_inheritable(frame.handle)
    os.close(frame.handle)
    for end in (ours, theirs):
        end.close()


def descriptors() -> set[str]:
    """Descriptors of this process, but the one that looks."""
    return set(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("kind", [Kind.PING, Kind.MEMORY])
@pytest.mark.parametrize("count", [1, 3])
def test_a_descriptor_that_is_not_due_is_refused_and_closed(count: int, kind: Kind) -> None:
    ours, theirs = map(Connection, socket.socketpair(socket.AF_UNIX))
    before = len(descriptors())
    handles = [os.memfd_create("test") for _ in range(count)]
    with socket.socket(fileno=os.dup(ours._sock.fileno())) as sock:
        socket.send_fds(sock, [raw_frame(kind, b"{}")], handles)
    for handle in handles:
        os.close(handle)
    with pytest.raises(Malformed, match="only MEMORY"):
        theirs.receive()
    assert len(descriptors()) == before
    for end in (ours, theirs):
        end.close()


@pytest.mark.parametrize(("sent", "says"), NO_FRAMES)
def test_what_is_no_frame_is_refused(
    pair: tuple[Connection, Connection],
    sent: bytes,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = pair
    monkeypatch.setattr(frames, "MAX_NESTED", 250_000 if b"[[" in sent else 250)
    monkeypatch.setattr(frames, "MAX_ITEMS", 250)
    ours._sock.sendall(sent)
    with pytest.raises(Malformed, match=says):
        theirs.receive()


def test_a_connection_cut_anywhere_in_a_frame_has_ended() -> None:
    whole = raw_frame(Kind.DATA, b'{"payload":4}') + b"1234"
    for cut in range(len(whole)):
        ours, theirs = map(Connection, socket.socketpair())
        ours._sock.sendall(whole[:cut])
        ours.close()
        with pytest.raises(Ended):
            theirs.read_into(memoryview(bytearray(theirs.receive().payload)))
        theirs.close()


def test_silence_ends_a_connection_in_time(pair: tuple[Connection, Connection]) -> None:
    ours, theirs = pair
    theirs.patience(SHORT)
    began = time.monotonic()
    with pytest.raises(Silent):
        theirs.receive()
    ours._sock.sendall(raw_frame(Kind.HELLO, b"{}")[:3])
    with pytest.raises(Silent):
        theirs.receive()
    assert time.monotonic() - began < 10


def test_who_takes_nothing_is_dead(pair: tuple[Connection, Connection]) -> None:
    ours, _ = pair
    ours.patience(SHORT)
    payload = bytes(MAX_PAYLOAD_BYTES)

    def flood() -> None:
        for _ in range(64):
            ours.send(Kind.DATA, {}, payload)

    with pytest.raises(Silent):
        flood()


def test_pings_keep_a_connection_and_are_not_seen(
    pair: tuple[Connection, Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "PING_SECONDS", SHORT / 8)
    ours, theirs = pair
    theirs.patience(SHORT)
    keep_alive(ours)
    later = threading.Timer(SHORT * 3, lambda: ours.send(Kind.END))
    later.start()
    assert theirs.receive().kind is Kind.END
    later.join()


def test_closing_wakes_whoever_reads(pair: tuple[Connection, Connection]) -> None:
    ours, _ = pair
    found: list[Exception] = []

    def read() -> None:
        try:
            ours.receive()
        except TransferError as error:
            found.append(error)

    reading = threading.Thread(target=read)
    reading.start()
    ours.interrupt()
    reading.join(5)
    assert not reading.is_alive()
    assert isinstance(found[0], Ended)


def test_an_error_of_the_other_end_is_told_with_its_reason(
    pair: tuple[Connection, Connection],
) -> None:
    ours, theirs = pair
    ours.send(Kind.ERROR, {"slug": "bad-ticket", "detail": "stage again"})
    with pytest.raises(Refused, match="stage again") as caught:
        theirs.expect(Kind.READY)
    assert caught.value.slug == "bad-ticket"
    ours.send(Kind.END)
    with pytest.raises(Malformed, match="END came where READY was due"):
        theirs.expect(Kind.READY)
