"""A gang without engines: a tiny worker as its head, members with real control ports on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from rollout_worker.device_turn import DeviceTurn
from rollout_worker.engine import (
    Engine,
    EngineError,
    GangMembership,
    GivenWeights,
    MemberInfo,
    Sink,
    TensorEntry,
)
from rollout_worker.engines.shared_memory.sinks import MappedSink
from rollout_worker.engines.shared_memory.staging_budget import StagingBudget
from rollout_worker.gang import gang_head as heads
from rollout_worker.gang import member_worker as members
from rollout_worker.gang import silence_timer
from rollout_worker.gang.gang_addresses import GangBroken, make_gang
from rollout_worker.gang.member_worker import MemberWorker
from rollout_worker.ports.member_port import make_member_app
from rollout_worker.ports.port_connections import ConnectionPool, bind_port
from rollout_worker.ports.server import UvicornServer, make_authorizer
from rollout_worker.schemas import Progress
from rollout_worker.settings import WorkerSettings
from tests.support.unit.tiny_engine import LAYOUT, TinyEngine, TinySink, write_weights
from tests.support.unit.tiny_worker import TinyWorker, settings, tiny_worker
from tests.support.waiting import until

if TYPE_CHECKING:
    import pytest

NODES = ("--nodes", "2", "--leader-address", "127.0.0.1")


def hasten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a second of a gang take a fiftieth."""
    monkeypatch.setattr(heads, "MEMBER_POLL_SECONDS", 0.02)
    # So a stall of this whole process, head and member, is nobody's silence.
    monkeypatch.setattr(silence_timer, "MAX_GAP_SECONDS", 0.1)
    monkeypatch.setattr(members, "GANG_WATCH_SECONDS", 0.02)
    monkeypatch.setattr(members, "HEAD_SILENCE_SECONDS", 0.5)
    monkeypatch.setattr(members, "FAILURE_REPORT_SECONDS", 0.5)


def hasten_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do what `hasten` does, and let a head soon miss its members, and soon see a filled slot."""
    hasten(monkeypatch)
    monkeypatch.setattr(heads, "MEMBER_SILENCE_SECONDS", 0.5)
    monkeypatch.setattr(heads, "SLOT_POLL_SECONDS", 0.01)


async def hash_of_checkpoint(home: Path) -> str:
    """Load the checkpoint that all nodes have, once, and return its root hash."""
    async with tiny_worker(home) as alone:
        active = alone.updates.active
        assert active is not None
        assert active.root_hash is not None
        return active.root_hash


def nodes_of(count: int) -> tuple[str, ...]:
    """Flags of a gang of so many nodes."""
    return ("--nodes", str(count), *NODES[2:])


class GangEngine(TinyEngine):
    """A tiny engine whose slots other nodes know, too."""

    slots: Path

    async def open_slot(
        self,
        entries: Sequence[TensorEntry],
        *,
        on_disk: bool = False,
        given: GivenWeights | None = None,
    ) -> TinySink:
        sink = await super().open_slot(entries, on_disk=on_disk, given=given)
        sink.slot = uuid.uuid4().hex
        link = self.slots / sink.slot
        link.symlink_to("/dev/null")
        close = sink.close

        def closing() -> None:
            link.unlink(missing_ok=True)
            close()

        sink.close = closing  # type: ignore[method-assign]
        return sink


class TinyMember:
    """The part of that engine on another node: no ranks, real memory."""

    def __init__(self, gang: GangMembership, info: MemberInfo) -> None:
        self.info = info
        self.slots = gang.slots
        self.wrong: str | None = None
        self.started = False
        self.stopped = False
        self.start_fails: str | None = None
        self.room = True
        self.go = asyncio.Event()
        """Slots are given once it is set."""
        self.go.set()
        self.asked: list[tuple[str, bool]] = []
        self.left_alone: frozenset[str] = frozenset()
        """Names of the tensors that no rank reads."""

    async def start(self, report: Callable[[Progress], None]) -> MemberInfo:
        report(Progress(message="loading"))
        self.started = True
        if self.start_fails is not None:
            raise EngineError(self.start_fails)
        return self.info

    def unread(self, entries: Sequence[TensorEntry]) -> frozenset[str]:
        return self.left_alone & {entry.name for entry in entries}

    async def open_slot(
        self,
        slot: str,
        entries: Sequence[TensorEntry],
        *,
        on_disk: bool = False,
        unread: Collection[str] = (),
    ) -> Sink:
        self.asked.append((slot, on_disk))
        await self.go.wait()
        if not self.room:
            raise EngineError("no room here")
        return MappedSink(entries, slots=self.slots, slot=slot, skip=unread)

    def alive(self) -> str | None:
        return self.wrong

    async def stop(self) -> None:
        self.stopped = True


class Node:
    """One member behind its port."""

    def __init__(self, settings: WorkerSettings, info: MemberInfo) -> None:
        gang = make_gang(settings)
        assert gang is not None
        self.member = TinyMember(gang, info)
        self.staging = StagingBudget(settings.staging_memory)
        self.locks = DeviceTurn(settings, None) if settings.turn_devices else None
        self.worker = MemberWorker(settings, gang, lambda: self.member, self.staging, self.locks)
        self._authorizer = make_authorizer(settings)
        self._socket = bind_port("127.0.0.1", settings.control_port, "--control-port")
        self.port = int(self._socket.getsockname()[1])
        app = make_member_app(self.worker, self._authorizer)
        self._server = UvicornServer(app, ConnectionPool(64))
        self._serving = asyncio.create_task(self._server.serve([self._socket]))
        self.running = asyncio.create_task(self.worker.run_until_broken())

    async def why(self, seconds: float = 10.0) -> str:
        """Wait until it ends by itself; says why it did."""
        await asyncio.wait([self.running], timeout=seconds)
        error = self.running.exception()
        assert isinstance(error, GangBroken)
        return str(error)

    async def silence(self) -> None:
        """Answer no more."""
        self._server.should_exit = True
        await asyncio.wait([self._serving])

    async def stop(self) -> None:
        self.running.cancel()
        await asyncio.wait([self.running])
        await self.worker.stop_worker()
        await self.silence()
        await self._authorizer.close()


class TinyGang(TinyWorker):
    """The head of a gang; its own loops may end, as a gang's do."""

    running: asyncio.Task[None]

    def __init__(self, home: Path, members: str, flags: Sequence[str] = ()) -> None:
        nodes = nodes_of(1 + len(members.split(",")))
        super().__init__(home, [*nodes, "--member-addresses", members, *flags])
        gang = make_gang(self.worker.settings)
        assert gang is not None
        self.slots = gang.slots
        self.worker = type(self.worker)(self.worker.settings, self._make, gang)
        self.runtime = self.worker.runtime
        self.updates, self.commits = self.worker.updates, self.worker.commits
        self.verbs, self.flights = self.worker.verbs, self.worker.flights

    def _make(self) -> Engine:
        engine = GangEngine(self.model, self.rows)
        engine.slots = self.slots
        engine.before.update(self.before_start)
        self.engines.append(engine)
        return cast("Engine", engine)

    async def why(self, seconds: float = 10.0) -> str:
        """Wait until the gang is given up; says why."""
        await asyncio.wait([self.running], timeout=seconds)
        error: BaseException | None = self.running.exception()
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        assert isinstance(error, GangBroken)
        return str(error)


def member_settings(*flags: str, rank: int = 1) -> WorkerSettings:
    """Settings of a rank above 0."""
    return settings("--control-port", "0", *nodes_of(1 + rank), "--rank", str(rank), *flags)


@contextlib.asynccontextmanager
async def node(home: Path, root_hash: str, *flags: str, rank: int = 1) -> AsyncIterator[Node]:
    """Run a member that has loaded the checkpoint of that hash."""
    model = write_weights(home / "model", 100)
    info = MemberInfo(str(model), root_hash, LAYOUT)
    running = Node(member_settings(*flags, rank=rank), info)
    try:
        yield running
    finally:
        await running.stop()


@contextlib.asynccontextmanager
async def head(home: Path, address: str, *flags: str, wait: bool = True) -> AsyncIterator[TinyGang]:
    """Run a head whose member is there."""
    gang = TinyGang(home, address, flags)
    gang.running = asyncio.create_task(gang.worker.run_until_cancelled())
    try:
        if wait:
            await until(
                lambda: gang.runtime.lifecycle.has_engine or gang.running.done(), what="the gang"
            )
        yield gang
    finally:
        gang.running.cancel()
        await asyncio.wait({gang.running})
        await gang.worker.supervisor.end_engine()
    broken = [rule for engine in gang.engines for rule in engine.broken]
    assert not broken, f"the worker treated its engine badly: {broken}"
