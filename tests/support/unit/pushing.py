"""A trainer's end of pushed weights, plain enough to break at any point, and a worker with its port."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import threading
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollout_common.transfer.connections.blocking_connection import Connection
from rollout_common.transfer.connections.frames import (
    PROTOCOL,
    Frame,
    Kind,
    check_kind,
    fetch_ticket,
)
from rollout_common.transfer.connections.transfer_loop import run_on_loop, transfer_loop
from rollout_common.transfer.delta import encode_delta
from rollout_common.transfer.held_version import HeldVersion, VersionEnd
from rollout_common.transfer.layout import PushLayout
from rollout_common.transfer.memory.slot import Slot
from rollout_common.transfer.piece_server import ranges_of, read_ranges
from rollout_common.wire.root_hash import LEAF_BYTES, HashedTensor, hash_leaf, root_hash_of
from rollout_worker.ports.serving_certificate import serving_certificate
from rollout_worker.ports.weights_port import WeightsPort
from rollout_worker.schemas import CHECKPOINT, StagedWeights, Transfer
from rollout_worker.sources.pushed.kept_version import KeptVersion
from rollout_worker.sources.pushed.pushed_memory import OwnMemory
from tests.support.unit.digests import tensor_digest
from tests.support.unit.plain_dialing import dial, dial_unix
from tests.support.unit.tiny_worker import TinyWorker, tiny_worker
from tests.support.waiting import until

OWN: list[Slot] = []
"""Memory of the trainers of this process."""
TINY = {"number": ("U8", (1,)), "rest": ("U8", (1,))}


def tensors_of(pieces: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The tiny engine's tensors, of which `number` fills so many pieces: with `any_size` it takes them."""
    return {**TINY, "number": ("U8", (pieces * LEAF_BYTES,))}


class Version:
    """The bytes of one version in the trainer's memory; tokens of the tiny engine are `number`."""

    def __init__(
        self, number: int, tensors: Mapping[str, tuple[str, tuple[int, ...]]] = TINY
    ) -> None:
        self.layout = PushLayout.plan((name, *spec) for name, spec in tensors.items())
        self.pieces = self.layout.pieces
        self.slot = Slot(self.layout.nbytes)
        OWN.append(self.slot)
        self.digests: dict[str, str] = {}
        for placed in self.layout.tensors:
            view = self.slot.view_tensor(placed)
            view[:] = bytes([number if placed.name == "number" else 0]) * placed.nbytes
            self.digests[placed.name] = tensor_digest(view)

    @classmethod
    def of(cls, tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]]) -> Version:
        """A version of these tensors: dtype, shape and bytes by name."""
        made = cls(0, {name: (dtype, shape) for name, (dtype, shape, _) in tensors.items()})
        for placed in made.layout.tensors:
            view = made.slot.view_tensor(placed)
            if view:
                view[:] = tensors[placed.name][2]
            made.digests[placed.name] = tensor_digest(view)
        return made

    @property
    def root_hash(self) -> str:
        placed = self.layout.tensors
        return root_hash_of(
            {p.name: HashedTensor(p.dtype, p.shape, self.digests[p.name]) for p in placed}
        )

    def piece(self, number: int) -> bytes:
        return bytes(self.slot.view_bytes(*self.pieces.span(number)))

    def leaf_digests(self, number: int) -> str:
        """What a piece's leaves hash to, as `PIECE` says it."""
        return self.pieces.hash_leaves(number, memoryview(self.piece(number))).hex()


def kept_of(version: Version, said: VersionEnd | None = None) -> KeptVersion:
    """What a worker has of a version; `said`: what it says that everything hashes to."""
    size = version.layout.nbytes
    memory = OwnMemory(Slot(size, private=True))
    with memory.view_bytes(0, size) as place:
        place[:] = version.slot.view_bytes(0, size)
    held = HeldVersion(version.layout, memory.view_bytes)
    for piece in range(len(version.pieces)):
        held.mark_piece(piece, bytes.fromhex(version.leaf_digests(piece)))
    end = said or VersionEnd(version.root_hash, version.digests)
    held.finish(end)
    return KeptVersion(CHECKPOINT, held, memory, end, memory.add_hold())


class Trainer:
    """One connection of a trainer, which sends what a test has it send."""

    def __init__(self, connection: Connection, version: Version) -> None:
        self.connection, self.version = connection, version
        self.base: Version | None = None
        """Version 1 where deltas of it are sent."""
        self.sent: list[int] = []
        """Pieces that went out, in that order."""
        self._last: Frame | None = None

    def keep_alive(self) -> None:
        """Ping as long as the connection is open."""
        self.connection.start_pinging()

    def greet(self, transfer: Transfer, protocol: int = PROTOCOL) -> None:
        self.connection.send(Kind.HELLO, {"protocol": protocol, "ticket": transfer.ticket})

    def tell(self, **fields: Any) -> None:
        """Say what is to come."""
        base = {} if self.base is None else {"base": base_of(1, self.base)}
        layout = self.version.layout.to_json()
        self.connection.send(Kind.LAYOUT, {**base, "layout": layout, **fields})

    def hello(self, transfer: Transfer, **fields: Any) -> None:
        self.greet(transfer)
        self.tell(**fields)

    def ready(self) -> Frame:
        return self.connection.expect(Kind.READY)

    # Over a Unix socket.

    def memory(self, slot: Slot | None = None) -> None:
        slot = slot or self.version.slot
        self.connection.send(Kind.MEMORY, {"size": slot.size}, handle=slot.handle)

    def filled(self, upto: int | None = None) -> None:
        whole = self.version.layout.nbytes
        self.connection.send(Kind.FILLED, {"upto": whole if upto is None else upto})

    # Over TCP.

    def announce(self, pieces: Collection[int] | None = None) -> None:
        """Say that these pieces are there; None: all."""
        pieces = range(len(self.version.pieces)) if pieces is None else pieces
        self.connection.send(Kind.HAVE, {"ranges": ranges_of(list(pieces))})

    def asked(self) -> list[int]:
        """Return the pieces that the worker asks for next, progress aside."""
        while (frame := self.connection.receive()).kind is Kind.PROGRESS:
            pass
        return self._pieces_of(check_kind(frame, Kind.GET))

    def _pieces_of(self, request: Frame) -> list[int]:
        runs = read_ranges(request, len(self.version.pieces))
        return [piece for begin, end in runs for piece in range(begin, end)]

    def piece(self, number: int, payload: bytes | None = None, **fields: Any) -> None:
        """Send a piece, or these bytes as one."""
        head = {"piece": number, "digests": self.version.leaf_digests(number), **fields}
        whole = self.version.piece(number) if payload is None else payload
        self.connection.send(Kind.PIECE, head, whole)
        self.sent.append(number)

    def delta(self, base: Version, number: int = 0, **fields: Any) -> None:
        """Send how a piece differs from the base's.

        `content`: another delta than that; `payload`: what arrives of it.
        """
        content = fields.pop("content", None)
        if content is None:
            content = encode_delta(base.piece(number), self.version.piece(number))
        assert content is not None
        payload = fields.pop("payload", content)
        about = {"digests": self.version.leaf_digests(number), "hash": hash_leaf(content).hex()}
        self.connection.send(Kind.DELTA, {"piece": number, **about, **fields}, payload)
        self.sent.append(number)

    def give(self, pieces: Collection[int]) -> None:
        """Send pieces; as deltas, if there is a base."""
        for number in pieces:
            if self.base is None:
                self.piece(number)
            else:
                self.delta(self.base, number)

    def serve(self) -> Frame:
        """Send whatever the worker asks for, until it says something else than how far it is; return that."""
        while True:
            frame = self.connection.receive()
            if frame.kind is Kind.GET:
                self.give(self._pieces_of(frame))
            elif frame.kind is not Kind.PROGRESS:
                return frame

    # Both.

    def end(self, **fields: Any) -> None:
        head = {"root_hash": self.version.root_hash, "digests": self.version.digests}
        self.connection.send(Kind.END, {**head, **fields})

    def answer(self) -> Frame:
        """Return the next word that is neither progress nor a request."""
        frame, self._last = self._last, None
        while frame is None or frame.kind in (Kind.PROGRESS, Kind.GET):
            frame = self.connection.receive()
        return frame

    def whole(self, transfer: Transfer, **fields: Any) -> None:
        """Send everything; over TCP until the worker says what became of it, which `answer` returns."""
        self.hello(transfer, **fields)
        self.ready()
        if self.connection.unix:
            self.memory()
            self.filled()
            self.end()
        else:
            self.announce()
            self.end()
            self._last = self.serve()


def base_of(version: int, given: Version) -> dict[str, Any]:
    """The base of deltas, as stages and HELLO name it."""
    return {"epoch": 1, "version": version, "root_hash": given.root_hash}


def holder(transfer: Transfer, name: str) -> dict[str, Any]:
    """Another replica that gets the same version, as `LAYOUT` names it."""
    where = {"host": "127.0.0.1", "port": transfer.port}
    return {**where, "ticket": fetch_ticket(transfer.ticket), "name": name}


@contextlib.contextmanager
def trainer(transfer: Transfer, version: Version, kind: str) -> Iterator[Trainer]:
    """Connect to a worker's port or socket."""
    if kind == "unix":
        assert transfer.socket is not None
        connection = dial_unix(transfer.socket, 5, silence=10)
    else:
        assert transfer.port is not None
        connection = dial("127.0.0.1", transfer.port, 5, silence=10)
    try:
        yield Trainer(connection, version)
    finally:
        connection.close()


async def push_among(ends: Sequence[Trainer], transfers: Sequence[Transfer]) -> list[Frame]:
    """Push to several replicas, of which the first gets all from its trainer; return the last words."""
    holders = [holder(each, str(index)) for index, each in enumerate(transfers)]
    count = len(ends)
    for index in reversed(range(count)):
        others = holders[:index] + holders[index + 1 :]
        end, transfer = ends[index], transfers[index]
        about: dict[str, Any] = {"share": [index, count], "holders": others, "name": str(index)}
        if index:
            end.hello(transfer, **about)
            await asyncio.to_thread(end.ready)
            end.end()
        else:
            await asyncio.to_thread(end.whole, transfer, **about)
    return [await asyncio.to_thread(end.answer) for end in ends]


async def push(worker: TinyWorker, version: int, given: Version, kind: str) -> StagedWeights:
    """Stage (1, version) by pushing it, to the end."""
    transfer = await ticket(worker, version)

    def send() -> None:
        with trainer(transfer, given, kind) as end:
            end.whole(transfer)
            end.answer()

    await asyncio.to_thread(send)
    slot = worker.slot
    return slot.to_view()


async def publish(worker: TinyWorker, version: int, given: Version, kind: str = "tcp") -> None:
    """Push (1, version), and commit it."""
    staged = await push(worker, version, given, kind)
    assert staged.error is None, staged.error
    await worker.commit(version)


async def stage(worker: TinyWorker, version: int, **fields: Any) -> StagedWeights:
    """Begin to stage pushed bytes as (1, version)."""
    return await worker.begin_stage(version, 0, **{"source": {"pushed": {}}, **fields})


async def ticket(worker: TinyWorker, version: int, **fields: Any) -> Transfer:
    """Begin to stage pushed bytes as (1, version); returns how they are brought."""
    transfer = (await stage(worker, version, **fields)).transfer
    assert transfer is not None
    return transfer


@contextlib.asynccontextmanager
async def pushed_worker(home: Path, *flags: str) -> AsyncIterator[TinyWorker]:
    """Run a worker that takes pushed weights over both ways."""
    ways = ("--weights-port", "0", "--weights-socket", str(home / "weights.sock"))
    async with tiny_worker(home, *ways, "--data-host", "127.0.0.1", *flags) as worker:
        asked = worker.worker.settings
        port = WeightsPort(asked, worker.updates.pushes.pushed_source, serving_certificate(asked))
        port.start()
        try:
            yield worker
        finally:
            await asyncio.to_thread(port.stop)


def held() -> set[str]:
    """What the worker of this process has open of pushed weights; the trainers' memory is closed first."""
    transfer_loop()  # has a pair of sockets of its own, for ever
    found = set()
    while OWN:
        OWN.pop().close()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue
        if "rollout-" in target or "socket" in target:
            found.add(f"{name}:{target}")
    return found


LISTENING = (
    "WeightsPort._serve",
    "WeightsPort._accept_connections",
    "RankListener._accept_callers",
)
"""What runs on the loop of transfers as long as a port is open."""


def transferring() -> list[str]:
    """The tasks of transfers that go on in this process, ports that listen aside."""

    async def look() -> list[str]:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        names = (str(getattr(task.get_coro(), "__qualname__", task)) for task in others)
        return [name for name in names if name not in LISTENING]

    return run_on_loop(look()).result(10)


STAYING = ("weights-io", "weights-payload")
"""How the names of threads begin that a process keeps."""


async def quiet() -> None:
    """Wait until no task of a transfer is left, and no thread that hashes or frees what came."""
    await until(lambda: not transferring(), what="the end of the transfers' tasks")
    await until(
        lambda: (
            not [
                each.name
                for each in threading.enumerate()
                if each.name.startswith("weights") and not each.name.startswith(STAYING)
            ]
        ),
        what="the end of the transfers' threads",
    )


@contextlib.contextmanager
def no_file_above(size: int) -> Iterator[None]:
    """Let the kernel refuse this process larger files, and memory that is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
