"""One replica's connection of a push, on the transfer loop: it serves the bytes and reads the replica's reports.

Over a Unix socket it sends the memory itself, and stays open until the replica no longer reads it. Over TCP the
replica fetches pieces, from here and from the other replicas that `LAYOUT` names.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout_client.http_clients import allow_connections
from rollout_common.transfer.connections.dialing import dial_stream, dial_unix_stream
from rollout_common.transfer.connections.frame_sockets import LARGE_PACKETS_LOST
from rollout_common.transfer.connections.frame_stream import FrameStream
from rollout_common.transfer.connections.frames import (
    PROTOCOL,
    Ended,
    Frame,
    Kind,
    Malformed,
    TransferError,
)
from rollout_common.transfer.connections.rate_limit import RateLimit
from rollout_common.transfer.connections.tls_session import Trust
from rollout_common.transfer.connections.transfer_loop import (
    run_on_loop,
    running_tasks,
    wait_for_first,
    waking,
)
from rollout_common.transfer.memory.mapped_memory import SharedMemoryError
from rollout_common.transfer.nixl.memory_serving import memory_server
from rollout_common.transfer.piece_server import NIXL, DeltaOf, OnFrame, PieceServer
from rollout_common.transfer.settings import HOP_SECONDS, LEASE_SECONDS

from .push_deltas import PieceDeltas
from .push_progress import PushProgress
from .routes import Route
from .settings import DIAL_SECONDS, RECONNECT_SECONDS
from .stream_filling import Filling

logger = logging.getLogger(__name__)

MAX_DIALS = 256
"""Replicas that are being called at once."""
CONNECTIONS = 3
"""Most connections to one replica, the first one included."""

FOLLOW_BYTES = 8 << 20
"""Fewest new bytes that one report to a receiver of shared memory covers, except the last."""


@dataclass(frozen=True, slots=True)
class Link:
    """The trust and the rate limit of connections over TCP.

    Attributes:
        trust: What TLS trusts, where a replica's port accepts TLS only.
        pace: The rate limit of all connections; None: no limit.
        dials: Bounds how many replicas are called at once, so that the deadline of each is not spent waiting for others.
    """

    trust: Trust | None = None
    pace: RateLimit | None = None
    dials: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_DIALS))


class Sender:
    """Sends one version to the replica of a route, once `start` is called; without `deltas`, all of its bytes."""

    def __init__(
        self,
        route: Route,
        filling: Filling,
        progress: PushProgress,
        link: Link,
        deltas: PieceDeltas | None = None,
    ) -> None:
        self._route, self._filling, self._progress = route, filling, progress
        self._link, self._deltas = link, deltas
        self._streams: list[FrameStream] = []
        """Its connections, the last one last."""
        self._made_at = time.monotonic()
        self._stopping = threading.Event()
        self._stop_soon: Callable[[], None] = self._stopping.set
        self._ended = threading.Event()
        self._release: Callable[[], None] | None = None
        self._has_served = False
        """Whether the replica has let this end serve its node's part: rank 0 hears what becomes of the replica then."""
        self._given = False
        """Whether the memory of this process was sent to the replica."""
        self._given_back = False
        """Whether the replica has reported that it no longer reads that memory: nothing else proves it."""

    def start(self) -> None:
        """Begin to send, on the transfer loop."""
        self._release = self._filling.slot.lend_slot()
        run_on_loop(self._run())

    def stop(self) -> None:
        """Stop sending at once; a replica that has the bytes keeps them."""
        self._stopping.set()
        self._stop_soon()

    @property
    def sent(self) -> int:
        """Bytes of tensors, or of what differs, that went out."""
        return sum(stream.bytes_sent for stream in self._streams)

    def stands(self, name: str) -> bool:
        """Whether it sends the bytes to this replica, and the replica has sent something within the last seconds."""
        heard = self._streams[-1].heard if self._streams else self._made_at
        return self._route.receiver.name == name and time.monotonic() - heard < HOP_SECONDS

    def join(self, seconds: float) -> bool:
        """Wait until it has ended and freed everything; return whether that came within these seconds."""
        return self._ended.wait(seconds)

    async def _run(self) -> None:
        name, stopped = self._route.receiver.name, asyncio.Event()
        self._stop_soon = waking(stopped)
        if self._stopping.is_set():
            stopped.set()
        try:
            async with running_tasks(self._carry(), stopped.wait()) as tasks:
                await wait_for_first(tasks)
                why = tasks[0].result() if tasks[0].done() else "the publish was given up"
                if not self._progress.settled(name) and not self._has_served:
                    self._progress.failed(name, why)
        except Exception as error:
            logger.exception("sending weights to %s failed", name)
            self._progress.failed(name, f"internal error: {error}")
        finally:
            if self._given and not self._given_back:
                # The replica is silent, gone or refused: it may still serve from these pages.
                self._filling.slot.note_doubt(name)
            if self._release is not None:
                self._release()
            self._ended.set()

    async def _carry(self) -> str:
        """Send everything; return what went wrong, for a replica that has not settled."""
        why = "it closed the connection without an answer"
        for _ in range(CONNECTIONS):
            met = False
            try:
                async with self._link.dials:
                    stream = await self._dial()
                self._streams.append(stream)
                met = True
                try:
                    await self._serve(stream)
                finally:
                    await stream.close()
                return why
            except Ended as error:
                why = str(error)
            except TransferError as error:
                return str(error)
            # Perhaps only the connection broke.
            if (
                not met
                or LARGE_PACKETS_LOST in why
                or self._route.kind == "shm"
                or self._progress.settled(self._route.receiver.name)
            ):
                return why
            await asyncio.sleep(RECONNECT_SECONDS)
        return why

    async def _dial(self) -> FrameStream:
        where = self._route.receiver.transfer
        if self._route.kind == "shm":
            assert where.socket is not None
            return await dial_unix_stream(where.socket, DIAL_SECONDS, silence=LEASE_SECONDS)
        assert where.port is not None
        trust = self._link.trust if where.tls else None
        return await dial_stream(
            self._route.receiver.host, where.port, DIAL_SECONDS, silence=LEASE_SECONDS, trust=trust
        )

    async def _serve(self, stream: FrameStream) -> None:
        receiver, filling = self._route.receiver, self._filling
        stream.start_pinging()
        find = None if self._deltas is None else self._deltas.find_delta
        hello = {"protocol": PROTOCOL, "ticket": receiver.transfer.ticket}
        if not self._route.is_lead:
            await stream.send(Kind.HELLO, {**hello, "name": "another node of the trainer"})
            await stream.expect(Kind.READY)
            self._has_served = True
            return await self._serve_pieces(stream, find)
        about: dict[str, Any] = {
            "name": receiver.name,
            "share": self._route.share,
            "holders": self._route.holders,
        }
        if self._deltas is not None:
            about["base"] = self._deltas.base
        if self._route.kind == "nixl":
            about["by"] = NIXL
        about["layout"] = filling.layout.to_json()
        await stream.send(Kind.HELLO, hello)
        await stream.send(Kind.LAYOUT, about)
        await stream.expect(Kind.READY)
        if self._route.kind == "shm":
            return await self._share_memory(stream)
        return await self._serve_pieces(stream, find, self._hear)

    async def _serve_pieces(
        self, stream: FrameStream, find: DeltaOf | None, on_frame: OnFrame | None = None
    ) -> None:
        held, slot = self._filling.held, self._filling.slot
        async with contextlib.AsyncExitStack() as stack:
            registered = None
            if self._route.kind == "nixl":
                serving = memory_server().serve_memory(slot.handle, slot.size)
                registered = await stack.enter_async_context(serving)
            await PieceServer(stream, held, self._link.pace, find, on_frame, registered).run()

    async def _share_memory(self, stream: FrameStream) -> None:
        """Send the memory, report how far it is filled, and wait until the replica returns it."""
        try:
            handle = self._filling.slot.open_reader()
        except SharedMemoryError as error:  # the pool was closed
            raise TransferError(str(error)) from error
        self._given = True
        try:
            await stream.send(Kind.MEMORY, {"size": self._filling.slot.size}, handle=handle)
        finally:
            os.close(handle)
        async with running_tasks(self._listen(stream), self._follow(stream)) as tasks:
            await wait_for_first(tasks)
            await tasks[0]

    async def _listen(self, stream: FrameStream) -> None:
        while self._hear(await stream.receive()):
            pass

    async def _follow(self, stream: FrameStream) -> None:
        """Report how far the memory is filled, some megabytes at a time, and its hashes at the end."""
        held, announced, news = self._filling.held, 0, asyncio.Event()
        wake = waking(news)

        def is_worth_saying() -> bool:
            upto = held.prefix_end
            whole = upto == held.layout.nbytes
            return (
                upto - announced >= FOLLOW_BYTES
                or (whole and (announced < upto or held.end is not None))
                or held.failure is not None
            )

        # Called where bytes are filled: to wake this loop for each leaf would take the processor from the copy.
        end = held.subscribe(lambda: wake() if is_worth_saying() else None)
        try:
            while announced < held.layout.nbytes or held.end is None:
                news.clear()
                if not is_worth_saying():
                    await news.wait()
                if held.failure is not None:
                    raise TransferError(held.failure)
                if announced < (upto := held.prefix_end):
                    announced = upto
                    await stream.send(Kind.FILLED, {"upto": upto})
            await stream.send(Kind.END, held.end.to_head())
        finally:
            end()

    def _hear(self, frame: Frame) -> bool:
        """Handle a report of the replica; return whether more may come."""
        name = self._route.receiver.name
        match frame.kind:
            case Kind.PROGRESS:
                self._progress.note_bytes(name, frame.integer("bytes_done"))
            case Kind.STAGED:
                self._progress.staged(name, frame.text("root_hash"))
            case Kind.FAILED:
                self._progress.failed(name, frame.text("detail", "it gave no reason"))
            case Kind.ERROR:
                raise TransferError(frame.text("detail", "it gave no reason"))
            case Kind.RELEASED:
                self._given_back = True
                return False
            case _:
                raise Malformed(f"{frame.kind.name} came, which only senders send")
        return self._route.kind == "shm" or not self._progress.settled(name)


def start_senders(
    routes: Sequence[Route],
    filling: Filling,
    progress: PushProgress,
    link: Link,
    deltas: PieceDeltas | None,
) -> list[Sender]:
    """Begin to send on each of these routes, with deltas where its replica has their base."""
    allow_connections(len(routes))
    senders = [
        Sender(route, filling, progress, link, deltas if route.based else None) for route in routes
    ]
    for sender in senders:
        sender.start()
    return senders
