"""The operator's connections against real servers on loopback."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import ssl
import time
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from aiohttp import web

from localkube.pki import Authority
from rollout_client.worker_control import ControlError, ControlUnreachable, WorkerControl
from rollout_operator.api.names import CONTROL_TLS_NAME
from rollout_operator.config import ConfigError
from rollout_operator.workers import worker_connections
from rollout_operator.workers.worker_connections import WorkerConnections
from rollout_operator.workers.worker_exchange import MAX_ANSWER_BYTES
from rollout_worker.schemas import RequireRequest
from tests.support.loopback import Loopback, loopback
from tests.support.unit.states import serving_state
from tests.support.waiting import until

STATE = serving_state()


async def no_token() -> str | None:
    return None


@pytest.fixture
async def worker() -> AsyncIterator[Loopback]:
    async with loopback() as running:
        yield running


@pytest.fixture
async def control(worker: Loopback) -> AsyncIterator[WorkerControl]:
    connections = WorkerConnections()
    yield WorkerControl(worker.url, no_token, connections.send_request)
    await connections.close()


async def test_a_body_goes_out_and_an_answer_comes_back(
    worker: Loopback, control: WorkerControl
) -> None:
    worker.answer("POST", "/v1/require", {"active": None, "required": {"epoch": 2, "version": 3}})
    answer = await control.require(RequireRequest(epoch=2, min_version=3))
    assert answer.required is not None
    assert answer.required.as_tuple() == (2, 3)
    assert worker.requests == [("POST", "/v1/require", '{"epoch":2,"min_version":3}')]
    assert worker.headers[0]["Content-Type"] == "application/json"


BODY = json.dumps(STATE).encode()
HALF = len(BODY) // 2
CHUNKS = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (BODY[:HALF], BODY[HALF:], b""))


@pytest.mark.parametrize(
    ("answer", "idle_seconds", "opened"),
    [
        pytest.param(b"Content-Length: %d\r\n\r\n%b" % (len(BODY), BODY), 60, 1, id="by length"),
        pytest.param(b"Transfer-Encoding: chunked\r\n\r\n" + CHUNKS, 60, 1, id="in chunks"),
        pytest.param(b"\r\n" + BODY, 60, 2, id="until the end"),
        pytest.param(
            b"Content-Length: %d\r\n\r\n%b" % (len(BODY), BODY), -1, 2, id="idle for long"
        ),
    ],
)
async def test_a_connection_is_used_again_where_it_can_be(
    monkeypatch: pytest.MonkeyPatch, answer: bytes, idle_seconds: float, opened: int
) -> None:
    monkeypatch.setattr(worker_connections, "KEEPALIVE_IDLE_SECONDS", idle_seconds)
    heard = left = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal heard, left
        heard, left = heard + 1, left + 1
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(b"HTTP/1.1 200 OK\r\n" + answer)
                if answer.startswith(b"\r\n"):
                    break
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
        left -= 1

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    connections = WorkerConnections()
    for _ in range(2):
        answered = await WorkerControl(url, no_token, connections.send_request).state()
        assert answered.boot_id == "b1"
    assert heard == opened
    await connections.close()
    await until(lambda: not left, what="the ends of all connections")
    server.close()


async def test_silence_ends_at_the_deadline(worker: Loopback, control: WorkerControl) -> None:
    worker.delay("GET", "/v1/state", {}, 5)
    began = time.monotonic()
    with pytest.raises(ControlUnreachable, match=r"no answer within 0\.2 s"):
        await control.state(timeout=0.2)
    assert time.monotonic() - began < 2


async def test_packets_that_are_dropped_are_told_from_a_process_that_hangs() -> None:
    """As by a NetworkPolicy: a listener whose queue is full has the kernel drop what asks for a connection."""
    with socket.socket() as listener, ExitStack() as waiting:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            each = waiting.enter_context(socket.socket())
            each.setblocking(False)
            each.connect_ex(listener.getsockname())
        connections = WorkerConnections()
        control = WorkerControl(
            f"http://127.0.0.1:{listener.getsockname()[1]}", no_token, connections.send_request
        )
        with pytest.raises(ControlUnreachable, match=r"no connection within 0\.5 s"):
            await control.state(timeout=0.5)
        await connections.close()


async def test_nobody_there_is_named_with_the_reason() -> None:
    connections = WorkerConnections()
    with pytest.raises(ControlUnreachable, match=r"GET http://127\.0\.0\.1:1/v1/state: .*refused"):
        await WorkerControl("http://127.0.0.1:1", no_token, connections.send_request).state()
    await connections.close()


async def test_a_worker_that_went_away_between_two_requests_is_unreachable() -> None:
    connections = WorkerConnections()
    async with loopback() as worker:
        worker.answer("POST", "/v1/require", {"active": None})
        control = WorkerControl(worker.url, no_token, connections.send_request)
        await control.require(RequireRequest(epoch=1))
    await asyncio.sleep(0)
    with pytest.raises(ControlUnreachable):
        await control.require(RequireRequest(epoch=1))
    await connections.close()


async def test_300_calls_that_wait_leave_room_for_the_polls_of_other_heads(
    worker: Loopback,
) -> None:
    worker.delay("POST", "/v1/wake", STATE, 60)
    connections = WorkerConnections()
    async with loopback() as other:
        other.answer("GET", "/v1/state", STATE)
        control = WorkerControl(worker.url, no_token, connections.send_request)
        calls = [asyncio.create_task(control.wake(timeout=60)) for _ in range(300)]
        await until(lambda: worker.at_once == 300, what="all calls")
        answer = await WorkerControl(other.url, no_token, connections.send_request).state(timeout=5)
        assert answer.boot_id == "b1"
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
    await connections.close()


async def test_over_tls_the_certificate_must_be_for_workers(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "ca")
    for name, san in (("worker", f"DNS:{CONTROL_TLS_NAME}"), ("other", "DNS:other,IP:127.0.0.1")):
        authority.issue(name, f"/CN={name}", usage="serverAuth", san=san)
    connections = WorkerConnections(tmp_path / "ca.crt")
    assert await said_to(connections, tmp_path / "worker") == [b"POST /v1/require HTTP/1.1"]
    with pytest.raises(
        ControlUnreachable, match="certificate is not valid for 'rollout-worker'"
    ) as no:
        await said_to(connections, tmp_path / "other")
    assert "object at 0x" not in str(no.value)
    await connections.close()


async def test_a_worker_without_tls_is_named_without_addresses_in_memory(
    worker: Loopback, tmp_path: Path
) -> None:
    Authority(tmp_path, "ca")
    connections = WorkerConnections(tmp_path / "ca.crt")
    url = worker.url.replace("http:", "https:")
    with pytest.raises(ControlUnreachable) as told:
        await WorkerControl(url, no_token, connections.send_request).state()
    assert f"GET {url}/v1/state: [SSL" in str(told.value), "status repeats it: it must not vary"
    assert "object at 0x" not in str(told.value)
    await connections.close()


async def test_a_connection_over_tls_keeps_little_memory(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "ca")
    authority.issue("worker", "/CN=worker", usage="serverAuth", san=f"DNS:{CONTROL_TLS_NAME}")
    connections = WorkerConnections(tmp_path / "ca.crt")
    for _ in range(3):  # what is made once, and stays
        await said_to(connections, tmp_path / "worker")
    tracemalloc.start()
    servers = [await tls_server(tmp_path / "worker") for _ in range(20)]
    try:
        before, _ = tracemalloc.get_traced_memory()
        for server in servers:
            await ask_over_tls(connections, server)
        kept = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    # The servers have as many connections, in this process, too.
    assert kept < 2 * len(servers) * 100_000
    await connections.close()
    for server in servers:
        server.close()


async def tls_server(files: Path, heard: list[bytes] | None = None) -> asyncio.Server:
    """A server that answers one request of each connection, which it keeps; `heard` gets the first lines."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = await reader.readline()
        if heard is not None:
            heard.append(line.strip())
        body = b'{"active": null}'
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        await reader.read()

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(files.with_suffix(".crt"), files.with_suffix(".key"))
    return await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)


async def ask_over_tls(connections: WorkerConnections, server: asyncio.Server) -> None:
    url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    await WorkerControl(url, no_token, connections.send_request).require(RequireRequest(epoch=1))


async def said_to(connections: WorkerConnections, files: Path) -> list[bytes]:
    """The first lines that a TLS server with this certificate reads."""
    heard: list[bytes] = []
    server = await tls_server(files, heard)
    try:
        await ask_over_tls(connections, server)
    finally:
        server.close()
    return heard


def test_a_ca_that_is_none_is_a_wrong_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--control-ca-file .* can.t be used"):
        WorkerConnections(tmp_path / "none")


async def test_an_answer_without_end_is_refused(worker: Loopback, control: WorkerControl) -> None:
    """Any user of the cluster may choose the image that answers here."""
    worker.answer("GET", "/v1/state", {"filler": "x" * (MAX_ANSWER_BYTES + 1)})
    with pytest.raises(ControlUnreachable, match="the answer has more than 4 MiB"):
        await control.state()


async def test_an_answer_is_never_unpacked(worker: Loopback, control: WorkerControl) -> None:
    packed = gzip.compress(b"{" + b" " * (64 << 20) + b"}")

    async def answer(request: web.Request) -> web.StreamResponse:
        assert request.headers["Accept-Encoding"] == "identity"
        return web.Response(body=packed, headers={"Content-Encoding": "gzip"})

    worker.answers["GET", "/v1/state"] = answer
    tracemalloc.start()
    try:
        with pytest.raises(ControlError, match="the answer is not a WorkerState"):
            await control.state()
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
