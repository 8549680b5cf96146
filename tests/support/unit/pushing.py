"""A trainer's end of pushed weights, plain enough to break at any point, and a worker with its port."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import xxhash

from rollout_common.transfer.arena import Slot
from rollout_common.transfer.connection import Connection
from rollout_common.transfer.delta import encode
from rollout_common.transfer.dialing import dial, dial_unix
from rollout_common.transfer.frames import CHUNK_BYTES, PROTOCOL, Frame, Kind
from rollout_common.transfer.layout import PushLayout
from rollout_common.wire.root_hash import HashedTensor, root_hash_of
from rollout_worker.ports.serving_certificate import serving_certificate
from rollout_worker.ports.weights_port import WeightsPort
from rollout_worker.schemas import StagedWeights, Transfer
from tests.support.unit.digests import tensor_digest
from tests.support.unit.tiny_worker import TinyWorker, tiny_worker
from tests.support.waiting import until

OWN: list[Slot] = []
"""Memory of the trainers of this process."""
TINY = {"number": ("U8", (1,)), "rest": ("U8", (1,))}


class Version:
    """The bytes of one version in the trainer's memory; tokens of the tiny engine are `number`."""

    def __init__(
        self, number: int, tensors: Mapping[str, tuple[str, tuple[int, ...]]] = TINY
    ) -> None:
        self.layout = PushLayout.plan((name, *spec) for name, spec in tensors.items())
        self.slot = Slot(self.layout.nbytes)
        OWN.append(self.slot)
        self.digests: dict[str, str] = {}
        for placed in self.layout.tensors:
            view = self.slot.view(placed)
            view[:] = bytes([number if placed.name == "number" else 0]) * placed.nbytes
            self.digests[placed.name] = tensor_digest(view)

    @classmethod
    def of(cls, tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]]) -> Version:
        """A version of these tensors: dtype, shape and bytes by name."""
        made = cls(0, {name: (dtype, shape) for name, (dtype, shape, _) in tensors.items()})
        for placed in made.layout.tensors:
            view = made.slot.view(placed)
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

    @property
    def offsets(self) -> range:
        """Where its chunks begin."""
        return range(0, self.layout.nbytes, CHUNK_BYTES)

    def chunk(self, offset: int) -> bytes:
        return bytes(self.slot.bytes(offset, min(offset + CHUNK_BYTES, self.layout.nbytes)))


class Trainer:
    """One connection of a trainer, which says what it is told to."""

    def __init__(self, connection: Connection, version: Version) -> None:
        self.connection, self.version = connection, version
        self.base: Version | None = None
        """Version 1 where deltas of it are sent."""

    def greet(self, transfer: Transfer, protocol: int = PROTOCOL) -> None:
        self.connection.send(Kind.HELLO, {"protocol": protocol, "ticket": transfer.ticket})

    def tell(self, **fields: Any) -> None:
        """Say what is to come."""
        base = {} if self.base is None else {"base": base_of(1, self.base)}
        layout = self.version.layout.to_json()
        self.connection.send(Kind.LAYOUT, {**base, "layout": layout, "hops": [], **fields})

    def hello(self, transfer: Transfer, **fields: Any) -> None:
        self.greet(transfer)
        self.tell(**fields)

    def ready(self) -> list[list[int]]:
        return list(self.connection.expect(Kind.READY).head["have"])

    def memory(self, slot: Slot | None = None) -> None:
        slot = slot or self.version.slot
        self.connection.send(Kind.MEMORY, {"size": slot.size}, handle=slot.handle)

    def filled(self, upto: int | None = None) -> None:
        whole = self.version.layout.nbytes
        self.connection.send(Kind.FILLED, {"upto": whole if upto is None else upto})

    def data(self, offset: int, payload: bytes | None = None, **fields: Any) -> None:
        whole = self.version.chunk(offset)
        head = {"offset": offset, "hash": xxhash.xxh3_128_hexdigest(whole), **fields}
        self.connection.send(Kind.DATA, head, whole if payload is None else payload)

    def delta(self, base: Version, offset: int = 0, **fields: Any) -> None:
        """Send how the version's bytes differ from the base's, from the offset to the end."""
        size = self.version.layout.nbytes
        content = fields.pop("content", None)
        if content is None:
            content = encode(base.slot.bytes(offset, size), self.version.slot.bytes(offset, size))
        assert content is not None
        digest = xxhash.xxh3_128_hexdigest(content)
        head = {"offset": offset, "bytes": size - offset, "hash": digest, **fields}
        self.connection.send(Kind.DELTA, head, fields.pop("payload", content))

    def deltas(self, base: Version) -> None:
        """Send how all bytes differ from the base's, 1 MiB at a time: they may differ everywhere."""
        for offset in self.version.offsets:
            old, new = base.chunk(offset), self.version.chunk(offset)
            self.delta(base, offset, content=encode(old, new), bytes=len(new))

    def end(self, **fields: Any) -> None:
        head = {"root_hash": self.version.root_hash, "digests": self.version.digests}
        self.connection.send(Kind.END, {**head, **fields})

    def answer(self) -> Frame:
        """The next word that isn't mere progress."""
        while (frame := self.connection.receive()).kind is Kind.PROGRESS:
            pass
        return frame

    def whole(self, transfer: Transfer, **fields: Any) -> None:
        """Send everything."""
        self.hello(transfer, **fields)
        have = self.ready()
        if self.connection.unix:
            self.memory()
            self.filled()
        else:
            for offset in self.version.offsets:
                if not any(begin <= offset < end for begin, end in have):
                    self.data(offset)
        self.end()


def base_of(version: int, given: Version) -> dict[str, Any]:
    """The base of deltas, as stages and HELLO name it."""
    return {"epoch": 1, "version": version, "root_hash": given.root_hash}


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


async def push(worker: TinyWorker, version: int, given: Version, kind: str) -> StagedWeights:
    """Stage (1, version) by pushing it, to the end."""
    begun = await stage(worker, version)
    assert begun.transfer is not None

    def send() -> None:
        assert begun.transfer is not None
        with trainer(begun.transfer, given, kind) as end:
            end.whole(begun.transfer)
            end.answer()

    await asyncio.to_thread(send)
    slot = worker.updates.slot
    assert slot is not None
    return slot.to_view()


async def stage(worker: TinyWorker, version: int, **fields: Any) -> StagedWeights:
    """Begin to stage pushed bytes as (1, version)."""
    return await worker.begin_stage(version, 0, **{"source": {"pushed": {}}, **fields})


@contextlib.asynccontextmanager
async def pushed_worker(home: Path, *flags: str) -> AsyncIterator[TinyWorker]:
    """Run a worker that takes pushed weights over both ways."""
    ways = ("--weights-port", "0", "--weights-socket", str(home / "weights.sock"))
    async with tiny_worker(home, *ways, "--data-host", "127.0.0.1", *flags) as worker:
        asked = worker.worker.settings
        port = WeightsPort(asked, worker.updates.pushes.desk, serving_certificate(asked))
        port.start()
        try:
            yield worker
        finally:
            await asyncio.to_thread(port.stop)


def held() -> set[str]:
    """What the worker of this process has open of pushed weights; the trainers' memory is closed first."""
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


async def quiet() -> None:
    """Wait until no thread of a transfer is left."""
    await until(
        lambda: (
            not [
                t.name
                for t in threading.enumerate()
                if t.name.startswith("weights") and t.name != "weights-port"
            ]
        ),
        what="the end of the transfer's threads",
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
