"""Every fault of a worker that fetches from another one: it is dropped, the holder serves on, others get all."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from rollout_common.transfer.connections.blocking_connection import Connection
from rollout_common.transfer.connections.frames import PROTOCOL, Kind, TransferError
from rollout_common.transfer.layout import PushLayout
from rollout_common.wire.root_hash import LEAF_BYTES
from rollout_worker.ports import weights_port as port
from rollout_worker.schemas import OfferRequest
from tests.support.unit.arrows import hurry, left, serves
from tests.support.unit.plain_dialing import dial
from tests.support.unit.pushing import Version, publish, pushed_worker, quiet, tensors_of
from tests.support.unit.tiny_worker import TinyWorker

PIECES = 24
"""More than the buffers of a connection hold."""


@pytest.fixture
async def worker(
    tmp_path: Path, any_size: None, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[TinyWorker]:
    """A worker that keeps a large version, and waits for nobody for long."""
    hurry(monkeypatch)
    async with pushed_worker(tmp_path) as made:
        await publish(made, 1, Version(7, tensors_of(PIECES)))
        # The sound fetcher has it, too: its pings come late where ten thousand requests keep the interpreter.
        monkeypatch.setattr(port, "LEASE_SECONDS", 1.5)
        yield made


def call(worker: TinyWorker) -> Connection:
    """Fetch what the worker keeps, as far as its LAYOUT."""
    offered = worker.updates.offer_weights("me", OfferRequest(epoch=1, version=1))
    connection = dial("127.0.0.1", offered.port, 5, silence=5)
    connection.send(Kind.FETCH, {"protocol": PROTOCOL, "ticket": offered.ticket})
    return connection


def get(connection: Connection, *ranges: tuple[int, int]) -> None:
    connection.send(Kind.GET, {"ranges": list(ranges)})


def fetch_all(connection: Connection) -> bytes:
    """Fetch all pieces, as a sound worker does; returns the bytes of `number`."""
    layout = PushLayout.from_json(connection.expect(Kind.LAYOUT).head["layout"])
    assert connection.expect(Kind.HAVE).head["ranges"] == [[0, len(layout.pieces)]]
    connection.expect(Kind.END)
    memory = bytearray(layout.nbytes)
    get(connection, (0, len(layout.pieces)))
    for piece in range(len(layout.pieces)):
        frame = connection.expect(Kind.PIECE)
        assert frame.integer("piece") == piece
        with memoryview(memory)[slice(*layout.pieces.span(piece))] as place:
            connection.read_into(place)
            assert frame.text("digests") == layout.pieces.hash_leaves(piece, place).hex()
    number = layout["number"]
    return bytes(memory[number.start : number.end])


def cut(connection: Connection) -> None:
    get(connection, (0, PIECES))
    connection.expect(Kind.PIECE)
    connection.close()


def silence(connection: Connection) -> None:
    """Ask for nothing, and say nothing."""


def reads_nothing(connection: Connection) -> None:
    """Ask for all, say that it is there, and take nothing."""
    connection.start_pinging()
    get(connection, (0, PIECES))


def asks_endlessly(connection: Connection) -> None:
    for _ in range(10_000):
        get(connection, (0, PIECES))


def gives(connection: Connection) -> None:
    connection.send(Kind.PIECE, {"piece": 0, "digests": ""}, b"12")


@pytest.mark.parametrize(
    "fault",
    [cut, silence, reads_nothing, asks_endlessly, gives],
    ids=lambda fault: fault.__name__,
)
async def test_a_fetcher_that_errs_is_dropped_and_others_get_all(
    worker: TinyWorker, fault: Callable[[Connection], None]
) -> None:
    before = await left(worker)
    sound, bad = call(worker), call(worker)
    sound.start_pinging()

    def err() -> None:
        bad.expect(Kind.LAYOUT)
        with contextlib.suppress(TransferError):  # it was dropped before it was done
            fault(bad)

    await asyncio.to_thread(err)
    assert await asyncio.to_thread(fetch_all, sound) == b"\7" * (PIECES * LEAF_BYTES)
    await serves(worker, 7)
    sound.close()
    await quiet()  # the worker has ended the other connection by itself
    bad.close()
    assert await left(worker) == before
