"""Every fault of a peer that gives weights to a joiner: it is dropped, or the stage fails; the old weights serve.

The table in docs/weights-faults.md is this list, as `table` writes it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from rollout_common.transfer.connections.blocking_connection import Connection
from rollout_common.transfer.connections.frames import Kind, TransferError
from rollout_worker.sources.pushed import peer_route as outward
from tests.support.unit.arrows import ROOM, goes_on, hurry, left, serves
from tests.support.unit.plain_dialing import raw_frame
from tests.support.unit.pushing import Trainer, Version, publish, pushed_worker
from tests.support.unit.tiny_worker import TinyWorker, refused

PAGE = Path(__file__).parents[4] / "docs" / "weights-faults.md"
STEPS = ("LAYOUT", "HAVE", "END", "PIECE")
"""What a peer that has all of it sends, in this order."""
OLD, NEW = 1, 7
OTHER = b"\1" * 257
"""Other bytes than those of the only piece, as many."""


def wait_asked(end: Trainer, step: str) -> None:
    """Wait until the joiner asks for it, where it does."""
    if step == "LAYOUT":
        end.connection.expect(Kind.FETCH)
    elif step == "PIECE":
        assert end.asked() == [0]


def do(end: Trainer, step: str) -> None:
    """What a sound peer does at an arrow."""
    match step:
        case "LAYOUT":
            end.tell()
        case "HAVE":
            end.announce()
        case "END":
            end.end()
        case "PIECE":
            end.piece(0)


Act = Callable[[Trainer, str], None]


def silence(end: Trainer, step: str) -> None:
    """Say nothing, not even that it is there."""


def truncated(end: Trainer, step: str) -> None:
    head = json.dumps({"piece": 0}).encode()
    end.connection._sock.sendall(raw_frame(Kind[step], head, 2 * len(head)))
    end.connection.close()


def overlapping(end: Trainer, step: str) -> None:
    layout = end.version.layout.to_json()
    layout["tensors"][1][3] = 0
    end.tell(layout=layout)


def flipped(end: Trainer, step: str) -> None:
    end.piece(0, OTHER)
    wait_asked(end, step)
    end.piece(0, OTHER)


def hashed_so(end: Trainer, step: str) -> None:
    digests = end.version.pieces.hash_leaves(0, memoryview(OTHER))
    end.piece(0, OTHER, digests=digests.hex())


def other_content(end: Trainer, step: str) -> None:
    end.version = Version(8)
    for each in STEPS[:3]:
        do(end, each)


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that a peer does instead of giving what it was asked for.

    `says`: in the slot's error, if nobody else has the weights. `lies`: it is found only once all is there,
    and then fails the stage whoever else has them.
    """

    name: str
    act: Act
    says: str
    at: tuple[str, ...] = STEPS
    lies: bool = False


FAULTS = (
    Fault("the connection is cut", lambda end, *_: end.connection.close(),
          "has closed the connection"),
    Fault("silence, as of a frozen peer", silence, "nothing came for"),
    Fault("a frame cut in half", truncated, "has closed the connection"),
    Fault("a frame of unknown kind",
          lambda end, *_: end.connection._sock.sendall(raw_frame(99, b"{}")),
          "no frame of kind"),
    Fault("a frame that is not due", lambda end, *_: end.connection.send(Kind.READY), "READY came"),
    Fault("the peer has given up its copy",
          lambda end, *_: end.connection.send(Kind.ERROR, {"slug": "gone", "detail": "the bytes are gone"}),
          "the bytes are gone"),
    Fault("another model's tensors",
          lambda end, *_: Trainer(end.connection, Version(NEW, {"other": ("U8", (1,))})).tell(),
          "is missing", ("LAYOUT",)),
    Fault("tensors that overlap", overlapping, "overlaps", ("LAYOUT",)),
    Fault("pieces that there are not",
          lambda end, *_: end.connection.send(Kind.HAVE, {"ranges": [[0, 2]]}),
          "HAVE.end", ("HAVE",)),
    Fault("no hashes of the tensors", lambda end, *_: end.end(digests={}),
          "a hash for each tensor", ("END",)),
    Fault("a bit flipped", flipped, "arrived damaged", ("PIECE",)),
    Fault("a piece that was not asked for", lambda end, *_: end.piece(0),
          "not asked for", ("HAVE",)),
    Fault("another piece", lambda end, *_: end.piece(0, piece=1), "PIECE.piece", ("PIECE",)),
    Fault("a part of the piece", lambda end, *_: end.piece(0, OTHER[:256]),
          "came with 256 bytes", ("PIECE",)),
    Fault("a piece without the hash of each leaf", lambda end, *_: end.piece(0, digests=""),
          "PIECE.digests", ("PIECE",)),
    Fault("a delta, without a base", lambda end, *_: end.delta(Version(OLD)),
          "this worker has no base", ("PIECE",)),
    Fault("other bytes with their hash", hashed_so, "arrived with", ("PIECE",), lies=True),
    Fault("another root hash", lambda end, *_: end.end(root_hash="xxh3_128_tree:" + "0" * 32),
          "its content differs", ("END",)),
    Fault("another version", other_content, "its content differs", ("LAYOUT",)),
)  # fmt: skip
CASES = [
    pytest.param(step, fault, beside, id=f"{step}-{fault.name}-{'two' if beside else 'one'}")
    for fault, beside in itertools.product(FAULTS, (False, True))
    for step in (fault.at[-1:] if beside else fault.at)
]
"""Where a peer is dropped makes no difference to the other one."""


@contextlib.contextmanager
def peers(fault: Fault, step: str, *, beside: bool) -> Iterator[Sequence[int]]:
    """Run a peer that fails at an arrow, and one that has all of it; yields their ports."""
    failed = threading.Event()

    def fails(end: Trainer) -> None:
        for each in STEPS:
            wait_asked(end, each)
            if each == step:
                break
            do(end, each)
        fault.act(end, step)
        failed.set()

    def gives(end: Trainer) -> None:
        end.keep_alive()
        wait_asked(end, "LAYOUT")
        failed.wait(5)
        for each in STEPS[:3]:
            do(end, each)
        end.serve()

    with contextlib.ExitStack() as stack:
        plays = (fails, gives) if beside else (fails,)
        yield [stack.enter_context(listening(play)) for play in plays]


@contextlib.contextmanager
def listening(play: Callable[[Trainer], None]) -> Iterator[int]:
    """Play a peer for each connection that comes; yields the port."""
    server = socket.create_server(("127.0.0.1", 0))
    threads: list[threading.Thread] = []

    def converse(sock: socket.socket) -> None:
        connection = Connection(sock, silence=10)
        with contextlib.suppress(TransferError):
            play(Trainer(connection, Version(NEW)))
            while True:
                connection.receive()
        connection.close()

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = server.accept()
                threads.append(threading.Thread(target=converse, args=[sock], daemon=True))
                threads[-1].start()

    accepting = threading.Thread(target=accept, daemon=True)
    accepting.start()
    try:
        yield server.getsockname()[1]
    finally:
        server.shutdown(socket.SHUT_RDWR)
        for thread in (accepting, *threads):
            thread.join(10)
        server.close()


@pytest.fixture
async def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[TinyWorker]:
    hurry(monkeypatch)
    async with pushed_worker(tmp_path / "a", *ROOM) as made:
        yield made


@pytest.mark.parametrize(("step", "fault", "beside"), CASES)
async def test_whatever_a_peer_does_the_old_weights_serve(
    worker: TinyWorker, monkeypatch: pytest.MonkeyPatch, step: str, fault: Fault, *, beside: bool
) -> None:
    if fault.act is silence and not beside:
        monkeypatch.setattr(outward, "HOP_SECONDS", 0.2)
    await publish(worker, 1, Version(OLD))
    before = await left(worker)
    root_hash = Version(NEW).root_hash
    with peers(fault, step, beside=beside) as ports:
        named = [{"host": "127.0.0.1", "port": each, "ticket": "0" * 32} for each in ports]
        source = {"pushed": {"peers": named}}
        staged = await worker.stage(2, 0, source=source, root_hash=root_hash)
        now = time.monotonic()
    await serves(worker, OLD, now)
    if beside and not fault.lies:
        assert (staged.phase, staged.error) == ("Staged", None)
        await worker.commit(2)
        await serves(worker, NEW)
    else:
        assert staged.phase == "Failed"
        assert fault.says in str(staged.error)
        with refused("not-staged"):
            await worker.commit(2)
        await serves(worker, OLD)
    await goes_on(worker, before)


def table() -> str:
    """The faults as docs/weights-faults.md shows them."""
    lines = ["| fault | instead of | the slot | if another peer has them |", "|---|---|---|---|"]
    for fault in FAULTS:
        arrows = ", ".join(f"`{step}`" for step in fault.at)
        beside = "the same" if fault.lies else "`Staged`: the other gives them"
        lines.append(f"| {fault.name} | {arrows} | `Failed`: “…{fault.says}…” | {beside} |")
    return "\n".join(lines) + "\n"


def test_the_table_is_in_the_docs() -> None:
    assert table() in PAGE.read_text(), f"docs/weights-faults.md must hold:\n{table()}"
