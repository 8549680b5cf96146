"""Frames over real sockets, on a loop and between the ranks of a trainer, which block: what is sent arrives whole,
and what is no frame ends the connection."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from localkube.pki import Authority
from rollout_common.transfer.connections import blocking_connection, frame_stream, frames
from rollout_common.transfer.connections.blocking_connection import Connection
from rollout_common.transfer.connections.dialing import dial_stream, dial_unix_stream
from rollout_common.transfer.connections.frame_stream import FrameStream
from rollout_common.transfer.connections.frames import (
    FIRST_BYTES,
    HELLO_BYTES,
    MAX_PAYLOAD_BYTES,
    Ended,
    Kind,
    Malformed,
    Refused,
    Silent,
)
from rollout_common.transfer.connections.payload import Payload
from rollout_common.transfer.connections.tls_session import TLS_NAME
from tests.support.unit.plain_dialing import NO_FRAMES, raw_frame
from tests.support.waiting import until

SHORT = 0.1
"""Silence that the impatient ends of these tests bear, in seconds."""

Pair = tuple[FrameStream, FrameStream]


class Blocking:
    """A connection of the ranks of a trainer, whose calls block, called from a loop."""

    _blocking = ("send", "receive", "expect", "read_into", "skip", "close")

    def __init__(self, sock: socket.socket, *, silence: float) -> None:
        vars(self)["_connection"] = Connection(sock, silence=silence)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._connection, name)
        return partial(asyncio.to_thread, found) if name in self._blocking else found

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "silence":
            self._connection.patience(value)
        else:
            setattr(self._connection, name, value)


End = FrameStream | Blocking
Ends = tuple[End, End]


@contextlib.contextmanager
def connected(kind: str) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection, as sockets."""
    if kind == "unix":
        yield socket.socketpair(socket.AF_UNIX)
        return
    with socket.create_server(("127.0.0.1", 0)) as listening:
        first = socket.create_connection(listening.getsockname())
        yield first, listening.accept()[0]


@pytest.fixture(params=["unix", "tcp", "threads"])
async def pair(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Pair]:
    """Both ends of a connection; `threads`: over TCP, and every payload moves in a thread."""
    if request.param == "threads":
        monkeypatch.setattr(frame_stream, "THREADED_BYTES", 1)
    with connected(request.param) as socks:
        ends = FrameStream(socks[0], silence=5), FrameStream(socks[1], silence=5)
    yield ends
    for end in ends:
        await end.close()


@pytest.fixture(params=["unix", "tcp", "threads", "blocking unix", "blocking tcp"])
async def ends(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Ends]:
    """Both ends of a connection, also of the ones that block."""
    made: Callable[..., End] = Blocking if "blocking" in request.param else FrameStream
    if request.param == "threads":
        monkeypatch.setattr(frame_stream, "THREADED_BYTES", 1)
    for module in (frame_stream, blocking_connection):
        monkeypatch.setattr(module, "PING_SECONDS", SHORT / 8)
    with connected(request.param.removeprefix("blocking ")) as socks:
        both = made(socks[0], silence=5), made(socks[1], silence=5)
    yield both
    for end in both:
        await end.close()


async def send_raw(end: End, sent: bytes) -> None:
    """Send bytes that need not be a frame."""
    if isinstance(end, Blocking):
        await asyncio.to_thread(end._sock.sendall, sent)
    else:
        await asyncio.get_running_loop().sock_sendall(end._sock, sent)


async def test_head_and_payload_arrive_as_they_were_sent(ends: Ends) -> None:
    ours, theirs = ends
    payload = os.urandom(MAX_PAYLOAD_BYTES)
    sending = asyncio.create_task(ours.send(Kind.PIECE, {"piece": 7, "name": "ü"}, payload))
    frame = await theirs.receive()
    assert (frame.kind, frame.integer("piece"), frame.text("name")) == (Kind.PIECE, 7, "ü")
    got = bytearray(frame.payload)
    await theirs.read_into(memoryview(got))
    await sending
    assert got == payload
    if isinstance(ours, FrameStream):
        assert ours.bytes_sent == len(payload)
    await theirs.send(Kind.END)
    assert (await ours.expect(Kind.END)).head == {}


async def test_frames_of_several_tasks_never_mix(pair: Pair) -> None:
    ours, theirs = pair
    payloads = [bytes([each]) * (300_000 + each) for each in range(8)]
    sending = asyncio.gather(
        *(ours.send(Kind.PIECE, {"piece": n}, each) for n, each in enumerate(payloads))
    )
    for _ in payloads:
        frame = await theirs.receive()
        got = bytearray(frame.payload)
        await theirs.read_into(memoryview(got))
        assert got == payloads[frame.integer("piece")]
    await sending


@pytest.mark.parametrize("kind", [Kind.GET, Kind.PING])
async def test_an_end_that_sends_without_pause_leaves_others_their_turns(
    pair: Pair, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frame_stream, "HOLD_SECONDS", 0.0)  # after each frame: 100 take less
    ours, theirs = pair
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    for _ in range(100):
        await ours.send(kind)
    await ours.send(Kind.END)
    counting = asyncio.create_task(count_turns())
    while (await theirs.receive()).kind is not Kind.END:
        pass
    counting.cancel()
    assert turns >= 100


async def test_a_payload_that_is_not_wanted_any_more_is_written_no_further(pair: Pair) -> None:
    """The rest is read, so that the next frame is found."""
    ours, theirs = pair
    place = bytearray(8)
    payload = Payload(memoryview(place))
    ours._sock.sendall(raw_frame(Kind.PIECE, b'{"payload":8}') + b"1234")
    await theirs.receive()
    reading = asyncio.create_task(theirs.read_payload(payload))
    await until(lambda: bytes(place) == b"1234\0\0\0\0", what="the first half")
    payload.revoke()
    ours._sock.sendall(b"5678")
    assert not await reading
    assert bytes(place) == b"1234\0\0\0\0"
    await ours.send(Kind.END)
    assert (await theirs.receive()).kind is Kind.END


@pytest.mark.parametrize("pair", ["threads", "tcp"], indirect=True)
async def test_both_ends_send_and_read_at_once_over_tls(pair: Pair, tmp_path: Path) -> None:
    """OpenSSL's session is used by the thread that reads and the one that writes."""
    ours, theirs = pair
    Authority(tmp_path, "ca").issue(
        "worker", "/CN=worker", usage="serverAuth", san=f"DNS:{TLS_NAME}"
    )
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(tmp_path / "worker.crt", tmp_path / "worker.key")
    trusting = ssl.create_default_context(cafile=str(tmp_path / "ca.crt"))
    payloads = [os.urandom(MAX_PAYLOAD_BYTES - each) for each in range(8)]

    async def exchange(end: FrameStream) -> None:
        async def read_all() -> None:
            for each in payloads:
                got = bytearray((await end.receive()).payload)
                await end.read_into(memoryview(got))
                assert got == each

        async with asyncio.TaskGroup() as group:
            group.create_task(read_all())
            for each in payloads:
                await end.send(Kind.PIECE, {}, each)

    async with asyncio.timeout(60):
        await asyncio.gather(ours.secure(trusting, TLS_NAME), theirs.secure(serving))
        await asyncio.gather(exchange(ours), exchange(theirs))


async def test_payload_that_nobody_wants_is_skipped(ends: Ends) -> None:
    ours, theirs = ends
    await ours.send(Kind.PIECE, {}, b"12345")
    await ours.send(Kind.END)
    await theirs.skip(await theirs.receive())
    assert (await theirs.receive()).kind is Kind.END


OVER_UNIX = pytest.mark.parametrize("ends", ["unix", "blocking unix"], indirect=True)


@OVER_UNIX
async def test_a_descriptor_comes_along_with_memory(ends: Ends) -> None:
    ours, theirs = ends
    handle = os.memfd_create("test")
    os.write(handle, b"weights")
    await ours.send(Kind.MEMORY, {"size": 7}, handle=handle)
    os.close(handle)
    theirs.takes_memory = True
    frame = await theirs.expect(Kind.MEMORY)
    assert frame.handle is not None
    assert os.pread(frame.handle, 7, 0) == b"weights"
    assert not os.get_inheritable(frame.handle)
    os.close(frame.handle)


@OVER_UNIX
@pytest.mark.parametrize("kind", [Kind.PING, Kind.MEMORY])
@pytest.mark.parametrize("count", [1, 3])
async def test_a_descriptor_that_is_not_due_is_refused_and_closed(
    ends: Ends, count: int, kind: Kind
) -> None:
    ours, theirs = ends
    before = len(os.listdir("/proc/self/fd"))
    handles = [os.memfd_create("test") for _ in range(count)]
    socket.send_fds(ours._sock, [raw_frame(kind, b"{}")], handles)
    for handle in handles:
        os.close(handle)
    with pytest.raises(Malformed, match="only MEMORY"):
        await theirs.receive()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(("sent", "says"), NO_FRAMES)
async def test_what_is_no_frame_is_refused(
    ends: Ends, sent: bytes, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = ends
    monkeypatch.setattr(frames, "MAX_NESTED", 250_000 if b"[[" in sent else 250)
    monkeypatch.setattr(frames, "MAX_ITEMS", 250)
    await send_raw(ours, sent)
    with pytest.raises(Malformed, match=says):
        await theirs.receive()


async def test_a_strangers_first_frame_is_small_and_no_ping(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frame_stream, "PING_SECONDS", SHORT / 8)
    ours, theirs = pair
    await ours.send(Kind.HELLO, {"ticket": "x" * HELLO_BYTES})
    with pytest.raises(Malformed, match="1024 are the most"):
        await theirs.receive_first()
    theirs.start_pinging()
    ours.silence = SHORT
    with pytest.raises(Silent, match="nothing but pings"):
        await ours.receive_first()


async def test_a_stranger_gets_little_read_by_pings(pair: Pair) -> None:
    ours, theirs = pair
    await ours.send(Kind.PING, {"x": "x" * 900})
    with pytest.raises(Malformed, match="empty and few"):
        await theirs.receive_first()
    for _ in range(HELLO_BYTES // FIRST_BYTES + 1):
        await theirs.send(Kind.PING)
    with pytest.raises(Malformed, match="empty and few"):
        await ours.receive_first()


@pytest.mark.parametrize("made", [FrameStream, Blocking])
async def test_a_connection_cut_anywhere_in_a_frame_has_ended(made: Callable[..., End]) -> None:
    whole = raw_frame(Kind.PIECE, b'{"payload":4}') + b"1234"
    for cut in range(len(whole)):
        with connected("unix") as socks:
            ours, theirs = (made(each, silence=5) for each in socks)
        await send_raw(ours, whole[:cut])
        await ours.close()
        with pytest.raises(Ended):
            await theirs.read_into(memoryview(bytearray((await theirs.receive()).payload)))
        await theirs.close()


async def test_silence_ends_a_connection_in_time(ends: Ends) -> None:
    ours, theirs = ends
    theirs.silence = SHORT
    began = time.monotonic()
    with pytest.raises(Silent):
        await theirs.receive()
    await send_raw(ours, raw_frame(Kind.HELLO, b"{}")[:3])
    with pytest.raises(Silent):
        await theirs.receive()
    assert time.monotonic() - began < 10


async def test_an_end_that_takes_nothing_is_dead(ends: Ends) -> None:
    ours, _ = ends
    ours.silence = SHORT
    payload = bytes(MAX_PAYLOAD_BYTES)

    async def flood() -> None:
        for _ in range(64):
            await ours.send(Kind.PIECE, {}, payload)

    with pytest.raises(Silent, match="nobody took PIECE"):
        await flood()


@pytest.mark.parametrize("ends", ["tcp", "blocking tcp"], indirect=True)
async def test_pings_keep_a_connection_and_are_not_seen(ends: Ends) -> None:
    ours, theirs = ends
    theirs.silence = 5 * SHORT  # a busy machine may hold a ping up for the time of several
    ours.start_pinging()
    receiving = asyncio.create_task(theirs.receive())
    await asyncio.sleep(2 * theirs.silence)
    await ours.send(Kind.END)
    assert (await receiving).kind is Kind.END


async def test_an_interrupt_ends_what_reads(ends: Ends) -> None:
    ours, _ = ends
    reading = asyncio.create_task(ours.receive())
    await asyncio.sleep(0)
    ours.interrupt()
    with pytest.raises(Ended):
        await reading


async def test_an_end_that_leaves_lets_the_other_one_read_the_last_word(pair: Pair) -> None:
    ours, theirs = pair
    await theirs.send(
        Kind.HAVE, {"ranges": [[0, 9]] * 100}
    )  # unread, which would take back the last word
    await ours.send(Kind.ERROR, {"slug": "x", "detail": "the last word"})
    leaving = asyncio.create_task(ours.leave(5))
    with pytest.raises(Refused, match="the last word"):
        await theirs.expect(Kind.READY)
    await theirs.close()
    await asyncio.wait_for(leaving, 1)


async def test_an_error_of_the_other_end_is_raised_with_its_reason(ends: Ends) -> None:
    ours, theirs = ends
    await ours.send(Kind.ERROR, {"slug": "bad-ticket", "detail": "stage again"})
    with pytest.raises(Refused, match="stage again") as caught:
        await theirs.expect(Kind.READY)
    assert caught.value.slug == "bad-ticket"
    await ours.send(Kind.END)
    with pytest.raises(Malformed, match="END came where READY was due"):
        await theirs.expect(Kind.READY)


async def test_an_address_where_nobody_listens_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(Ended, match=f"127.0.0.1:{port}"):
        await dial_stream("127.0.0.1", port, 5)
    with pytest.raises(Ended, match="nowhere"):
        await dial_unix_stream(f"{tmp_path}/nowhere", 5)
    with pytest.raises(Ended, match="no-such-host"):
        await dial_stream("no-such-host.invalid", port, 5)


async def test_unread_words_of_the_other_end_are_seen(ends: Ends) -> None:
    ours, theirs = ends
    assert not theirs.has_unread
    await ours.send(Kind.PING)
    await asyncio.sleep(0.01)
    assert theirs.has_unread
    await theirs.close()
    assert not theirs.has_unread
