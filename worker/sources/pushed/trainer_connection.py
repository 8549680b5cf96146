"""A trainer's connection to a slot, on the transfer loop: receives a version and reports the outcome.

Over TCP the trainer is a holder that this worker fetches pieces from; over a Unix socket the trainer sends its memory
and reports how far it is filled.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Coroutine
from typing import Any

from rollout_common.transfer.connections.frame_stream import FrameStream
from rollout_common.transfer.connections.frames import (
    Frame,
    Kind,
    Malformed,
    TransferError,
    check_kind,
)
from rollout_common.transfer.connections.transfer_loop import running_tasks, wait_for_first, waking
from rollout_common.transfer.held_version import HeldVersion, read_end
from rollout_common.transfer.layout import LayoutError, PushLayout
from rollout_common.transfer.memory.mapped_memory import MappingCache, SharedMemoryError
from rollout_common.transfer.nixl.agent_handle import NixlFailed
from rollout_common.transfer.nixl.memory_serving import memory_server
from rollout_common.transfer.nixl.piece_reading import piece_reader
from rollout_common.transfer.piece_choice import HolderLink
from rollout_common.transfer.piece_server import NIXL
from rollout_worker.sources.settings import (
    FORMER_STREAM_SECONDS,
    LEAVE_SECONDS,
    PROGRESS_SECONDS,
    TAKEOVER_SECONDS,
)

from .pushed_memory import Memory, Refusal, TrainerMemory, TransferFailed
from .version_fetching import VersionFetching, check_protocol, read_holders


class TrainerConnection:
    """One connection of a trainer.

    Args:
        stream: The connection, whose `HELLO` was read.
        hello: That frame.
        fetching: Fetches what its ticket is for.
        maps: Where mappings of senders' memory come from.
    """

    def __init__(
        self, stream: FrameStream, hello: Frame, fetching: VersionFetching, maps: MappingCache
    ) -> None:
        self._stream, self._hello, self._fetching, self._maps = stream, hello, fetching, maps
        self._incoming = fetching.incoming
        self._name = ""
        self._news = asyncio.Event()

    async def run(self) -> None:
        """Receive until the version is staged or has failed, and report that.

        Raises:
            TransferError: The connection ended first.
        """
        incoming, stream = self._incoming, self._stream
        try:
            await self._take_over()
        except Refusal as refusal:
            return await self._refuse(refusal)
        incoming.on_over.append(waking(self._news))
        why = "the worker gave it up"
        try:
            stream.start_pinging()
            try:
                await self._receive()
            except Refusal as refusal:
                why = str(refusal)
                incoming.fail(why, refusal.tensor)
                return await self._refuse(refusal)
            except (TransferFailed, Malformed) as error:
                why = str(error)
                incoming.fail(why)
                await self._report()
            await stream.leave(LEAVE_SECONDS)
        except TransferError as error:
            why = f"the sender is gone: {error}"
            raise
        finally:
            incoming.detach(stream, why)
        return None

    async def _take_over(self) -> None:
        """Take the place of a connection that is gone or silent.

        Raises:
            Refusal: The ticket is in use, or the version is over.
        """
        incoming, streams = self._incoming, self._incoming.streams
        lent = incoming.memory is not None and not incoming.memory.own
        # The former connection may need a moment to notice that its other end is gone.
        await incoming.wait_change(
            lambda: not streams or not incoming.takes_trainer or lent, TAKEOVER_SECONDS
        )
        now, former = time.monotonic(), list(streams)
        in_use = any(now - each.heard < TAKEOVER_SECONDS for each in former)
        if not incoming.takes_trainer or lent or in_use:
            raise Refusal("bad-ticket", "the ticket is used: stage again for another one")
        streams.append(self._stream)
        incoming.tried = ""
        for each in former:
            each.interrupt()
        if not await incoming.wait_change(
            lambda: not any(each in streams for each in former), FORMER_STREAM_SECONDS
        ):
            streams.remove(self._stream)
            raise Refusal("bad-ticket", "the previous connection has not ended: stage again")

    async def _refuse(self, refusal: Refusal) -> None:
        head: dict[str, Any] = {"slug": refusal.slug, "detail": str(refusal), "name": self._name}
        if refusal.tensor is not None:
            head["tensor"] = refusal.tensor
        await self._stream.send(Kind.ERROR, head)
        await self._stream.leave(LEAVE_SECONDS)

    async def _receive(self) -> None:
        """Receive everything, and report the outcome."""
        check_protocol(self._hello)
        about = await self._await_frame(Kind.LAYOUT)
        self._name = about.text("name", "")
        if self._incoming.over:
            await self._stream.send(Kind.READY)
            return await self._report()
        self._incoming.by_nixl = about.text("by", "") == NIXL
        if self._incoming.by_nixl:
            await _start_nixl()
        try:
            layout = PushLayout.from_json(about.head.get("layout"))
        except LayoutError as error:
            raise Refusal("wrong-layout", str(error), error.tensor) from error
        held = self._incoming.begin(layout)
        base = about.head.get("base")
        if base is not None and (why := self._incoming.deltas.check_base(base, layout)):
            raise Refusal("wrong-base", why)
        if not self._stream.unix:
            return await self._fetch_pieces(about, layout)
        await self._stream.send(Kind.READY)
        with self._maps.keep_mapping():
            memory = await self._take_memory(held.layout)
            return await self._report_during(self._follow(held), memory)

    async def _await_frame(self, kind: Kind) -> Frame:
        """Return the next frame, which must be of this kind; stop waiting for it if the slot ends first."""
        async with running_tasks(self._stream.expect(kind), self._news.wait()) as tasks:
            await wait_for_first(tasks)
            if tasks[0].done():
                frame: Frame = tasks[0].result()
                return frame
            raise TransferFailed(self._incoming.failure or "it is staged")

    async def _fetch_pieces(self, about: Frame, layout: PushLayout) -> None:
        """Fetch from the trainer, and from other workers that get the same version."""
        holders = read_holders(about.head.get("holders", []))
        fetcher = await self._fetching.begin_pieces(layout, _share_of(about), len(holders))
        await self._stream.send(Kind.READY)
        self._fetching.start_holders(holders)
        link = HolderLink("the trainer", self._stream, is_origin=True)
        with self._incoming.hold_memory():
            await self._report_during(fetcher.fetch_from(link))

    async def _report_during(
        self, listening: Coroutine[Any, Any, None], lent: Memory | None = None
    ) -> None:
        """Read from the trainer until it has got the outcome, and its memory back.

        Raises:
            TransferError: The trainer is gone.
        """
        async with running_tasks(listening, self._report(lent)) as tasks:
            await wait_for_first(tasks)
            await tasks[1]

    async def _report(self, lent: Memory | None = None) -> None:
        """Report progress, then the outcome, and then that nothing reads the trainer's memory any more."""
        incoming, reported = self._incoming, -1
        while not incoming.over:
            done = incoming.nbytes_there
            if done != reported:
                reported = done
                head = {"name": self._name, "bytes_done": done}
                await self._stream.send(Kind.PROGRESS, head)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PROGRESS_SECONDS):
                    await self._news.wait()
        deaf = self._stream.was_ended  # it connects again, and asks then
        if incoming.root_hash is not None:
            staged = {"name": self._name, "root_hash": incoming.root_hash}
            await self._stream.send(Kind.STAGED, staged)
        else:
            failed: dict[str, Any] = {"name": self._name, "detail": incoming.failure or ""}
            if incoming.tensor is not None:
                failed["tensor"] = incoming.tensor
            await self._stream.send(Kind.FAILED, failed)
        incoming.is_reported = not deaf
        if lent is not None:
            freed = asyncio.Event()
            lent.on_freed = waking(freed)
            if not lent.freed.is_set():
                await freed.wait()
            await self._stream.send(Kind.RELEASED)

    # Over a Unix socket.

    async def _take_memory(self, layout: PushLayout) -> Memory:
        self._stream.takes_memory = True
        frame = await self._await_frame(Kind.MEMORY)
        self._stream.takes_memory = False
        if frame.handle is None:
            raise Malformed("MEMORY came without a descriptor")
        try:
            size = frame.integer("size", max(layout.nbytes, 1))
        except Malformed:
            os.close(frame.handle)
            raise
        try:
            # In a thread, since it takes long to map gigabytes.
            memory = await asyncio.to_thread(TrainerMemory, size, frame.handle, self._maps)
        except SharedMemoryError as error:
            raise Refusal("bad-memory", str(error)) from error
        self._incoming.lay(memory)
        return memory

    async def _follow(self, held: HeldVersion) -> None:
        """Note how far the memory is filled, and then the hashes that the trainer reports."""
        while True:
            frame = check_kind(await self._stream.receive(), Kind.FILLED, Kind.END)
            if frame.kind is Kind.FILLED:
                self._incoming.advance(frame.integer("upto", 0, held.layout.nbytes))
            else:
                held.finish(read_end(frame, held))


async def _start_nixl() -> None:
    """Start both processes with NIXL now: pieces that wait for that would count as late.

    Raises:
        Refusal: It does not start.
    """
    try:
        await asyncio.gather(piece_reader().start_ring(), memory_server().start_process())
    except NixlFailed as error:
        raise Refusal("no-nixl", f"this worker can't read weights: {error}") from error


def _share_of(about: Frame) -> tuple[int, int]:
    """Return this worker's share of the trainer's pieces: its number, and how many shares there are."""
    given = about.head.get("share", [0, 1])
    pair = given if isinstance(given, list) and len(given) == 2 else [None, None]
    share = Frame(Kind.LAYOUT, {"number": pair[0], "count": pair[1]})
    count = share.integer("count", 1)
    return share.integer("number", 0, count - 1), count
