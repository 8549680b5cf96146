"""Who has no ticket, no token and no manners: at no port do they keep others out, nor cost they memory."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from rollout_client.steering.pushing.options import ListenAddress
from rollout_client.steering.pushing.ranks.rank_listener import RankListener, call_leader
from rollout_common.transfer.connections import frame_stream
from rollout_common.transfer.connections.blocking_connection import Connection
from rollout_common.transfer.connections.frames import PROTOCOL, Ended, Kind, Refused, fetch_ticket
from rollout_common.transfer.connections.transfer_loop import run_on_loop
from rollout_worker.ports.callers.auth import AllowAnyone
from rollout_worker.ports.port_connections import PROBE_ALLOWANCE, ConnectionQuota
from rollout_worker.ports.server import HttpServers
from rollout_worker.schemas import OfferRequest
from rollout_worker.sources.pushed import pushed_source as pushed
from tests.support.unit.far_ranks import LOOPBACK
from tests.support.unit.plain_dialing import dial
from tests.support.unit.pushing import (
    Version,
    push,
    pushed_worker,
    stage,
    trainer,
    transferring,
)
from tests.support.unit.strangers import KINDS, Connect, Kind_, crowd
from tests.support.unit.tiny_worker import TinyWorker, tiny_worker
from tests.support.waiting import until

PLACES = ConnectionQuota(data=PROBE_ALLOWANCE + 100, control=100)
"""Fewer than there are strangers."""
MOST_MIB = 48
"""What they may cost, for as long as they are there; the largest of their heads claims more by itself."""
FLAGS = ["--data-host", LOOPBACK, "--data-port", "0", "--control-port", "0", "--weights-port", "0"]


class Place:
    """A port, and what those with business there do."""

    def __init__(
        self, connect: Connect, business: Callable[[], Awaitable[None]], *, http: bool
    ) -> None:
        self.connect, self.business, self.http = connect, business, http


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def places() -> AsyncIterator[dict[str, Place]]:
    with tempfile.TemporaryDirectory() as home:
        path = f"{home}/w.sock"
        async with tiny_worker(Path(home), *FLAGS, "--weights-socket", path) as tiny:
            servers = HttpServers(tiny.worker, AllowAnyone(), PLACES)
            running = asyncio.create_task(servers.serve_both_ports())
            listener = RankListener.open(range(1, 2), ListenAddress(LOOPBACK), afar=True)
            try:
                yield _places(tiny, servers, listener, path)
            finally:
                await asyncio.to_thread(listener.close)
                servers.stop()
                await asyncio.wait_for(running, 20)


def _places(
    tiny: TinyWorker, servers: HttpServers, listener: RankListener, path: str
) -> dict[str, Place]:
    weights = tiny.updates.pushes.pushed_source.address.port
    assert weights is not None
    data, control = servers.bound_ports
    versions = iter(range(1, 99))

    def tcp(port: int) -> Connect:
        # What waits to be accepted is bounded: the kernel lets others call again after a second.
        return functools.partial(socket.create_connection, (LOOPBACK, port), 0.2)

    async def asks(port: int, route: str) -> None:
        # Unused by plain HTTP, certificates take longer to load than all else here.
        async with httpx.AsyncClient(trust_env=False, timeout=10, verify=False) as client:
            assert (await client.get(f"http://{LOOPBACK}:{port}{route}")).status_code == 200

    async def pushes(kind: str) -> None:
        """Push as trainers do: one that a crowd displaces before it was heard calls again."""
        version = next(versions)
        for may_call_again in (True, True, False):
            try:
                view = await push(tiny, version, Version(version), kind)
                break
            except Ended:
                if not may_call_again:
                    raise
        assert (view.phase, view.error) == ("Staged", None)
        await tiny.commit(version)

    async def joins() -> None:
        connection = await asyncio.to_thread(call_leader, listener.places, 1, here=False)
        connection.close()
        await until(lambda: 1 in listener._found, what="the rank to be in")
        closing = run_on_loop(listener._found.pop(1).close())  # so that it may come again
        await asyncio.wrap_future(closing)

    return {
        "data": Place(tcp(data), lambda: asks(data, "/health"), http=True),
        "control": Place(tcp(control), lambda: asks(control, "/v1/state"), http=True),
        "weights": Place(tcp(weights), lambda: pushes("tcp"), http=False),
        "socket": Place(lambda: _unix(path), lambda: pushes("unix"), http=False),
        "ranks": Place(tcp(listener.places.addresses[0][1]), joins, http=False),
    }


def _unix(path: str) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.settimeout(0.2)  # what waits to be accepted is bounded, too
    try:
        made.connect(path)
    except OSError:
        made.close()
        raise
    return made


def resident() -> int:
    """MiB of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) // 256


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("name", ["data", "control", "weights", "socket", "ranks"])
async def test_strangers_keep_nobody_out_and_cost_little(
    places: dict[str, Place], name: str, kind: Kind_
) -> None:
    place = places[name]
    await place.business()
    before, most = resident(), 0
    with crowd(place.connect, kind, http=place.http):
        for _ in range(3):
            async with asyncio.timeout(10):
                await place.business()
            most = max(most, resident() - before)
            await asyncio.sleep(0.05)
    assert most < MOST_MIB
    if not place.http:
        await until(lambda: not transferring(), what="the tasks of callers that have gone to end")


async def test_a_sender_of_another_release_is_told_so(tmp_path: Path) -> None:
    """The first one's HELLO brought all that is in LAYOUT now."""
    async with pushed_worker(tmp_path) as worker:
        transfer = (await stage(worker, 1)).transfer
        assert transfer is not None
        for kind in ("tcp", "unix"):
            with trainer(transfer, Version(1), kind) as end:
                end.connection.send(Kind.HELLO, {"ticket": transfer.ticket, "layout": "x" * 2000})
                with pytest.raises(Refused, match=r"1024 are the most: .* speaks protocol 3"):
                    await asyncio.to_thread(end.ready)


async def test_a_ticket_is_forgotten_a_while_after_its_version_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other replicas fetch from this one for a while; no sender can use it any more."""
    async with pushed_worker(tmp_path) as worker:
        pushed_source = worker.updates.pushes.pushed_source
        assert pushed_source.idle
        begun = (await stage(worker, 1)).transfer
        assert begun is not None
        with trainer(begun, Version(1), "tcp") as end:
            await asyncio.to_thread(end.whole, begun)
        assert not pushed_source.idle
        with trainer(begun, Version(1), "tcp") as end:
            end.hello(begun)
            with pytest.raises(Refused, match="used or void"):
                await asyncio.to_thread(end.ready)
        monkeypatch.setattr(pushed, "OFFER_SECONDS", 0.0)
        assert pushed_source.idle
        monkeypatch.undo()
        await worker.commit(1)
        worker.updates.offer_weights("me", OfferRequest(epoch=1, version=1))
        assert not pushed_source.idle


async def test_a_fetchers_ticket_admits_no_sender_and_a_senders_no_fetcher(tmp_path: Path) -> None:
    async with pushed_worker(tmp_path) as worker:
        begun = (await stage(worker, 1)).transfer
        assert begun is not None
        fetching = begun.model_copy(update={"ticket": fetch_ticket(begun.ticket)})
        with trainer(fetching, Version(1), "tcp") as end:
            end.hello(fetching)
            with pytest.raises(Refused, match="unknown"):
                await asyncio.to_thread(end.ready)
        with trainer(begun, Version(1), "tcp") as end:
            end.connection.send(Kind.FETCH, {"protocol": PROTOCOL, "ticket": begun.ticket})
            with pytest.raises(Refused, match="unknown"):
                await asyncio.to_thread(end.connection.expect, Kind.LAYOUT)


# Who has a ticket, among hundreds who have one.


async def test_peers_that_fetch_at_once_wait_for_their_turn_and_too_many_come_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pushed, "GIVEN_AT_ONCE", 1)
    monkeypatch.setattr(pushed, "MAX_FETCHING", 3)
    monkeypatch.setattr(frame_stream, "PING_SECONDS", 0.1)
    async with pushed_worker(tmp_path) as worker:
        await push(worker, 1, Version(7), "tcp")
        await worker.commit(1)
        with contextlib.ExitStack() as stack:
            offers = [
                worker.updates.offer_weights("me", OfferRequest(epoch=1, version=1)) for _ in "1234"
            ]
            peers = [
                stack.enter_context(contextlib.closing(dial(LOOPBACK, each.port, 5)))
                for each in offers
            ]
            for peer, offer in zip(peers, offers, strict=True):
                peer.send(Kind.FETCH, {"ticket": offer.ticket})
                await heard(peer)
            with pytest.raises(Refused, match="3 others fetch from this worker: stage again") as no:
                peers[3].expect(Kind.LAYOUT)
            assert no.value.slug == "busy"
            first = await asyncio.to_thread(_told_first, peers[:3], 10)
            assert first is not None
            others = [each for each in peers[:3] if each is not first]
            assert await asyncio.to_thread(_told_first, others, 0.2) is None, "one at a time"
            others[0].close()  # one that gives up leaves its place, and those behind it go on
            first.close()
            assert (await asyncio.to_thread(others[1].expect, Kind.LAYOUT)).head["layout"]
            again = worker.updates.offer_weights("me", OfferRequest(epoch=1, version=1))
            giver = {"host": LOOPBACK, "port": again.port, "ticket": again.ticket}
            others[1].close()
            async with pushed_worker(tmp_path / "b") as joiner:
                staged = await joiner.stage(1, 0, source={"pushed": {"peers": [giver]}})
                assert (staged.phase, staged.error) == ("Staged", None)


async def heard(peer: Connection) -> None:
    await until(lambda: peer.has_unread, what="a ping, or an answer")


def _told_first(peers: Sequence[Connection], seconds: float) -> Connection | None:
    """Return the first that gets more than pings within these seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for each in peers:
            if (frame := each.poll(0.01)) is not None and frame.kind is Kind.LAYOUT:
                return each
    return None
