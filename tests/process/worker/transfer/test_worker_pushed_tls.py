"""Pushed weights over TLS: transfers from trainer and replicas, resumption and fetches as without it, and who is kept out."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import torch

from localkube.pki import Authority
from rollout_client import AsyncRolloutPool, DirectOptions
from rollout_client.steering.control_ports import ControlPorts
from rollout_common.transfer.connections.dialing import dial_stream
from rollout_common.transfer.connections.frame_stream import FrameStream
from rollout_common.transfer.connections.frames import Kind, Refused, TransferError, Untrusted
from rollout_common.transfer.connections.tls_session import TLS_NAME
from rollout_common.transfer.connections.transfer_loop import run_on_loop
from rollout_worker.schemas import OfferRequest, Transfer
from rollout_worker.settings import InvalidSettings
from rollout_worker.sources.pushed import incoming_version as incoming
from rollout_worker.sources.pushed import version_fetching
from tests.support.unit.plain_dialing import dial
from tests.support.unit.pushing import (
    Trainer,
    Version,
    holder,
    push_among,
    pushed_worker,
    quiet,
    ticket,
    trainer,
)
from tests.support.unit.served import served
from tests.support.unit.tiny_engine import LAYOUT
from tests.support.unit.tiny_worker import TinyWorker, settings
from tests.support.waiting import until


def files(folder: Path, name: str = "worker", san: str = f"DNS:{TLS_NAME}") -> list[str]:
    """Flags with a certificate of the authority of this folder."""
    folder.mkdir(exist_ok=True)
    Authority(folder, "ca").issue(name, f"/CN={name}", usage="serverAuth", san=san)
    return flags_of(folder / f"{name}.crt", folder / f"{name}.key")


def flags_of(cert: Path, key: Path) -> list[str]:
    return ["--control-tls-cert-file", str(cert), "--control-tls-key-file", str(key)]


def required(folder: Path) -> list[str]:
    return [*files(folder), "--weights-tls", "required"]


@contextlib.contextmanager
def secured(transfer: Transfer, version: Version, ca: Path | None) -> Iterator[Trainer]:
    """Connect over TLS as the client does, trusting a CA; None: in the clear."""
    if ca is None:
        with trainer(transfer, version, "tcp") as end:
            yield end
        return
    assert transfer.port is not None
    trust = ControlPorts(lambda: (), None, ca).trust
    port = transfer.port
    with socket.create_server(("127.0.0.1", 0)) as listening:
        connection = dial("127.0.0.1", listening.getsockname()[1], 5, silence=10)
        far, _ = listening.accept()
    relaying = run_on_loop(relay(far, lambda: dial_stream("127.0.0.1", port, 5, trust=trust)))
    try:
        yield Trainer(connection, version)
    finally:
        connection.close()
        relaying.result(10)


async def relay(near: socket.socket, dial: Callable[[], Awaitable[FrameStream]]) -> None:
    """Pass frames between a plain socket and a worker until either end closes."""
    with near:
        worker = await dial()
        plain = FrameStream(near)
        tasks = [asyncio.create_task(pass_on(*pair)) for pair in ((plain, worker), (worker, plain))]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for each in tasks:
            each.cancel()
        await asyncio.wait(tasks)
        await plain.close()
        await worker.close()


async def pass_on(source: FrameStream, target: FrameStream) -> None:
    with contextlib.suppress(TransferError):
        while True:
            frame = await source.receive()
            payload = bytearray(frame.payload)
            await source.read_into(memoryview(payload))
            head = {name: value for name, value in frame.head.items() if name != "payload"}
            await target.send(frame.kind, head, bytes(payload))


@pytest.fixture
async def worker(tmp_path: Path) -> AsyncIterator[TinyWorker]:
    async with pushed_worker(tmp_path / "a", *required(tmp_path / "tls")) as made:
        yield made


async def test_replicas_pass_weights_on_over_tls(tmp_path: Path) -> None:
    given, flags = Version(7), required(tmp_path / "tls")
    async with contextlib.AsyncExitStack() as stack:
        workers = [
            await stack.enter_async_context(pushed_worker(tmp_path / name, *flags))
            for name in "abc"
        ]
        begun = [await ticket(each, 1) for each in workers]
        assert all(each.tls for each in begun)
        ca = tmp_path / "tls/ca.crt"
        with contextlib.ExitStack() as ends:
            opened = [ends.enter_context(secured(each, given, ca)) for each in begun]
            for index, frame in enumerate(await push_among(opened, begun)):
                told = (frame.kind, frame.text("name"), frame.text("root_hash"))
                assert told == (Kind.STAGED, str(index), given.root_hash)
            assert [end.sent for end in opened] == [[0], [], []], "it left the trainer once"
        for each in workers:
            await each.commit(1)
            assert each.engine.active.number == 7
        await quiet()


async def test_plain_senders_are_turned_away_by_name(
    worker: TinyWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incoming, "LEASE_SECONDS", 0.5)
    begun = await ticket(worker, 1)
    with secured(begun, Version(7), None) as end:
        await asyncio.to_thread(end.hello, begun)
        with pytest.raises(Refused, match="over TLS alone") as caught:
            await asyncio.to_thread(end.ready)
        assert caught.value.slug == "tls-required"
    await until(lambda: worker.slot.to_view().phase == "Failed", what="the slot to end")
    assert "one that tried was turned away: it spoke no TLS" in str(worker.slot.to_view().error)


async def test_a_sender_with_another_ca_says_so_and_the_slot_does(
    worker: TinyWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incoming, "LEASE_SECONDS", 0.5)
    begun = await ticket(worker, 1)
    files(tmp_path / "other")
    with pytest.raises(
        Untrusted, match=r"127\.0\.0\.1:\d+: its certificate is not trusted .*control_ca"
    ):
        await asyncio.to_thread(enter, begun, tmp_path / "other/ca.crt")
    await until(lambda: worker.slot.to_view().phase == "Failed", what="the slot to end")
    assert "does not trust the certificate that it was shown" in str(worker.slot.to_view().error)


def enter(transfer: Transfer, ca: Path) -> None:
    """Connect, and no more: what a relay could not do is raised."""
    with secured(transfer, Version(7), ca) as end, contextlib.suppress(TransferError):
        end.connection.receive()


async def test_a_certificate_for_another_name_is_not_trusted(tmp_path: Path) -> None:
    flags = [*files(tmp_path / "tls", san="IP:127.0.0.1"), "--weights-tls", "required"]
    async with pushed_worker(tmp_path / "a", *flags) as made:
        begun = await ticket(made, 1)
        with pytest.raises(Untrusted, match="issued for the name rollout-worker"):
            await asyncio.to_thread(enter, begun, tmp_path / "tls/ca.crt")


async def test_an_expired_certificate_is_not_trusted(tmp_path: Path) -> None:
    async with pushed_worker(tmp_path / "a", *expired(tmp_path)) as made:
        begun = await ticket(made, 1)
        with pytest.raises(Untrusted, match=r"expired.*: renew it"):
            await asyncio.to_thread(enter, begun, tmp_path / "old.crt")


AUTHORITY = """
[ca]
default_ca=own
[own]
database=index
serial=serial
new_certs_dir=.
default_md=sha256
policy=any
x509_extensions=names
[any]
commonName=supplied
[names]
subjectAltName=DNS:rollout-worker
[req]
distinguished_name=dn
[dn]
"""


def expired(folder: Path) -> list[str]:
    """A certificate that issued itself, for a day that has passed."""
    (folder / "ca.cnf").write_text(AUTHORITY)
    (folder / "index").touch()
    (folder / "serial").write_text("01")
    cert, key = folder / "old.crt", folder / "old.key"
    asked = "req -new -config ca.cnf -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=w"
    signed = "ca -config ca.cnf -selfsign -batch -notext -in old.csr -startdate 20200101000000Z"
    for words in (
        [*asked.split(), "-keyout", "old.key", "-out", "old.csr"],
        [*signed.split(), "-enddate", "20200102000000Z", "-keyfile", "old.key", "-out", "old.crt"],
    ):
        subprocess.run(["openssl", *words], check=True, capture_output=True, cwd=folder)
    return [*flags_of(cert, key), "--weights-tls", "required"]


async def test_tls_to_a_plain_port_says_what_is_wrong(tmp_path: Path) -> None:
    files(tmp_path / "tls")
    async with pushed_worker(tmp_path / "a") as made:
        begun = await ticket(made, 1)
        assert not begun.tls
        with pytest.raises(Untrusted, match=r"speaks no TLS .*--weights-tls required"):
            await asyncio.to_thread(enter, begun, tmp_path / "tls/ca.crt")
        with secured(begun, Version(7), None) as end:
            await asyncio.to_thread(end.whole, begun)
            assert (await asyncio.to_thread(end.answer)).kind is Kind.STAGED


async def test_a_port_that_may_speak_tls_takes_both(tmp_path: Path) -> None:
    async with pushed_worker(tmp_path / "a", *files(tmp_path / "tls")) as made:
        for version, ca in enumerate((None, tmp_path / "tls/ca.crt"), 1):
            begun = await ticket(made, version)
            assert not begun.tls
            with secured(begun, Version(version), ca) as end:
                await asyncio.to_thread(end.whole, begun)
                assert (await asyncio.to_thread(end.answer)).kind is Kind.STAGED
            await made.commit(version)


async def test_a_holder_that_shows_another_pools_certificate_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(version_fetching, "PEER_RETRY_SECONDS", 0.01)
    async with (
        pushed_worker(tmp_path / "a", *required(tmp_path / "tls")) as a,
        pushed_worker(tmp_path / "b", *required(tmp_path / "other")) as b,
        pushed_worker(tmp_path / "c") as c,
        pushed_worker(tmp_path / "d", *required(tmp_path / "tls")) as d,
    ):
        begun = [await ticket(each, 1) for each in (a, b, c)]
        holders = [holder(each, name) for each, name in zip(begun[1:], "bc", strict=True)]
        with secured(begun[0], Version(7), tmp_path / "tls/ca.crt") as end:
            await asyncio.to_thread(end.whole, begun[0], share=[1, 3], holders=holders)
            assert (await asyncio.to_thread(end.answer)).kind is Kind.STAGED
        await a.commit(1)
        offered = a.updates.offer_weights("me", OfferRequest(epoch=1, version=1))
        places = [(each.port, "0" * 32) for each in begun[1:]] + [(offered.port, offered.ticket)]
        peers = [{"host": "127.0.0.1", "port": at, "ticket": token} for at, token in places]
        alone = await d.stage(1, 0, source={"pushed": {"peers": peers[:2]}})
        assert "its certificate is not trusted" in str(alone.error)
        assert "ca.crt lies next to --control-tls-cert-file" in str(alone.error)
        assert "speaks no TLS on this port" in str(alone.error)
        staged = await d.stage(1, 0, source={"pushed": {"peers": peers}})
        assert (staged.phase, staged.error) == ("Staged", None)


async def test_workers_with_the_same_certificate_need_no_ca(tmp_path: Path) -> None:
    flags = required(tmp_path / "tls")
    ca = (tmp_path / "tls/ca.crt").rename(tmp_path / "ca.crt")
    async with (
        pushed_worker(tmp_path / "a", *flags) as a,
        pushed_worker(tmp_path / "b", *flags) as b,
    ):
        begun = [await ticket(a, 1), await ticket(b, 1)]
        with (
            secured(begun[0], Version(7), ca) as first,
            secured(begun[1], Version(7), ca) as second,
        ):
            told = await push_among([first, second], begun)
            assert [frame.kind for frame in told] == [Kind.STAGED] * 2
            assert second.sent == []


async def test_a_trainer_publishes_over_tls(tmp_path: Path) -> None:
    flags = [*files(tmp_path / "tls", san=f"DNS:{TLS_NAME},IP:127.0.0.1"), "--weights-port", "0"]
    async with served(tmp_path, *flags, "--weights-tls", "required") as at:
        urls, controls = [f"http://127.0.0.1:{at.data}"], [f"https://127.0.0.1:{at.control}"]
        given = {name: torch.full((1,), 7, dtype=torch.uint8) for name in LAYOUT.required}
        trusting = DirectOptions(control_ca=tmp_path / "tls/ca.crt")
        pool = AsyncRolloutPool.from_urls(urls, control_urls=controls, direct=trusting)
        async with pool:
            done = await pool.publish_weights(1, tensors=given)
            assert done.report is not None
            assert [each.transport for each in done.report.replicas.values()] == ["tcp"]
            assert done.replicas == 1


def test_tls_without_a_certificate_is_refused_at_the_start() -> None:
    with pytest.raises(
        InvalidSettings, match=r"--weights-tls required needs --control-tls-cert-file"
    ):
        settings("--weights-tls", "required")
