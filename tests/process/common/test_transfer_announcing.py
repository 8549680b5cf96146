"""What a holder says of the pieces that it has: soon, and the less often the more others want to hear it."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest

from rollout_common.transfer.connections.frame_stream import FrameStream
from rollout_common.transfer.connections.frames import Kind
from rollout_common.transfer.held_version import HeldVersion, VersionEnd
from rollout_common.transfer.layout import PushLayout
from rollout_common.transfer.piece_server import PieceServer, read_ranges

PIECES = 40
STEP_SECONDS = 0.01


def version() -> HeldVersion:
    layout = PushLayout.plan([("a", "U8", (PIECES << 20,))])
    return HeldVersion(layout, lambda begin, end: memoryview(bytes(end - begin)))


async def announced(held: HeldVersion) -> tuple[list[list[int]], float]:
    """Mark one piece after the other, and then the end; return what a fetcher hears, and when it ends."""
    ours, its = socket.socketpair()
    server, fetcher = FrameStream(ours), FrameStream(its)
    serving = asyncio.create_task(PieceServer(server, held).run())
    heard: list[list[int]] = []

    async def hear() -> None:
        while (frame := await fetcher.receive()).kind is Kind.HAVE:
            runs = read_ranges(frame, PIECES)
            heard.append([piece for begin, end in runs for piece in range(begin, end)])
        assert frame.kind is Kind.END

    hearing = asyncio.create_task(hear())
    for piece in range(PIECES):
        held.mark_piece(piece, bytes(16))
        await asyncio.sleep(STEP_SECONDS)
    began = time.monotonic()
    held.finish(VersionEnd("r", {"a": "d"}))
    await asyncio.wait_for(hearing, 10)
    took = time.monotonic() - began
    serving.cancel()
    await asyncio.wait([serving])
    await server.close()
    await fetcher.close()
    return heard, took


@pytest.mark.parametrize("others", [0, 1000])
async def test_each_piece_is_announced_once_and_many_fetchers_are_told_less_often(
    others: int,
) -> None:
    held = version()
    for _ in range(others):
        held.subscribe(lambda: None)
    heard, took = await announced(held)
    assert sorted(piece for news in heard for piece in news) == list(range(PIECES))
    if (
        others
    ):  # every 0.2 s of the 0.4 s that all takes, and of the more that a busy machine makes of it
        assert len(heard) < PIECES / 3
    else:
        assert len(heard) > 5
    assert took < 3


async def test_who_no_longer_fetches_is_not_counted() -> None:
    held = version()
    ends = [held.subscribe(lambda: None) for _ in range(3)]
    assert held.listener_count == 3
    for end in ends:
        end()
    assert held.listener_count == 0
