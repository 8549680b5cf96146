"""Trainers of several nodes: each serves a part of a version; what a node can't do with its ticket."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Collection, Iterator
from pathlib import Path

import pytest

from rollout_common.transfer.connections.frames import (
    PROTOCOL,
    Kind,
    Refused,
    TransferError,
    fetch_ticket,
    origin_ticket,
)
from rollout_worker.schemas import DiscardRequest, Transfer
from tests.support.unit.plain_dialing import dial
from tests.support.unit.pushing import (
    Trainer,
    Version,
    pushed_worker,
    quiet,
    tensors_of,
    ticket,
    trainer,
)
from tests.support.unit.tiny_worker import TinyWorker
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("any_size")

PIECES = 7
"""The last one has the tensor of one byte."""


def large() -> Version:
    return Version(7, tensors_of(PIECES - 1))


class Node(Trainer):
    """Another node of the trainer, with the pieces that it has."""

    def hello_node(self, transfer: Transfer, protocol: int = PROTOCOL) -> None:
        ticket = origin_ticket(transfer.ticket)
        self.connection.send(Kind.HELLO, {"protocol": protocol, "ticket": ticket, "name": "b"})

    def serve_all(self, pieces: Collection[int]) -> None:
        """Serve until the worker closes the connection."""
        with contextlib.suppress(TransferError):
            self.ready()
            self.announce(pieces)
            self.serve()


@contextlib.contextmanager
def node(transfer: Transfer, version: Version) -> Iterator[Node]:
    assert transfer.port is not None
    with contextlib.closing(dial("127.0.0.1", transfer.port, 5, silence=10)) as connection:
        made = Node(connection, version)
        made.keep_alive()
        yield made


@contextlib.asynccontextmanager
async def staging_worker(home: Path) -> AsyncIterator[tuple[TinyWorker, Transfer]]:
    """Run a worker that stages version (1, 1); yields how it is brought, too."""
    async with pushed_worker(home) as worker:
        transfer = await ticket(worker, 1)
        yield worker, transfer


async def test_each_node_gives_its_part(tmp_path: Path) -> None:
    given = large()
    async with staging_worker(tmp_path) as (_, transfer):
        with trainer(transfer, given, "tcp") as lead, node(transfer, given) as other:
            other.hello_node(transfer)  # before the trainer's own connection
            serving = asyncio.create_task(asyncio.to_thread(other.serve_all, range(2, PIECES)))
            lead.hello(transfer)
            await asyncio.to_thread(lead.ready)
            lead.announce((0, 1))
            lead.end()
            outcome = await asyncio.to_thread(lead.serve)
            assert (outcome.kind, outcome.head["root_hash"]) == (Kind.STAGED, given.root_hash)
            assert sorted(set(lead.sent)) == [0, 1]
            assert sorted(other.sent) == [2, 3, 4, 5, 6]
            await asyncio.wait_for(serving, 10)  # the worker has closed the connection
        await quiet()


async def test_a_node_that_breaks_off_comes_back(tmp_path: Path) -> None:
    given = large()
    async with staging_worker(tmp_path) as (_, transfer):
        with trainer(transfer, given, "tcp") as lead:
            lead.keep_alive()
            lead.hello(transfer)
            await asyncio.to_thread(lead.ready)
            lead.end()
            with node(transfer, given) as first:
                first.hello_node(transfer)
                await asyncio.to_thread(first.ready)
                first.announce()
                [piece, *_] = await asyncio.to_thread(first.asked)
                first.piece(piece)
            with node(transfer, given) as second:
                second.hello_node(transfer)
                await asyncio.to_thread(second.serve_all, range(PIECES))
                outcome = await asyncio.to_thread(lead.answer)
            assert outcome.kind is Kind.STAGED
            assert piece not in second.sent, "what came stays"
        await quiet()


@pytest.mark.parametrize("kind", [Kind.END, Kind.LAYOUT, Kind.STAGED, Kind.FAILED])
async def test_a_node_says_nothing_but_what_it_has(tmp_path: Path, kind: Kind) -> None:
    given = large()
    async with staging_worker(tmp_path) as (_, transfer):
        with trainer(transfer, given, "tcp") as lead, node(transfer, given) as other:
            lead.hello(transfer)
            await asyncio.to_thread(lead.ready)
            other.hello_node(transfer)
            await asyncio.to_thread(other.ready)
            other.connection.send(kind, {"root_hash": "x", "digests": given.digests})
            with pytest.raises(TransferError):
                await asyncio.to_thread(other.serve)
            lead.announce()
            lead.end()
            assert (await asyncio.to_thread(lead.serve)).kind is Kind.STAGED
        await quiet()


async def test_a_node_of_another_release_is_turned_away(tmp_path: Path) -> None:
    given = large()
    async with staging_worker(tmp_path) as (worker, transfer):
        with node(transfer, given) as other:
            other.hello_node(transfer, protocol=PROTOCOL + 1)
            with pytest.raises(TransferError):
                await asyncio.to_thread(other.ready)
        slot = worker.slot
        assert slot.to_view().phase == "Staging", "the slot waits for the trainer itself"


async def test_a_ticket_is_for_one_use(tmp_path: Path) -> None:
    """Who may serve a part may not send as the trainer, nor fetch; who may fetch may not serve."""
    given = large()
    async with staging_worker(tmp_path) as (_, transfer):
        ticket = transfer.ticket
        for kind, wrong in (
            (Kind.FETCH, origin_ticket(ticket)),
            (Kind.HELLO, fetch_ticket(ticket)),
            (Kind.HELLO, origin_ticket(origin_ticket(ticket))),
            (Kind.HELLO, "ü" * 32),
            (Kind.FETCH, "\ud800"),
        ):
            with node(transfer, given) as other:
                other.connection.send(kind, {"protocol": PROTOCOL, "ticket": wrong})
                with pytest.raises(Refused, match="the ticket is unknown"):
                    await asyncio.to_thread(other.ready)


async def test_a_node_that_waits_for_a_slot_that_ends_is_let_go(tmp_path: Path) -> None:
    given = large()
    async with staging_worker(tmp_path) as (worker, transfer):
        with node(transfer, given) as other:
            other.hello_node(transfer)
            await worker.updates.discard_staged("me", DiscardRequest(epoch=1, version=1))
            with pytest.raises(TransferError):
                await asyncio.to_thread(other.ready)
        await until(lambda: worker.updates.slot is None, what="the end of the slot")
        await quiet()
