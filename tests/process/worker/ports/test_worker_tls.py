"""The control port over TLS: with the certificate of the day, and never without."""

from __future__ import annotations

import asyncio
import os
import ssl
from pathlib import Path

import httpx
import pytest
from aiohttp import web

from localkube.pki import Authority
from rollout_client.discovery.pool_members import static_members
from rollout_client.steering.control_ports import ControlPorts
from rollout_client.worker_control import ControlUnreachable, WorkerControl
from rollout_common.transfer.connections.tls_session import TLS_NAME, issuers_of, trust_in
from rollout_common.wire.gang_models import GangState
from rollout_worker.gang.member_client import MemberClient
from rollout_worker.ports import port_connections
from rollout_worker.ports.port_connections import (
    MAX_CONTROL_CONNECTIONS,
    ConnectionPool,
    Listener,
    bind_port,
)
from rollout_worker.ports.serving_certificate import ServingCertificate
from rollout_worker.settings import InvalidSettings
from tests.support.unit.served import served
from tests.support.unit.tiny_worker import settings
from tests.support.waiting import until


def issue(folder: Path, name: str) -> tuple[Path, Path]:
    """A certificate for loopback, and its key."""
    authority = Authority(folder, "ca")
    authority.issue(name, f"/CN={name}", usage="serverAuth", san="IP:127.0.0.1,DNS:localhost")
    return folder / f"{name}.crt", folder / f"{name}.key"


async def test_the_client_steers_over_tls_and_trusts_nobody_else(tmp_path: Path) -> None:
    cert, key = issue(tmp_path, "worker")
    files = ["--control-tls-cert-file", str(cert), "--control-tls-key-file", str(key)]
    async with served(tmp_path, *files) as worker:
        members = static_members(
            [f"http://127.0.0.1:{worker.data}"], [f"https://127.0.0.1:{worker.control}"]
        )
        trusting = ControlPorts(lambda: members, None, tmp_path / "ca.crt")
        [state] = (await trusting.get_states()).values()
        assert state.serving
        [answer] = (await trusting.ask_members(lambda c: c.reset_cache())).values()
        assert not isinstance(answer, Exception)
        await trusting.close()
        strict = ControlPorts(lambda: members, None)
        [refusal] = (await strict.ask_members(lambda c: c.state())).values()
        assert isinstance(refusal, ControlUnreachable)
        assert "certificate" in str(refusal).lower()
        await strict.close()
        async with httpx.AsyncClient(trust_env=False) as plain:
            with pytest.raises(ControlUnreachable):
                await WorkerControl(f"http://127.0.0.1:{worker.control}", _nobody, plain).state()
            assert (await plain.get(f"http://127.0.0.1:{worker.data}/health")).status_code == 200


async def _nobody() -> None:
    return None


class Closing(asyncio.Protocol):
    """Says much to nobody, and closes twice."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(bytes(2**24))
        transport.close()
        transport.close()


async def test_an_end_that_nobody_waits_for_stops_no_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(port_connections, "SWEEP_INTERVAL_SECONDS", 0.01)
    certificate = ServingCertificate(*issue(tmp_path, "worker"))
    sock, room = bind_port("127.0.0.1", 0, "--control-port"), ConnectionPool(4)
    listener = Listener(sock, Closing, room, certificate)
    trusting = ssl.create_default_context(cafile=tmp_path / "ca.crt")
    _, writer = await asyncio.open_connection(*sock.getsockname(), ssl=trusting)
    await until(lambda: room.connections, what="the connection")
    await asyncio.sleep(0.1)
    assert not any(task.done() for task in listener._tasks)
    writer.transport.abort()
    await until(lambda: not room.connections, what="its end")
    listener.close()
    await listener.wait_closed()


async def test_handshakes_that_do_not_end_give_way(tmp_path: Path) -> None:
    cert, key = issue(tmp_path, "worker")
    files = ["--control-tls-cert-file", str(cert), "--control-tls-key-file", str(key)]
    async with served(tmp_path, *files) as worker:
        half = [
            await asyncio.open_connection("127.0.0.1", worker.control)
            for _ in range(MAX_CONTROL_CONNECTIONS + 20)
        ]
        trust = ssl.create_default_context(cafile=tmp_path / "ca.crt")
        async with httpx.AsyncClient(trust_env=False, verify=trust) as client:
            answer = await client.get(f"https://127.0.0.1:{worker.control}/v1/state", timeout=8)
        assert answer.status_code == 200
        for _, writer in half:
            writer.close()


def test_a_ca_that_is_none_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="control_ca"):
        ControlPorts(lambda: (), None, tmp_path / "none")


def test_other_nodes_of_a_trainer_trust_the_same_certificates(tmp_path: Path) -> None:
    """Also one that is not a CA's, as of a worker that is trusted by itself; a key in the file stays here."""
    cert, key = issue(tmp_path, "own")
    both = tmp_path / "both.pem"
    both.write_text(key.read_text() + cert.read_text())
    issuers = issuers_of(ControlPorts(lambda: (), None, both).trust)
    assert issuers == cert.read_text()
    assert trust_in(issuers).context.cert_store_stats()["x509"] == 1


async def test_a_renewed_certificate_is_taken_and_a_broken_one_is_not(tmp_path: Path) -> None:
    cert, key = issue(tmp_path, "first")
    held = ServingCertificate(cert, key, every_seconds=0.02)
    first = held.context
    keeping = asyncio.create_task(held.keep_reloading())
    newer, newer_key = issue(tmp_path, "second")
    os.replace(newer_key, key)
    os.replace(newer, cert)
    await until(lambda: held.context is not first, what="the new one")
    cert.write_text("nonsense")
    read = held._reading
    for _ in range(2):  # one may have begun before
        last = read._call
        await until(lambda last=last: read._call is not last, what="a reading")  # type: ignore[misc]
    assert read._call is not None
    await asyncio.wait([read._call])
    good = held.context
    await until(lambda: read._call is not last, what="one more")
    assert held.context is good
    assert not keeping.done()
    keeping.cancel()


async def test_the_head_trusts_its_members_renewed_certificates(tmp_path: Path) -> None:
    """All pods of a gang get the same new ones; none of them is restarted for it."""
    home = tmp_path / "held"
    home.mkdir()
    held = [home / name for name in ("tls.crt", "tls.key", "ca.crt")]

    def renew(name: str) -> ssl.SSLContext:
        (tmp_path / name).mkdir()
        authority = Authority(tmp_path / name, "ca")
        authority.issue("w", "/CN=w", usage="serverAuth", san=f"DNS:{TLS_NAME}")
        for file, new in zip(held, ("w.crt", "w.key", "ca.crt"), strict=True):
            os.replace(tmp_path / name / new, file)
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(held[0], held[1])
        return context

    state = GangState(boot_id="b", rank=1, phase="Ready")

    async def member(_: web.BaseRequest) -> web.Response:
        # So each call has a handshake of its own.
        headers = {"Connection": "close"}
        return web.Response(body=state.model_dump_json(), headers=headers)

    runner = web.ServerRunner(web.Server(member))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=renew("first"))
    await site.start()
    port = runner.addresses[0][1]
    files = ("--control-tls-cert-file", str(held[0]), "--control-tls-key-file", str(held[1]))
    line = MemberClient(1, f"127.0.0.1:{port}", "a", settings(*files))
    try:
        for name in ("second", "third"):
            assert (await line.get_state(started=True)).boot_id == "b"
            renewed = renew(name)
            await site.stop()
            site = web.TCPSite(runner, "127.0.0.1", port, ssl_context=renewed, reuse_address=True)
            await site.start()
        assert (await line.get_state(started=True)).boot_id == "b"
        held[0].write_text("nonsense")
        assert (await line.get_state(started=True)).boot_id == "b", "it keeps what it had"
    finally:
        await line.close()
        await runner.cleanup()


def test_files_that_cant_be_used_are_told_at_the_start(tmp_path: Path) -> None:
    cert, key = issue(tmp_path, "worker")
    with pytest.raises(InvalidSettings, match="--control-tls-key-file"):
        settings("--control-tls-cert-file", str(cert))
    with pytest.raises(InvalidSettings, match="can't be used"):
        ServingCertificate(key, cert)
