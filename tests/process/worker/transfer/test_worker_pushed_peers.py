"""Every fault of a peer that gives weights to a joiner: it is dropped, or the stage fails; the old weights serve.

The table in docs/weights.md is this list, as `table` writes it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import xxhash

from rollout_common.transfer.connection import Connection
from rollout_common.transfer.frames import Kind, TransferError
from tests.support.unit.arrows import ROOM, goes_on, hurry, left, serves
from tests.support.unit.pushing import Version, push, pushed_worker
from tests.support.unit.tiny_worker import TinyWorker, refused

PAGE = Path(__file__).parents[4] / "docs" / "weights.md"
STEPS = ("LAYOUT", "DATA")
OLD, NEW = 1, 7
CONTENT = b"\1" * 512


class Giver:
    """One connection of a peer, which gives what it is told to."""

    def __init__(self, connection: Connection, version: Version) -> None:
        self.connection, self.version = connection, version

    def layout(self, **fields: Any) -> None:
        version = self.version
        known = {"root_hash": version.root_hash, "digests": version.digests}
        head = {"layout": version.layout.to_json(), **known, **fields}
        self.connection.send(Kind.LAYOUT, head)

    def data(self, payload: bytes | None = None, **fields: Any) -> None:
        whole = self.version.chunk(0)
        head = {"offset": 0, "hash": xxhash.xxh3_128_hexdigest(whole), **fields}
        self.connection.send(Kind.DATA, head, whole if payload is None else payload)

    def do(self, step: str) -> None:
        """What a sound peer does at an arrow."""
        if step == "LAYOUT":
            self.layout()
        else:
            self.data()

    def asked(self, step: str) -> None:
        """Wait until the joiner asks for it."""
        self.connection.expect(Kind.FETCH if step == "LAYOUT" else Kind.GET)


Act = Callable[[Giver, str], None]


def cut(end: Giver, step: str) -> None:
    end.connection.close()


def silence(end: Giver, step: str) -> None:
    """Say nothing, not even that it is there."""


def truncated(end: Giver, step: str) -> None:
    head = json.dumps({"offset": 0}).encode()
    end.connection._sock.sendall(struct.pack(">BI", Kind[step], 2 * len(head)) + head)
    end.connection.close()


def unknown(end: Giver, step: str) -> None:
    end.connection._sock.sendall(struct.pack(">BI", 99, 2) + b"{}")


def not_due(end: Giver, step: str) -> None:
    end.connection.send(Kind.READY)


def gone(end: Giver, step: str) -> None:
    end.connection.send(Kind.ERROR, {"slug": "gone", "detail": "the bytes are gone"})


def other_model(end: Giver, step: str) -> None:
    right, end.version = end.version.root_hash, Version(NEW, {"other": ("U8", (1,))})
    end.layout(root_hash=right)


def overlapping(end: Giver, step: str) -> None:
    layout = end.version.layout.to_json()
    layout["tensors"][1][3] = 0
    end.layout(layout=layout)


def no_hashes(end: Giver, step: str) -> None:
    end.layout(digests={})


def flipped(end: Giver, step: str) -> None:
    end.data(CONTENT)


def elsewhere(end: Giver, step: str) -> None:
    end.data(offset=256)


def shorter(end: Giver, step: str) -> None:
    end.data(CONTENT[:256])


def hashed_so(end: Giver, step: str) -> None:
    end.data(CONTENT, hash=xxhash.xxh3_128_hexdigest(CONTENT))


def other_root(end: Giver, step: str) -> None:
    end.layout(root_hash="xxh3_128_tree:" + "0" * 32)
    end.asked("DATA")
    end.data()


def other_content(end: Giver, step: str) -> None:
    end.version = Version(8)
    end.layout()
    end.asked("DATA")
    end.data()


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
    Fault("the connection is cut", cut, "has closed the connection"),
    Fault("silence, as of a frozen peer", silence, "nothing came for"),
    Fault("a frame cut in half", truncated, "has closed the connection"),
    Fault("a frame of unknown kind", unknown, "no frame of kind"),
    Fault("a frame that is not due", not_due, "READY came"),
    Fault("the peer has given up its copy", gone, "the bytes are gone"),
    Fault("another model's tensors", other_model, "is missing", ("LAYOUT",)),
    Fault("tensors that overlap", overlapping, "overlaps", ("LAYOUT",)),
    Fault("no hashes of the tensors", no_hashes, "a hash for each tensor", ("LAYOUT",)),
    Fault("a bit flipped", flipped, "arrived damaged", ("DATA",)),
    Fault("another chunk", elsewhere, "another chunk than it was asked for", ("DATA",)),
    Fault("a part of the chunk", shorter, "another chunk than it was asked for", ("DATA",)),
    Fault("other bytes with their hash", hashed_so, "arrived with", ("DATA",), lies=True),
    Fault("another root hash", other_root, "its content differs", ("LAYOUT",)),
    Fault("another version", other_content, "its content differs", ("LAYOUT",)),
)
CASES = [
    pytest.param(
        step, fault, beside, id=f"{step}-{fault.act.__name__}-{'two' if beside else 'one'}"
    )
    for fault, beside in itertools.product(FAULTS, (False, True))
    for step in fault.at
]


@contextlib.contextmanager
def peers(fault: Fault, step: str, *, beside: bool) -> Iterator[Sequence[int]]:
    """Run a peer that fails at an arrow, and one that has all of it; yields their ports."""
    failed = threading.Event()

    def fails(end: Giver) -> None:
        for each in STEPS:
            end.asked(each)
            if each == step:
                break
            end.do(each)
        fault.act(end, step)
        failed.set()

    def gives(end: Giver) -> None:
        end.connection.keep_alive()
        end.asked("LAYOUT")
        failed.wait(5)
        end.layout()
        while True:
            end.asked("DATA")
            end.data()

    with contextlib.ExitStack() as stack:
        plays = (fails, gives) if beside else (fails,)
        yield [stack.enter_context(listening(play)) for play in plays]


@contextlib.contextmanager
def listening(play: Callable[[Giver], None]) -> Iterator[int]:
    """Play a peer for the one connection that comes; yields the port."""
    server = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        sock, _ = server.accept()
        connection = Connection(sock, silence=10)
        with contextlib.suppress(TransferError):
            play(Giver(connection, Version(NEW)))
            while True:
                connection.receive()
        connection.close()

    thread = threading.Thread(target=run, name="peer", daemon=True)
    thread.start()
    try:
        yield server.getsockname()[1]
    finally:
        thread.join(10)
        server.close()


@pytest.fixture
async def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[TinyWorker]:
    hurry(monkeypatch)
    async with pushed_worker(tmp_path / "a", *ROOM) as made:
        yield made


@pytest.mark.parametrize(("step", "fault", "beside"), CASES)
async def test_whatever_a_peer_does_the_old_weights_serve(
    worker: TinyWorker, step: str, fault: Fault, *, beside: bool
) -> None:
    await push(worker, 1, Version(OLD), "tcp")
    await worker.commit(1)
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
    """The faults as docs/weights.md shows them."""
    lines = ["| fault | instead of | the slot | if another peer has them |", "|---|---|---|---|"]
    for fault in FAULTS:
        arrows = ", ".join(f"`{step}`" for step in fault.at)
        beside = "the same" if fault.lies else "`Staged`: the other gives them"
        lines.append(f"| {fault.name} | {arrows} | `Failed`: “…{fault.says}…” | {beside} |")
    return "\n".join(lines) + "\n"


def test_the_table_is_in_the_docs() -> None:
    assert table() in PAGE.read_text(), f"docs/weights.md must hold:\n{table()}"
