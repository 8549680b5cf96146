"""An origin that gets its bytes slowly: each piece still leaves it once, and the fetchers get the rest from each other."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine
from typing import Any

import pytest

from rollout_common.transfer import piece_choice, piece_fetcher
from rollout_common.transfer.connections.frame_stream import FrameStream
from rollout_common.transfer.held_version import HeldVersion, VersionEnd
from rollout_common.transfer.layout import PushLayout
from rollout_common.transfer.piece_choice import HolderLink
from rollout_common.transfer.piece_fetcher import PieceFetcher
from rollout_common.transfer.piece_server import PieceServer
from tests.support.unit.memory_versions import PlainMemory
from tests.support.waiting import until

MEBI = 1 << 20
PIECES = 3
LATE_SECONDS = 0.5
LAYOUT = PushLayout.plan([(str(number), "U8", (MEBI,)) for number in range(PIECES)])


class Holder(PlainMemory):
    """What one process has of the version, in memory of its own."""

    def __init__(self) -> None:
        super().__init__(LAYOUT.nbytes)
        self.held = HeldVersion(LAYOUT, self.read_bytes)

    def fill(self, piece: int) -> None:
        """Have one more piece."""
        begin, end = LAYOUT.pieces.span(piece)
        self.memory[begin:end] = bytes([piece + 1]) * (end - begin)
        with self.read_bytes(begin, end) as content:
            self.held.mark_piece(piece, LAYOUT.pieces.hash_leaves(piece, content))


class Pool:
    """An origin and two fetchers, all of them on this loop."""

    def __init__(self) -> None:
        self.origin, self.others = Holder(), [Holder(), Holder()]
        self.from_origin: list[FrameStream] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._streams: list[FrameStream] = []
        self.fetchers = [
            PieceFetcher(each.held, each, (number, 2), expected_peers=1)
            for number, each in enumerate(self.others)
        ]
        for number, fetcher in enumerate(self.fetchers):
            self.from_origin.append(self._link(fetcher, self.origin, is_origin=True))
            self._link(fetcher, self.others[1 - number], is_origin=False)

    def _link(self, fetcher: PieceFetcher, holder: Holder, *, is_origin: bool) -> FrameStream:
        """Have a fetcher fetch from a holder; return the holder's end."""
        ours, its = map(FrameStream, socket.socketpair())
        self._streams += [ours, its]
        self._start(PieceServer(ours, holder.held).run())
        self._start(fetcher.fetch_from(HolderLink("holder", its, is_origin)))
        return ours

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(work))

    @property
    def bytes_sent(self) -> int:
        """What left the origin."""
        return sum(stream.bytes_sent for stream in self.from_origin)

    async def all_have(self, piece: int) -> None:
        """Wait until all fetchers have a piece; no longer than until one of them looks."""
        have = [each.held for each in self.others]
        await until(lambda: all(each.has(piece) for each in have), 6 * LATE_SECONDS)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        for stream in self._streams:
            await stream.close()


async def test_a_piece_leaves_an_origin_once_however_long_it_had_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(piece_choice, "LEAST_LATE_SECONDS", LATE_SECONDS)
    # No fetcher looks meanwhile: the next one that does finds others that have been silent for long.
    monkeypatch.setattr(piece_fetcher, "LATE_LOOK_SECONDS", 10 * LATE_SECONDS)
    pool = Pool()
    for piece in range(PIECES):
        await asyncio.sleep(1.2 * LATE_SECONDS)  # as a trainer that makes its tensors one by one
        pool.origin.fill(piece)
        await pool.all_have(piece)
    pool.origin.held.finish(VersionEnd("r", {str(number): "d" for number in range(PIECES)}))
    assert pool.bytes_sent == LAYOUT.nbytes
    assert [each.memory for each in pool.others] == [pool.origin.memory] * 2
    await pool.close()


async def test_the_share_of_a_fetcher_that_says_nothing_is_fetched_from_the_origin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(piece_choice, "LEAST_LATE_SECONDS", 0.2)
    pool = Pool()
    # The first fetcher asks for nothing, and so has nothing.
    monkeypatch.setattr(pool.fetchers[0]._choice, "choose_pieces", lambda link: [])
    for piece in range(PIECES):
        pool.origin.fill(piece)
    await until(lambda: pool.others[1].held.is_complete)
    assert pool.bytes_sent == LAYOUT.nbytes
    await pool.close()
