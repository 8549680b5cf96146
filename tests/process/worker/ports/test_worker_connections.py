"""Connections that ask for nothing, or for too much: the ports stay reachable."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from rollout_worker.ports import port_connections, server
from rollout_worker.ports.port_connections import (
    MAX_CONTROL_CONNECTIONS,
    MAX_DATA_CONNECTIONS,
    OTHER_DESCRIPTORS,
    PROBE_ALLOWANCE,
    ConnectionPool,
    ConnectionQuota,
    Listener,
    bind_port,
    connection_quota,
    raise_descriptor_limit,
)
from tests.support.unit.loopwatch import watched
from tests.support.unit.served import Served, served
from tests.support.waiting import until

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]
GENERATE = b'{"token_ids": [5], "sampling": {"max_tokens": 40}}'
POST = (
    b"POST /v1/generate HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(GENERATE)
    + GENERATE
)


class Called:
    """A worker behind its sockets, and the connections to it."""

    def __init__(self, worker: Served) -> None:
        self.tiny, self.data, self.control = worker.tiny, worker.data, worker.control
        self.raw: list[Stream] = []

    async def open(self, port: int, text: bytes = b"") -> Stream:
        """A connection that sent this much."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        self.raw.append((reader, writer))
        writer.write(text)
        return reader, writer

    async def get(self, port: int, path: str) -> int:
        """The status of a new call."""
        async with httpx.AsyncClient(trust_env=False, verify=False, timeout=10) as client:
            return (await client.get(f"http://127.0.0.1:{port}{path}")).status_code

    async def reachable(self) -> bool:
        """Whether probes and the operator get their answers."""
        found = (await self.get(self.data, "/health"), await self.get(self.control, "/v1/state"))
        return found == (200, 200)


@contextlib.asynccontextmanager
async def called(
    home: Path, quota: ConnectionQuota | None = None, header_seconds: float = 10.0
) -> AsyncIterator[Called]:
    async with served(home, quota=quota, header_seconds=header_seconds) as worker:
        found = Called(worker)
        yield found
        for _, writer in found.raw:
            writer.close()


async def closed(stream: Stream) -> bool:
    """Whether the worker closes a connection."""
    with contextlib.suppress(ConnectionError):
        return await asyncio.wait_for(stream[0].read(), 10) == b""
    return True


@pytest.mark.parametrize("sent", [b"", b"GET /hea", b"POST /v1/generate HTTP/1.1\r\nHost: a\r\n"])
async def test_half_open_connections_give_way(tmp_path: Path, sent: bytes) -> None:
    async with called(tmp_path, ConnectionQuota(data=PROBE_ALLOWANCE + 8, control=4)) as worker:
        streams = [await worker.open(worker.data, sent) for _ in range(3 * PROBE_ALLOWANCE)]
        streams += [await worker.open(worker.control, sent) for _ in range(20)]
        assert await worker.reachable()
        assert await closed(streams[0]), "the oldest"
        assert await closed(streams[-20])


async def test_a_crowd_at_once_takes_the_places_of_who_asks_for_nothing(tmp_path: Path) -> None:
    async with called(tmp_path, ConnectionQuota(data=30, control=30)) as worker:
        for port in (worker.data, worker.control):
            idle = [await worker.open(port) for _ in range(30)]
            crowd = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
            assert await worker.get(port, "/openapi.json") == 200
            for each in crowd:
                each.setblocking(False)
                with pytest.raises(BlockingIOError):  # neither closed nor reset
                    each.recv(1)
                each.close()
            assert all([await closed(each) for each in idle[:20]])
            assert not idle[-1][0].at_eof()


async def test_who_reads_no_answer_keeps_no_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(port_connections, "UNREAD_ANSWER_SECONDS", 0.5)
    monkeypatch.setattr(port_connections, "SWEEP_INTERVAL_SECONDS", 0.05)
    async with called(tmp_path, ConnectionQuota(data=3, control=4)) as worker:
        loop, asks = asyncio.get_running_loop(), b"GET /openapi.json HTTP/1.1\r\nHost: a\r\n\r\n"
        with contextlib.ExitStack() as kept:
            for _ in range(3):
                sock = kept.enter_context(socket.socket())
                sock.setblocking(False)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                await loop.sock_connect(sock, ("127.0.0.1", worker.data))
                await loop.sock_sendall(sock, asks * 1000)
                await loop.sock_recv(sock, 1)  # it is being answered
            async with asyncio.timeout(30):
                while True:
                    with contextlib.suppress(httpx.TransportError):
                        assert await worker.get(worker.data, "/health") == 200
                        break
                    await asyncio.sleep(0.1)


class Telling(asyncio.Protocol):
    """Says much, and gives up before the end."""

    cycle = SimpleNamespace(response_complete=False)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(bytes(MUCH))
        transport.close()


MUCH = 2**24


async def test_the_end_of_an_answer_is_waited_for_while_it_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(port_connections, "UNREAD_ANSWER_SECONDS", 0.8)
    monkeypatch.setattr(port_connections, "SWEEP_INTERVAL_SECONDS", 0.05)
    room = ConnectionPool(4)
    sock = bind_port("127.0.0.1", 0, "--data-port")
    listener = Listener(sock, Telling, room)
    reader, writer = await asyncio.open_connection(*sock.getsockname(), limit=2**16)
    _, other = await asyncio.open_connection(*sock.getsockname(), limit=2**16)
    await until(lambda: len(room.connections) == 2, what="both")
    found = 0
    while piece := await reader.read(2**20):
        found += len(piece)
        await asyncio.sleep(0.02)
    assert found == MUCH, "who reads slowly gets everything"
    await until(lambda: not room.connections, what="the end of who reads nothing")
    for each in (writer, other):
        each.close()
    listener.close()
    await listener.wait_closed()


async def test_a_header_that_does_not_end_is_given_up(tmp_path: Path) -> None:
    async with called(tmp_path, header_seconds=0.2) as worker:
        for port in (worker.data, worker.control):
            first = await worker.open(port, b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n")
            kept = await worker.open(port, b"GET /openapi.json HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            await kept[0].readuntil(b"\r\n\r\n")
            assert await closed(first)
            kept[1].write(b"GET /again")
            with contextlib.suppress(ConnectionError):
                await asyncio.wait_for(kept[0].read(), 10)


async def test_a_connection_kept_alive_is_kept(tmp_path: Path) -> None:
    async with called(tmp_path, header_seconds=0.1) as worker:
        reader, writer = await worker.open(worker.data)
        for _ in range(2):
            writer.write(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
            assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(len(b'{"status":"ok","lifecycle":"Active"}'))
            await asyncio.sleep(0.3)  # longer than a header may take: none has begun


async def test_requests_leave_places_to_probes(tmp_path: Path) -> None:
    async with called(tmp_path, ConnectionQuota(data=PROBE_ALLOWANCE + 4, control=4)) as worker:
        for _ in range(4):
            await worker.open(worker.data, POST)
        await until(lambda: len(worker.tiny.flights) == 4, what="the requests")
        reader, _ = await worker.open(worker.data, POST)
        assert b" 429 " in await asyncio.wait_for(reader.readline(), 10)
        assert b'refused_total{reason="queue-full"} 1.0' in worker.tiny.worker.render_metrics()
        assert await worker.reachable()
        worker.tiny.engine.free = True
        for reader, _ in worker.raw[:4]:
            assert b" 200 " in await asyncio.wait_for(reader.readline(), 10)


async def test_who_answers_is_never_closed_for_others(tmp_path: Path) -> None:
    async with called(tmp_path, ConnectionQuota(data=3, control=4)) as worker:
        reader, _ = await worker.open(worker.data, POST)
        await until(lambda: len(worker.tiny.flights), what="the request")
        for _ in range(10):
            await worker.open(worker.data, b"GET")
        assert await worker.reachable()
        worker.tiny.engine.free = True
        assert b" 200 " in await asyncio.wait_for(reader.readline(), 10)


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    """No more descriptors than are open."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def use_up() -> list[int]:
    """Open whatever may be opened yet."""
    found: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    with contextlib.suppress(OSError):
        while True:
            found.append(os.open(os.devnull, os.O_RDONLY))
    return found


async def test_no_descriptor_left_ends_no_listening(tmp_path: Path, few_descriptors: None) -> None:
    async with called(tmp_path) as worker:
        waiting = []
        for port in (worker.data, worker.control):
            sock = socket.socket()
            sock.setblocking(False)
            waiting.append((sock, port))
        used = use_up()
        try:
            for sock, port in waiting:  # the kernel accepts them, the worker can't
                await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
            await asyncio.sleep(0.3)
        finally:
            for each in used:
                os.close(each)
        for sock, _ in waiting:
            await asyncio.get_running_loop().sock_sendall(
                sock, b"GET /openapi.json HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
            )
            answer = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(sock, 1024), 10)
            assert b" 200 " in answer
            sock.close()


UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n"
FORMS = {
    "HEAD": b"HEAD /health HTTP/1.1\r\nHost: a\r\n\r\n",
    "whole URL": b"GET http://a:80/v1/info?x=1 HTTP/1.1\r\nHost: a\r\n\r\n",
    "whole URL, posted": POST.replace(b" /", b" http://[::1/", 1),
    "offers HTTP/2": POST.replace(b"Host: a\r\n", b"Host: a\r\n" + UPGRADE),
    "offers a WebSocket": b"GET /ready HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\n"
    b"Upgrade: websocket\r\n\r\n",
}
"""What Java's client, load balancers and clients of a proxy send."""


@pytest.mark.parametrize("sent", FORMS.values(), ids=FORMS)
async def test_a_request_in_any_form_is_answered_and_the_next_one_too(
    tmp_path: Path, sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with called(tmp_path) as worker:
        worker.tiny.engine.free = True
        reader, writer = await worker.open(worker.data)
        for _ in range(2):
            writer.write(sent)
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
            assert b" 200 " in head
            length = int(head.partition(b"content-length: ")[2].split()[0])
            assert length > 0
            await reader.readexactly(0 if sent.startswith(b"HEAD") else length)
    assert not caplog.records


async def test_a_body_that_is_late_for_the_end_is_sent_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server, "ANSWER_FLUSH_SECONDS", 0.2)
    async with served(tmp_path) as worker:
        reader, writer = await asyncio.open_connection("127.0.0.1", worker.data)
        writer.write(POST[:-1])
        await asyncio.sleep(0.2)
    assert b" 503 " in await asyncio.wait_for(reader.readline(), 10)
    assert b"use another replica" in await asyncio.wait_for(reader.read(), 10)
    writer.close()
    assert "Traceback" not in caplog.text


async def test_a_body_in_tiny_chunks_holds_nothing(tmp_path: Path) -> None:
    async with called(tmp_path) as worker:
        body = b'{"token_ids": [' + b"5," * 2**14 + b"5]}"
        chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
        head = b"POST /v1/generate HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
        held = []
        for _ in range(4):
            async with watched() as watch:
                reader, writer = await worker.open(worker.data, head)
                for start in range(0, len(chunks), 2**16):
                    writer.write(chunks[start : start + 2**16])
                    await writer.drain()
                assert b" 413 " in await asyncio.wait_for(reader.readline(), 30)
            held.append(watch.seconds)
            # A slow processor takes 0.08 to 0.12, and 0.35 to 0.55 in reads of asyncio's own size.
            if watch.seconds < 0.2:
                break
        assert min(held) < 0.2


def test_the_limit_of_descriptors_is_raised_and_shared_out(few_descriptors: None) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    assert connection_quota() == ConnectionQuota(
        data=1024 - MAX_CONTROL_CONNECTIONS - OTHER_DESCRIPTORS
    )
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    assert connection_quota().data > 0
    raise_descriptor_limit()
    soft, same = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert soft >= min(hard, 2**16) > 1024
    assert same == hard
    assert connection_quota().data == min(
        MAX_DATA_CONNECTIONS, soft - MAX_CONTROL_CONNECTIONS - OTHER_DESCRIPTORS
    )
