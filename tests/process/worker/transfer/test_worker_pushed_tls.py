"""Pushed weights over TLS: transfers, chains, resumption and fetches as without it, and who is kept out."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from localkube.pki import Authority
from rollout_client import AsyncRolloutPool, DirectOptions
from rollout_client.steering.control_ports import ControlPorts
from rollout_common.transfer.dialing import dial
from rollout_common.transfer.frames import CHUNK_BYTES, Kind, Refused, Untrusted
from rollout_common.transfer.tls import TLS_NAME
from rollout_worker.schemas import OfferRequest, Transfer
from rollout_worker.settings import InvalidSettings
from rollout_worker.sources import incoming
from tests.support.unit.pushing import Trainer, Version, pushed_worker, quiet, stage
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
    assert transfer.port is not None
    trust = None if ca is None else ControlPorts(lambda: (), None, ca).trust
    connection = dial("127.0.0.1", transfer.port, 5, silence=10, trust=trust)
    try:
        yield Trainer(connection, version)
    finally:
        connection.close()


async def ticket(worker: TinyWorker, version: int = 1) -> Transfer:
    begun = (await stage(worker, version)).transfer
    assert begun is not None
    return begun


def hop(transfer: Transfer, name: str) -> dict[str, Any]:
    host = {"host": "127.0.0.1", "port": transfer.port}
    return {**host, "ticket": transfer.ticket, "name": name}


@pytest.fixture
async def worker(tmp_path: Path) -> AsyncIterator[TinyWorker]:
    async with pushed_worker(tmp_path / "a", *required(tmp_path / "tls")) as made:
        yield made


async def test_a_chain_of_workers_passes_weights_on_over_tls(tmp_path: Path) -> None:
    given, flags = Version(7), required(tmp_path / "tls")
    async with contextlib.AsyncExitStack() as stack:
        workers = [
            await stack.enter_async_context(pushed_worker(tmp_path / name, *flags))
            for name in "abc"
        ]
        begun = [await ticket(each) for each in workers]
        assert all(each.tls for each in begun)
        hops = [hop(each, name) for each, name in zip(begun[1:], "bc", strict=True)]
        with secured(begun[0], given, tmp_path / "tls/ca.crt") as end:
            await asyncio.to_thread(end.whole, begun[0], hops=hops, name="a")
            told: dict[str, object] = {}
            while len(told) < 3:
                frame = await asyncio.to_thread(end.answer)
                told[frame.text("name")] = (frame.kind, frame.text("root_hash"))
        assert told == dict.fromkeys("abc", (Kind.STAGED, given.root_hash))
        for each in workers:
            await each.commit(1)
            assert each.engine.active.number == 7
        await quiet()


async def test_a_joiner_fetches_over_tls(worker: TinyWorker, tmp_path: Path) -> None:
    begun = await ticket(worker)
    with secured(begun, Version(7), tmp_path / "tls/ca.crt") as end:
        await asyncio.to_thread(end.whole, begun)
        assert (await asyncio.to_thread(end.answer)).kind is Kind.STAGED
    await worker.commit(1)
    flags = required(tmp_path / "tls")
    async with pushed_worker(tmp_path / "b", *flags) as joiner:
        offered = worker.updates.offer_weights("me", OfferRequest(epoch=1, version=1))
        peer = {"host": "127.0.0.1", "port": offered.port, "ticket": offered.ticket}
        staged = await joiner.stage(1, 0, source={"pushed": {"peers": [peer]}})
        assert (staged.phase, staged.error) == ("Staged", None)
        await joiner.commit(1)
        assert joiner.engine.active.number == 7
        await quiet()


async def test_a_transfer_that_was_cut_goes_on_over_tls(
    worker: TinyWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = {**dict.fromkeys(LAYOUT.required, ("U8", (1,))), "number": ("U8", (5 * CHUNK_BYTES,))}
    monkeypatch.setattr(
        "rollout_worker.updates.pushed_weights.check_layout", lambda *_, where: None
    )
    given, begun, ca = Version(7, large), await ticket(worker), tmp_path / "tls/ca.crt"
    with secured(begun, given, ca) as end:
        end.hello(begun)
        assert await asyncio.to_thread(end.ready) == []
        end.data(2 * CHUNK_BYTES)
        slot = worker.updates.slot
        assert slot is not None
        await until(lambda: slot.to_view().chunks == 1, what="a chunk")
    with secured(begun, given, ca) as end:
        await asyncio.to_thread(end.whole, begun)
        assert (await asyncio.to_thread(end.answer)).kind is Kind.STAGED
    await worker.commit(1)
    assert worker.engine.active.number == 7


async def test_plain_senders_are_turned_away_by_name(
    worker: TinyWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incoming, "LEASE_SECONDS", 0.5)
    begun = await ticket(worker)
    with secured(begun, Version(7), None) as end:
        await asyncio.to_thread(end.hello, begun)
        with pytest.raises(Refused, match="over TLS alone") as caught:
            await asyncio.to_thread(end.ready)
        assert caught.value.slug == "tls-required"
    await until(lambda: view(worker).phase == "Failed", what="the slot to end")
    assert "one that tried was turned away: it spoke no TLS" in str(view(worker).error)


def view(worker: TinyWorker) -> Any:
    assert worker.updates.slot is not None
    return worker.updates.slot.to_view()


async def test_a_sender_with_another_ca_says_so_and_the_slot_does(
    worker: TinyWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incoming, "LEASE_SECONDS", 0.5)
    begun = await ticket(worker)
    files(tmp_path / "other")
    with pytest.raises(
        Untrusted, match=r"127\.0\.0\.1:\d+: its certificate is not trusted .*control_ca"
    ):
        await asyncio.to_thread(enter, begun, tmp_path / "other/ca.crt")
    await until(lambda: view(worker).phase == "Failed", what="the slot to end")
    assert "does not trust the certificate that it was shown" in str(view(worker).error)


def enter(transfer: Transfer, ca: Path) -> None:
    with secured(transfer, Version(7), ca):
        pass


async def test_a_certificate_for_another_name_is_not_trusted(tmp_path: Path) -> None:
    flags = [*files(tmp_path / "tls", san="IP:127.0.0.1"), "--weights-tls", "required"]
    async with pushed_worker(tmp_path / "a", *flags) as made:
        begun = await ticket(made)
        with pytest.raises(Untrusted, match="issued for the name rollout-worker"):
            await asyncio.to_thread(enter, begun, tmp_path / "tls/ca.crt")


async def test_an_expired_certificate_is_not_trusted(tmp_path: Path) -> None:
    async with pushed_worker(tmp_path / "a", *expired(tmp_path)) as made:
        begun = await ticket(made)
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
        begun = await ticket(made)
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


async def test_a_hop_that_shows_another_pools_certificate_is_skipped(tmp_path: Path) -> None:
    async with (
        pushed_worker(tmp_path / "a", *required(tmp_path / "tls")) as a,
        pushed_worker(tmp_path / "b", *required(tmp_path / "other")) as b,
        pushed_worker(tmp_path / "c") as c,
        pushed_worker(tmp_path / "d", *required(tmp_path / "tls")) as d,
    ):
        begun = {name: await ticket(each) for name, each in zip("abcd", (a, b, c, d), strict=True)}
        hops = [hop(begun[name], name) for name in "bcd"]
        with secured(begun["a"], Version(7), tmp_path / "tls/ca.crt") as end:
            await asyncio.to_thread(end.whole, begun["a"], hops=hops, name="a")
            told: dict[str, Any] = {}
            while len(told) < 4:
                frame = await asyncio.to_thread(end.answer)
                told[frame.text("name")] = frame
        assert [told[name].kind for name in "ad"] == [Kind.STAGED] * 2
        assert "its certificate is not trusted" in told["b"].text("detail")
        assert "ca.crt lies beside --control-tls-cert-file" in told["b"].text("detail")
        assert "speaks no TLS on this port" in told["c"].text("detail")


async def test_workers_with_the_same_certificate_need_no_ca(tmp_path: Path) -> None:
    flags = required(tmp_path / "tls")
    ca = (tmp_path / "tls/ca.crt").rename(tmp_path / "ca.crt")
    async with (
        pushed_worker(tmp_path / "a", *flags) as a,
        pushed_worker(tmp_path / "b", *flags) as b,
    ):
        first, second = await ticket(a), await ticket(b)
        with secured(first, Version(7), ca) as end:
            await asyncio.to_thread(end.whole, first, hops=[hop(second, "b")], name="a")
            told: dict[str, object] = {}
            while len(told) < 2:
                frame = await asyncio.to_thread(end.answer)
                told[frame.text("name")] = frame.kind
        assert told == {"a": Kind.STAGED, "b": Kind.STAGED}


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
