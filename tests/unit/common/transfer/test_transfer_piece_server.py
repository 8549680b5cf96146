"""A holder's end: what it announces, sends and refuses, in virtual time over connections in memory."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_common.transfer import piece_server
from rollout_common.transfer.connections.frames import Frame, Kind, Malformed, TransferError
from rollout_common.transfer.connections.rate_limit import RateLimit
from rollout_common.transfer.held_version import VersionEnd
from rollout_common.transfer.piece_server import PieceServer, ranges_of, read_ranges, split_digests
from rollout_common.transfer.settings import ANNOUNCE_SECONDS
from rollout_common.wire.root_hash import hash_leaf
from tests.support.unit.memory_streams import as_stream, heads_of, memory_pair, played
from tests.support.unit.memory_versions import LEAF, MemoryVersion, small_leaves

COUNT = 8
END = VersionEnd("root", {"t": "0" * 32})


@pytest.fixture(autouse=True, scope="module")
def leaves_of_a_kibibyte() -> Iterator[None]:
    with small_leaves():
        yield


class Holder:
    """A version of eight pieces, and a fetcher's end of a connection to what serves it."""

    def __init__(self, **given: Any) -> None:
        self.version = MemoryVersion([COUNT * LEAF])
        self.held = self.version.held()
        self.near, far = memory_pair()
        self.serving = asyncio.create_task(PieceServer(as_stream(far), self.held, **given).run())

    def mark(self, *numbers: int) -> None:
        for piece in numbers:
            self.held.mark_piece(piece, self.version.digests_of(piece))

    async def get(self, *ranges: tuple[int, int]) -> None:
        await self.near.send(Kind.GET, {"ranges": list(ranges)})

    async def next(self, kind: Kind) -> Frame:
        """The next frame of a kind, others aside."""
        while (frame := await self.near.receive()).kind is not kind:
            pass
        return frame

    async def piece(self) -> int:
        """The number of the next piece, whose bytes and hashes are right."""
        frame = await self.next(Kind.PIECE)
        got, piece = bytearray(frame.payload), frame.integer("piece")
        await self.near.read_into(memoryview(got))
        assert got == self.version.bytes_of(piece)
        assert frame.text("digests") == self.version.digests_of(piece).hex()
        return piece


@contextlib.asynccontextmanager
async def holder(**given: Any) -> AsyncIterator[Holder]:
    """Serve for the block."""
    made = Holder(**given)
    try:
        yield made
    finally:
        made.near.interrupt()
        made.serving.cancel()
        with contextlib.suppress(TransferError, asyncio.CancelledError):
            await made.serving


@played
async def test_pieces_are_announced_as_they_come_and_sent_as_they_are_asked_for() -> None:
    async with holder() as made:
        made.mark(5, 1, 2)
        assert (await made.next(Kind.HAVE)).head["ranges"] == [[1, 3], [5, 6]]
        await made.get((1, 2), (5, 6))
        assert [await made.piece(), await made.piece()] == [1, 5]
        made.mark(0)
        assert (await made.next(Kind.HAVE)).head["ranges"] == [[0, 1]]


@played
async def test_what_is_requested_from_an_origin_is_announced_once() -> None:
    async with holder() as made:
        made.held.share = 2
        made.held.claim_pieces([4, 3])
        assert (await made.next(Kind.HAVE)).head == {"ranges": [], "claimed": [[3, 5]], "share": 2}
        made.held.claim_pieces([3])  # it came damaged, or late
        made.mark(3)
        assert (await made.next(Kind.HAVE)).head == {"ranges": [[3, 4]]}
        made.held.claim_pieces([0])
        made.mark(4)
        claims = {"claimed": [[0, 1]], "share": 2}
        assert (await made.next(Kind.HAVE)).head == {"ranges": [[4, 5]], **claims}
        made.held.claim_pieces([1])
        made.mark(*(piece for piece in range(COUNT) if piece not in (3, 4)))
        assert "claimed" not in (await made.next(Kind.HAVE)).head, "it has all of them"


@played
async def test_news_of_a_moment_go_out_in_one_frame() -> None:
    async with holder() as made:
        made.mark(0)
        await made.next(Kind.HAVE)
        for piece in range(1, COUNT):
            made.mark(piece)
            await asyncio.sleep(ANNOUNCE_SECONDS / 20)
        assert (await made.next(Kind.HAVE)).head["ranges"] == [[1, COUNT]]


@pytest.mark.parametrize(("others", "most"), [(0, COUNT), (1000, 2)])
@played
async def test_each_piece_is_announced_once_and_many_fetchers_are_told_less_often(
    others: int, most: int
) -> None:
    async with holder() as made:
        for _ in range(others):
            made.held.subscribe(lambda: None)
        for piece in range(COUNT):
            made.mark(piece)
            await asyncio.sleep(2 * ANNOUNCE_SECONDS)
        made.held.finish(END)
        told = []
        while (frame := await made.near.receive()).kind is Kind.HAVE:
            told.append(frame.head["ranges"])
        assert frame.kind is Kind.END
        assert [
            piece for runs in told for begin, end in runs for piece in range(begin, end)
        ] == list(range(COUNT))
        assert len(told) == most


@played
async def test_the_end_of_what_is_all_there_comes_before_any_piece() -> None:
    """So that a fetcher that wants another version takes nothing of this one."""
    async with holder() as made:
        made.mark(*range(COUNT))
        made.held.finish(END)
        assert (await made.near.receive()).kind is Kind.HAVE
        await made.get((0, COUNT))
        assert (await made.near.receive()).kind is Kind.END
        assert await made.piece() == 0


@played
async def test_a_piece_that_is_asked_for_twice_is_sent_twice() -> None:
    async with holder() as made:
        made.mark(3)
        await made.get((3, 4))
        await made.get((3, 4))
        assert [await made.piece(), await made.piece()] == [3, 3]


@played
async def test_a_piece_that_was_not_announced_is_refused() -> None:
    async with holder() as made:
        made.mark(3)
        await made.get((2, 4))
        with pytest.raises(Malformed, match="piece 2 was asked for before it was announced"):
            await made.serving


@pytest.mark.parametrize(
    ("kind", "ranges", "says"),
    [
        (Kind.GET, [[0, COUNT + 1]], "GET.end must be a number from 0 to 8"),
        (Kind.GET, [[2, 1]], "GET.end must be a number from 2 to 8"),
        (Kind.GET, [[-1, 1]], "GET.begin"),
        (Kind.GET, [[0, True]], "GET.end"),
        (Kind.GET, [[0, 3], [2, 4]], "GET.begin must be a number from 3 to 8"),
        (Kind.GET, [[0]], "GET.begin"),
        (Kind.GET, "all", "must be a list of runs"),
        (Kind.GET, [[0, 0]] * (COUNT + 1), "must be a list of runs"),
        (Kind.HAVE, [[0, 1]], "HAVE came where GET was due"),
    ],
)
@played
async def test_requests_that_are_none_end_the_connection(
    kind: Kind, ranges: object, says: str
) -> None:
    async with holder() as made:
        made.mark(*range(COUNT))
        await made.near.send(kind, {"ranges": ranges})
        with pytest.raises(Malformed, match=says):
            await made.serving


@played
async def test_one_fetcher_can_ask_for_so_many_pieces_at_once_and_no_more() -> None:
    async with holder() as made:
        made.mark(*range(COUNT))
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(piece_server, "MAX_REQUESTED", 3 * COUNT)
            for _ in range(5):
                await made.get((0, COUNT))
            with pytest.raises(Malformed, match="more than 24 pieces were asked for at once"):
                await made.serving


@played
async def test_a_version_that_is_given_up_ends_the_connection_with_the_reason() -> None:
    async with holder() as made:
        made.mark(0)
        await made.next(Kind.HAVE)
        made.held.fail("the trainer is gone")
        with pytest.raises(TransferError, match="the trainer is gone"):
            await made.serving


@played
async def test_memory_that_was_given_up_ends_the_connection() -> None:
    async with holder() as made:

        def read_bytes(begin: int, end: int) -> memoryview:
            raise ValueError("operation forbidden on released memoryview object")

        made.held.read_bytes = read_bytes
        made.mark(0)
        await made.get((0, 1))
        with pytest.raises(TransferError, match="released memoryview"):
            await made.serving


@played
async def test_a_fetcher_with_the_base_gets_what_differs_where_that_is_known() -> None:
    deltas = {1: b"delta of piece 1"}
    async with holder(delta_of=deltas.get) as made:
        made.mark(0, 1)
        await made.get((0, 2))
        assert await made.piece() == 0
        frame = await made.next(Kind.DELTA)
        got = bytearray(frame.payload)
        await made.near.read_into(memoryview(got))
        assert got == deltas[1]
        assert frame.text("hash") == hash_leaf(deltas[1]).hex()
        assert frame.text("digests") == made.version.digests_of(1).hex()


@played
async def test_pieces_go_out_at_the_pace_that_connections_share() -> None:
    clock = asyncio.get_running_loop().time
    async with holder(pace=RateLimit(2.0 * LEAF, clock)) as made:
        made.near.rate = 1e12
        made.mark(*range(COUNT))
        await made.get((0, COUNT))
        for _ in range(COUNT):
            await made.piece()
        assert clock() >= (COUNT - 1) / 2 - 0.1


@played
async def test_a_fetcher_that_reads_the_memory_gets_pieces_without_bytes_and_deltas() -> None:
    memory = {"agent": "00", "address": 1, "size": COUNT * LEAF}
    async with holder(registered=memory, delta_of={1: b"di"}.get) as made:
        assert (await made.near.receive()).head == memory
        made.mark(0, 1, 2)
        await made.near.send(Kind.GET, {"ranges": [[0, 2]], "by": "nixl"})
        told = await made.next(Kind.PIECE)
        assert (told.integer("piece"), told.payload) == (0, 0)
        assert told.text("digests") == made.version.digests_of(0).hex()
        delta = await made.next(Kind.DELTA)
        assert (delta.integer("piece"), delta.payload) == (1, 2)
        await made.near.skip(delta)
        await made.get((0, 1))
        assert await made.piece() == 0


@pytest.mark.parametrize("registered", [None, {"agent": "00"}])
@played
async def test_a_way_to_read_that_there_is_not_ends_the_connection(
    registered: dict[str, str] | None,
) -> None:
    async with holder(registered=registered) as made:
        made.mark(0)
        way = "nixl" if registered is None else "rdma"
        await made.near.send(Kind.GET, {"ranges": [[0, 1]], "by": way})
        with pytest.raises(Malformed, match="names no way to read this memory"):
            await made.serving


@played
async def test_other_words_of_the_fetcher_are_heard_until_the_last() -> None:
    heard: list[Kind] = []

    def hear(frame: Frame) -> bool:
        heard.append(frame.kind)
        return frame.kind is not Kind.STAGED

    async with holder(on_frame=hear) as made:
        for kind in (Kind.PROGRESS, Kind.STAGED):
            await made.near.send(kind)
        await made.serving
        assert heard == [Kind.PROGRESS, Kind.STAGED]
        assert not list(heads_of(made.near.other, Kind.PIECE))


@settings(max_examples=50)
@given(st.sets(st.integers(0, 99)))
def test_ranges_name_the_pieces_again(numbers: set[int]) -> None:
    runs = ranges_of(list(numbers))
    assert [piece for begin, end in runs for piece in range(begin, end)] == sorted(numbers)
    frame = Frame(Kind.HAVE, {"ranges": [list(run) for run in runs]})
    assert read_ranges(frame, 100) == runs
    if numbers and max(numbers) > 0:
        with pytest.raises(Malformed):
            read_ranges(frame, max(numbers))


@pytest.mark.parametrize("given_", ["", "zz" * 32, "0" * 62, "0" * 66, 7])
def test_hashes_of_leaves_that_are_not_as_many_are_refused(given_: object) -> None:
    with pytest.raises(Malformed, match=r"PIECE\.digests must"):
        split_digests(Frame(Kind.PIECE, {"digests": given_}), 2)
