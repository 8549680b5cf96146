"""Every fault at every arrow of a push: the old weights serve, the slot says why, nothing is left behind.

The table in docs/weights-faults.md is this list, as `table` writes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rollout_common.transfer.connections.frames import (
    MAX_HEAD_BYTES,
    MAX_PAYLOAD_BYTES,
    Kind,
    TransferError,
)
from rollout_common.transfer.memory.slot import Slot
from rollout_worker.ports import weights_port as port
from rollout_worker.schemas import DiscardRequest, Transfer
from rollout_worker.sources.pushed import incoming_version as incoming
from tests.support.unit.arrows import DELTA, KINDS, ROOM, STEPS, do, hurry, left, serves
from tests.support.unit.plain_dialing import raw_frame
from tests.support.unit.pushing import (
    Trainer,
    Version,
    base_of,
    publish,
    pushed_worker,
    quiet,
    stage,
    ticket,
    trainer,
)
from tests.support.unit.tiny_worker import TinyWorker, refused
from tests.support.waiting import until

PAGE = Path(__file__).parents[4] / "docs" / "weights-faults.md"
ARROWS = ("HELLO", "LAYOUT", "MEMORY", "FILLED", "HAVE", "PIECE", "DELTA", "END")
AGAIN = "the piece is asked for again"
GONE = "the sender is gone"
NOBODY = "no sender came"
OVER_TCP = tuple(way for way, kind in KINDS.items() if kind == "tcp")
Act = Callable[[Trainer, Transfer, str], None]


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that goes wrong instead of a frame, and what the slot says then.

    `at`: the arrows where it can happen. `says`: in the slot's error; empty: it is staged all the
    same, since it is asked for again. `early`: what it says where the ticket was not used yet. `ways`:
    those on which it can happen.
    """

    name: str
    act: Act
    says: str
    at: tuple[str, ...] = ARROWS
    early: str = ""
    ways: tuple[str, ...] = tuple(STEPS)


def raw(end: Trainer, sent: bytes) -> None:
    end.connection._sock.sendall(sent)


def silence(end: Trainer, transfer: Transfer, step: str) -> None:
    """Say nothing, not even that it is there."""


def truncated(end: Trainer, transfer: Transfer, step: str) -> None:
    whole = raw_frame(Kind[step], json.dumps({"ticket": transfer.ticket}).encode())
    raw(end, whole[: len(whole) // 2])
    end.connection.close()


def wrong_ticket(end: Trainer, transfer: Transfer, step: str) -> None:
    end.hello(transfer.model_copy(update={"ticket": "0" * 32}))
    assert end.answer().text("slug") == "bad-ticket"


def other_layout(end: Trainer, transfer: Transfer, step: str) -> None:
    layout = end.version.layout.to_json()
    layout["tensors"][1][3] = 0
    end.tell(layout=layout)


def short_memory(end: Trainer, transfer: Transfer, step: str) -> None:
    small = Slot(1)
    end.connection.send(Kind.MEMORY, {"size": 512}, handle=small.handle)
    small.close()


def shrinking(end: Trainer, transfer: Transfer, step: str) -> None:
    handle = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(handle, 512)
    end.connection.send(Kind.MEMORY, {"size": 512}, handle=handle)
    os.close(handle)


def changed(end: Trainer, transfer: Transfer, step: str) -> None:
    """A bit of the trainer's memory is another one than what it hashed."""
    with end.version.slot.view_bytes(0, 1) as first:
        first[0] ^= 1
    do(end, transfer, step)
    end.end()


def flipped_once(end: Trainer, transfer: Transfer, step: str) -> None:
    end.asked()
    end.piece(0, bytes(len(end.version.piece(0))))
    assert end.asked() == [0]
    end.piece(0)
    end.end()


def flipped_twice(end: Trainer, transfer: Transfer, step: str) -> None:
    for _ in range(2):
        end.asked()
        end.piece(0, bytes(len(end.version.piece(0))))


def no_such_piece(end: Trainer, transfer: Transfer, step: str) -> None:
    end.asked()
    end.connection.send(Kind.PIECE, {"piece": 1, "digests": ""}, b"12")


def shorter(end: Trainer, transfer: Transfer, step: str) -> None:
    end.asked()
    end.piece(0, b"12")


def without_hashes(end: Trainer, transfer: Transfer, step: str) -> None:
    end.asked()
    end.piece(0, digests=end.version.leaf_digests(0)[:32])


def oversized(end: Trainer, transfer: Transfer, step: str) -> None:
    end.asked()
    head = {"piece": 0, "payload": MAX_PAYLOAD_BYTES + 1}
    raw(end, raw_frame(Kind[step], json.dumps(head).encode()))


def piece_twice(end: Trainer, transfer: Transfer, step: str) -> None:
    do(end, transfer, step)
    end.piece(0)


def no_base(end: Trainer, transfer: Transfer, step: str) -> None:
    end.asked()
    end.delta(Version(1))


def other_base(end: Trainer, transfer: Transfer, step: str) -> None:
    end.base = Version(9)
    end.tell()
    assert end.answer().text("slug") == "wrong-base"


def differs(end: Trainer, **fields: Any) -> None:
    """Send what differs from the base, once it is asked for."""
    assert end.base is not None
    end.asked()
    end.delta(end.base, **fields)


def delta_of_another(end: Trainer, transfer: Transfer, step: str) -> None:
    end.base = Version(7)  # what is sent has no difference from it
    differs(end)


def delta_flipped_once(end: Trainer, transfer: Transfer, step: str) -> None:
    differs(end, payload=b"\0" * 4)
    differs(end)
    end.end()


def delta_flipped_twice(end: Trainer, transfer: Transfer, step: str) -> None:
    for _ in range(2):
        differs(end, payload=b"\0" * 4)


def delta_twice(end: Trainer, transfer: Transfer, step: str) -> None:
    do(end, transfer, step)
    assert end.base is not None
    end.delta(end.base)


FAULTS = (
    Fault("the connection is cut", lambda end, *_: end.connection.close(), GONE, early=NOBODY),
    Fault("silence, as of a frozen trainer", silence, GONE, early=NOBODY),
    Fault("a frame cut in half", truncated, GONE, early=NOBODY),
    Fault("a frame of unknown kind", lambda end, *_: raw(end, raw_frame(99, b"{}")),
          "no frame of kind", early=NOBODY),
    Fault("a head that is too large",
          lambda end, transfer, step: raw(end, raw_frame(Kind[step], b"", MAX_HEAD_BYTES + 1)),
          "are the most", early=NOBODY),
    Fault("a head that is nested too deeply",
          lambda end, transfer, step: raw(end, raw_frame(Kind[step], b"[" * 100_000)),
          "not JSON", early=NOBODY),
    Fault("a frame that is not due",
          lambda end, transfer, step: end.connection.send(Kind.READY, {"ticket": transfer.ticket}),
          "READY came", early=NOBODY),
    Fault("an unknown ticket", wrong_ticket, NOBODY, ("HELLO",)),
    Fault("another model's tensors",
          lambda end, *_: Trainer(end.connection, Version(7, {"other": ("U8", (1,))})).tell(),
          "is missing", ("LAYOUT",)),
    Fault("tensors that overlap", other_layout, "overlaps", ("LAYOUT",)),
    Fault("another protocol", lambda end, transfer, step: end.greet(transfer, protocol=1),
          "speaks protocol 1", ("HELLO",)),
    Fault("malformed holders",
          lambda end, *_: end.tell(holders=[{"host": "a", "port": 0, "ticket": ""}]),
          "LAYOUT.port", ("LAYOUT",), ways=OVER_TCP),
    Fault("a share that there is not", lambda end, *_: end.tell(share=[2, 2]),
          "LAYOUT.number", ("LAYOUT",), ways=OVER_TCP),
    Fault("no descriptor", lambda end, *_: end.connection.send(Kind.MEMORY, {"size": 512}),
          "without a descriptor", ("MEMORY",)),
    Fault("memory that is too small", short_memory, "not 512 as was said", ("MEMORY",)),
    Fault("memory that may shrink", shrinking, "may shrink", ("MEMORY",)),
    Fault("more than there is", lambda end, *_: end.filled(end.version.layout.nbytes + 1),
          "FILLED.upto", ("FILLED",)),
    Fault("memory changed after it was hashed", changed, "arrived with", ("FILLED",)),
    Fault("pieces that there are not",
          lambda end, *_: end.connection.send(Kind.HAVE, {"ranges": [[0, 2]]}),
          "HAVE.end", ("HAVE",)),
    Fault("a piece that was not asked for", lambda end, *_: end.piece(0),
          "not asked for", ("HAVE",)),
    Fault("a bit flipped on the way", flipped_once, "", ("PIECE",)),
    Fault("a bit flipped twice", flipped_twice, "damaged twice", ("PIECE",)),
    Fault("a bit flipped before it was sent", changed, "arrived with", ("PIECE",)),
    Fault("a piece in the wrong place", no_such_piece, "PIECE.piece", ("PIECE",)),
    Fault("a piece of another size", shorter, "came with 2 bytes", ("PIECE",)),
    Fault("a piece without the hash of each leaf", without_hashes, "PIECE.digests", ("PIECE",)),
    Fault("more bytes than a frame has", oversized, "payload must be", ("PIECE", "DELTA")),
    Fault("a piece that comes twice", piece_twice, "not asked for", ("PIECE",)),
    Fault("another base than the stage's", other_base, "the stage names", ("LAYOUT",), ways=DELTA),
    Fault("deltas of no base", no_base, "this worker has no base", ("PIECE",)),
    Fault("a delta in the wrong place", lambda end, *_: differs(end, piece=1),
          "DELTA.piece", ("DELTA",)),
    Fault("a delta without the hash of each leaf", lambda end, *_: differs(end, digests=""),
          "DELTA.digests", ("DELTA",)),
    Fault("a delta that writes outside",
          lambda end, *_: differs(end, content=struct.pack("<IIIHHB", 1, 0, 1, len(end.version.piece(0)), 7, 0)),
          "lies outside", ("DELTA",)),
    Fault("a delta that lies about its words",
          lambda end, *_: differs(end, content=struct.pack("<IIIHHB", 1, 0, 2, 1, 7, 0)),
          "as its blocks say", ("DELTA",)),
    Fault("a delta in disorder",
          lambda end, *_: differs(end, content=struct.pack("<IIIHHHHB", 1, 0, 2, 4, 3, 7, 7, 0)),
          "not in order", ("DELTA",)),
    Fault("a delta without a head", lambda end, *_: differs(end, content=b"\1\0"),
          "has no head", ("DELTA",)),
    Fault("a delta of another base", delta_of_another, "not make what it should", ("DELTA",)),
    Fault("a bit of a delta flipped on the way", delta_flipped_once, "", ("DELTA",)),
    Fault("a bit of a delta flipped twice", delta_flipped_twice, "damaged twice", ("DELTA",)),
    Fault("a delta that comes twice", delta_twice, "not asked for", ("DELTA",)),
    Fault("another hash of a tensor",
          lambda end, *_: end.end(digests={**end.version.digests, "rest": "0" * 32}),
          "arrived with", ("END",)),
    Fault("another root hash", lambda end, *_: end.end(root_hash="xxh3_128_tree:" + "0" * 32),
          "its sender says", ("END",)),
    Fault("hashes of other tensors", lambda end, *_: end.end(digests={"rest": "0" * 32}),
          "a hash for each tensor", ("END",)),
)  # fmt: skip
CASES = [
    pytest.param(way, step, fault, id=f"{way.split()[-1]}-{step}-{fault.name}")
    for way, steps in STEPS.items()
    for step, fault in itertools.product(steps, FAULTS)
    if step in fault.at
    and way in fault.ways
    and (way not in DELTA or step == "DELTA" or fault.ways == DELTA)
]
"""Of every fault; all but the deltas is the same whether or not there is a base."""


@pytest.fixture
async def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[TinyWorker]:
    """A worker that waits for nobody for long."""
    hurry(monkeypatch)
    async with pushed_worker(tmp_path / "a", *ROOM) as made:
        yield made


def fail(way: str, step: str, fault: Fault, transfer: Transfer) -> None:
    """Play a sound trainer up to an arrow, and the fault there."""
    with (
        trainer(transfer, Version(7), KINDS[way]) as end,
        contextlib.suppress(TransferError),
    ):
        end.base = Version(1) if way in DELTA else None
        for before in itertools.takewhile(lambda each: each != step, STEPS[way]):
            do(end, transfer, before)
        fault.act(end, transfer, step)
        while end.answer().kind is not Kind.RELEASED:
            pass


@pytest.mark.parametrize(("way", "step", "fault"), CASES)
async def test_whatever_goes_wrong_the_old_weights_serve(
    worker: TinyWorker, way: str, step: str, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    says = (step == "HELLO" and fault.early) or fault.says
    await publish(worker, 1, Version(1))
    before = await left(worker)
    if says == NOBODY or fault.act is silence:
        monkeypatch.setattr(incoming, "LEASE_SECONDS", 0.4)
        monkeypatch.setattr(port, "LEASE_SECONDS", 0.4)
    pushed = {"base": base_of(1, Version(1))} if way in DELTA else {}
    transfer = await ticket(worker, 2, source={"pushed": pushed})
    slot = worker.slot
    failing = asyncio.create_task(asyncio.to_thread(fail, way, step, fault, transfer))
    await until(lambda: slot.to_view().phase != "Staging", what="the slot to end")
    ended, view = time.monotonic(), slot.to_view()
    await serves(worker, 1, ended)
    if says:
        assert view.phase == "Failed"
        assert says in str(view.error)
        with refused("not-staged"):
            await worker.commit(2)
    else:
        assert view.phase == "Staged", view.error
        await worker.updates.discard_staged("me", DiscardRequest(epoch=1, version=2))
    await failing
    assert await left(worker) == before
    hurry(monkeypatch)  # no less: the next one is sound
    await publish(worker, 3, Version(3), KINDS[way])
    await serves(worker, 3)
    if way in DELTA:
        assert await left(worker) == before, "the failed delta has let its base go"


async def test_a_base_that_serves_no_more_ends_the_delta_and_is_refused_from_then_on(
    worker: TinyWorker,
) -> None:
    base = Version(1)
    await publish(worker, 1, base)
    source = {"pushed": {"base": base_of(1, base)}}
    transfer = await ticket(worker, 2, source=source)
    with trainer(transfer, Version(7), "tcp") as end:
        end.base = base
        end.keep_alive()
        end.hello(transfer)
        await asyncio.to_thread(end.ready)
        await worker.update(3, 3)
        answer = await asyncio.to_thread(end.answer)
        assert (answer.kind, "given up" in answer.text("detail")) == (Kind.FAILED, True)
    assert worker.engine.active.number == 3
    with refused("wrong-base"):
        await stage(worker, 4, source=source)


async def test_who_has_no_ticket_is_turned_away_at_once(worker: TinyWorker) -> None:
    address = worker.updates.pushes.pushed_source.address
    assert address.port is not None
    with socket.create_connection(("127.0.0.1", address.port)) as sock:
        sock.settimeout(5)
        told = await asyncio.to_thread(sock.recv, 4096)
    assert b"bad-ticket" in told
    await quiet()


def table() -> str:
    """The faults as docs/weights-faults.md shows them."""
    lines = ["| fault | instead of | the slot |", "|---|---|---|"]
    for fault in FAULTS:
        arrows = [step for step in ARROWS if step in fault.at]
        outcome = f"`Failed`: “…{fault.says}…”" if fault.says else f"`Staged`: {AGAIN}"
        if fault.early:
            outcome += f"; instead of `HELLO`: “…{fault.early}…”"
        lines.append(f"| {fault.name} | {', '.join(f'`{step}`' for step in arrows)} | {outcome} |")
    return "\n".join(lines) + "\n"


def test_the_table_of_faults_is_in_the_docs() -> None:
    assert table() in PAGE.read_text(), f"docs/weights-faults.md must hold:\n{table()}"
