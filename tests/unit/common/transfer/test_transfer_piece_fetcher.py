"""A fetcher's end: which pieces it asks which holder for, and what it takes, in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from rollout_common.transfer import piece_choice
from rollout_common.transfer.connections.frames import Ended, Kind, Silent, TransferError
from rollout_common.transfer.held_version import HeldVersion, VersionEnd
from rollout_common.transfer.nixl import holder_reading
from rollout_common.transfer.piece_choice import HolderLink
from rollout_common.transfer.piece_fetcher import PieceFetcher
from rollout_common.transfer.piece_server import ranges_of, read_ranges
from rollout_common.transfer.settings import LATE_LOOK_SECONDS, LEAST_LATE_SECONDS
from rollout_common.wire.root_hash import (
    hash_leaf,
)
from tests.support.unit.memory_streams import as_stream, heads_of, memory_pair, played
from tests.support.unit.memory_versions import LEAF, MemoryVersion, PieceMemory, small_leaves
from tests.support.waiting import until

COUNT = 8
FAST = 1e12


@pytest.fixture(autouse=True, scope="module")
def leaves_of_a_kibibyte() -> Iterator[None]:
    """Holders of these stories answer at once, and count as slow all the same."""
    with small_leaves(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(piece_choice, "QUICK_PIECE_SECONDS", 0.0)
        yield


class Far:
    """A holder that sends what a test says, at the far end of a link."""

    def __init__(self, version: MemoryVersion, name: str, *, is_origin: bool = False) -> None:
        self.version = version
        near, self.end = memory_pair()
        near.rate = FAST
        self.near = near
        self.link = HolderLink(name, as_stream(near), is_origin)

    async def announce(self, *numbers: int) -> None:
        await self.end.send(Kind.HAVE, {"ranges": ranges_of(list(numbers))})

    async def claim(self, *numbers: int, share: int = 1) -> None:
        """Say that these are on their way from the origin to this peer, which has this share."""
        claimed = ranges_of(list(numbers))
        await self.end.send(Kind.HAVE, {"ranges": [], "claimed": claimed, "share": share})

    async def asked(self) -> list[int]:
        """The pieces that are asked for next."""
        frame = await self.end.expect(Kind.GET)
        runs = read_ranges(frame, len(self.version.layout.pieces))
        return [piece for begin, end in runs for piece in range(begin, end)]

    async def not_asked(self, seconds: float) -> None:
        """See that nothing is asked for within these seconds."""
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.end.receive()

    async def piece(self, number: int, payload: bytes | None = None) -> None:
        head = {"piece": number, "digests": self.version.digests_of(number).hex()}
        await self.end.send(Kind.PIECE, head, payload or self.version.bytes_of(number))

    async def gives(self, *expected: list[int]) -> None:
        """Be asked for these pieces, some at a time, and send them."""
        for pieces in expected:
            assert await self.asked() == pieces
            for each in pieces:
                await self.piece(each)

    async def delta(self, number: int, content: bytes | None = None) -> None:
        content = content or bytes(each ^ 1 for each in self.version.bytes_of(number))
        about = {"digests": self.version.digests_of(number).hex(), "hash": hash_leaf(content).hex()}
        await self.end.send(Kind.DELTA, {"piece": number, **about}, content)

    async def finish(self, end: VersionEnd | None = None) -> None:
        end = end or self.version.end
        await self.end.send(Kind.END, {"root_hash": end.root_hash, "digests": dict(end.digests)})

    async def serve(self) -> None:
        """Send all that is asked for."""
        with contextlib.suppress(Ended):
            while True:
                for piece in await self.asked():
                    await self.piece(piece)


class Scene:
    """A fetcher of a version of eight pieces, and its holders."""

    def __init__(self, **given: Any) -> None:
        self.version = MemoryVersion([COUNT * LEAF])
        self.store = PieceMemory(self.version)
        self.held = HeldVersion(self.version.layout, self.store.read_bytes)
        for piece in given.pop("there", ()):
            self.held.mark_piece(piece, self.version.digests_of(piece))
        self.fetcher = PieceFetcher(self.held, self.store, **given)
        self.tasks: list[asyncio.Task[None]] = []

    def holder(self, name: str, *, is_origin: bool = False) -> Far:
        far = Far(self.version, name, is_origin=is_origin)
        self.tasks.append(asyncio.create_task(self.fetcher.fetch_from(far.link)))
        return far

    async def ended(self, number: int, match: str) -> None:
        """Wait for the error with which a link ends."""
        with pytest.raises(TransferError, match=match):
            await self.tasks[number]

    async def whole(self) -> None:
        """Wait until all links have ended, and see that everything is right."""
        for task in self.tasks:
            await task
        assert self.fetcher.is_whole
        assert self.store.memory == self.version.content
        assert self.held.end == self.version.end


@played
async def test_a_holder_is_asked_for_what_it_announced_with_a_window_that_grows() -> None:
    made = Scene()
    a = made.holder("a")
    await a.announce(0, 1)
    assert await a.asked() == [0, 1]
    await a.piece(0)
    await a.piece(1)
    await asyncio.sleep(0.01)
    await a.announce(*range(2, COUNT))
    assert await a.asked() == [2, 3, 4, 5]
    await a.piece(2)
    await a.not_asked(0.05)
    await a.piece(3)
    assert await a.asked() == [6, 7], "once half of the window is free"
    for piece in range(4, COUNT):
        await a.piece(piece)
    await a.finish()
    await made.whole()
    assert made.store.commits == [piece * LEAF for piece in range(COUNT)]


@played
async def test_a_quick_holder_is_asked_for_more_at_once_after_each_piece() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(piece_choice, "QUICK_PIECE_SECONDS", 0.02)
        made = Scene()
        a = made.holder("a")
        await a.announce(*range(COUNT))
        assert await a.asked() == [0, 1]
        await a.piece(0)
        assert await a.asked() == [2, 3, 4]
        await asyncio.sleep(0.03)
        await a.piece(1)
        await a.not_asked(0.01)
        await a.piece(2)
        assert await a.asked() == [5, 6], "a slow piece asks for no more than before"
    for piece in range(3, 7):
        await a.piece(piece)
    assert await a.asked() == [7]
    await a.piece(7)
    await a.finish()
    await made.whole()


@played
async def test_what_is_there_or_not_needed_is_not_asked_for() -> None:
    made = Scene(there=[0, 3], unneeded=bytes([0, 1, 1, 0, 0, 0, 0, 1]))
    a = made.holder("a")
    await a.announce(*range(COUNT))
    await a.finish()
    await a.gives([4, 5], [6])
    await made.tasks[0]
    assert made.fetcher.is_whole


@played
async def test_an_origin_is_asked_for_its_share_and_for_the_rest_only_once_others_are_late() -> (
    None
):
    clock = asyncio.get_running_loop().time
    made = Scene(share=(1, 3), expected_peers=2)
    origin = made.holder("origin", is_origin=True)
    await origin.announce(*range(COUNT))
    await origin.gives([1, 4], [7])
    began = clock()
    rest = await origin.asked()
    assert clock() - began > 0.9 * LEAST_LATE_SECONDS
    assert set(rest) <= {0, 2, 3, 5, 6}


@played
async def test_news_of_the_origin_are_no_excuse_for_a_silent_fetcher() -> None:
    made = Scene(share=(0, 2), expected_peers=1)
    origin = made.holder("origin", is_origin=True)
    serving = asyncio.create_task(origin.serve())
    for piece in range(COUNT):
        await origin.announce(piece)
        await asyncio.sleep(LEAST_LATE_SECONDS / 3)
    assert made.held.has(1)
    origin.end.interrupt()
    await serving
    await made.ended(0, "has closed")


@played
async def test_an_origin_without_other_fetchers_is_asked_for_all() -> None:
    made = Scene(share=(1, 3))
    origin = made.holder("origin", is_origin=True)
    await origin.announce(*range(COUNT))
    await origin.finish()
    task = asyncio.create_task(origin.serve())
    await until(lambda: made.fetcher.is_whole, what="all of it")
    assert not made.tasks[0].done(), "an origin is listened to until it closes"
    origin.end.interrupt()
    await task
    await made.ended(0, "has closed")


@played
async def test_another_fetchers_pieces_come_from_it_as_soon_as_it_announces_them() -> None:
    made = Scene(share=(0, 2), expected_peers=1)
    origin, peer = made.holder("origin", is_origin=True), made.holder("peer")
    await origin.announce(*range(COUNT))
    serving = asyncio.create_task(origin.serve())
    for piece in (1, 3, 5, 7):
        await peer.announce(piece)
        assert await peer.asked() == [piece]
        await peer.piece(piece)
    await origin.finish()
    await made.tasks[1]
    asked = [run for head in heads_of(origin.near, Kind.GET) for run in head["ranges"]]
    assert asked == [[0, 1], [2, 3], [4, 5], [6, 7]]
    origin.end.interrupt()
    await serving
    await made.ended(0, "has closed")


@played
async def test_an_idle_fetcher_takes_from_the_share_of_a_slow_one_what_that_one_has_not_claimed() -> (
    None
):
    clock = asyncio.get_running_loop().time
    made = Scene(share=(0, 2), expected_peers=1)
    origin, peer = made.holder("origin", is_origin=True), made.holder("peer")
    await origin.announce(*range(COUNT))
    await peer.claim(1, 3)
    await origin.gives([0, 2], [4], [6])
    began = clock()
    await origin.not_asked(0.9 * LEAST_LATE_SECONDS)  # claims may be on their way
    await peer.announce(1)
    await peer.gives([1])
    for piece in (7, 5):
        assert await origin.asked() == [piece], "the last one first"
        await origin.piece(piece)
    assert clock() - began < 1.1 * LEAST_LATE_SECONDS
    await origin.not_asked(0.9 * LEAST_LATE_SECONDS)
    assert made.held.claimed_since(0) == [0, 2, 4, 6, 7, 5]
    # It is late at last: who claimed it has announced nothing for too long.
    assert await origin.asked() == [3]


@played
async def test_nothing_is_taken_of_a_share_whose_fetcher_is_not_linked() -> None:
    made = Scene(share=(0, 3), expected_peers=2)
    origin, peer = made.holder("origin", is_origin=True), made.holder("peer")
    holder = made.holder("one that has had a piece all the time")
    await holder.announce(7)
    await origin.announce(*range(COUNT))
    await peer.claim(1, 2)  # the other one it took over
    await peer.claim(4)
    await origin.gives([0, 3], [6])
    await holder.gives([7])
    await asyncio.sleep(0.9 * LEAST_LATE_SECONDS)
    await peer.announce(1)
    await origin.not_asked(0.9 * LEAST_LATE_SECONDS)


@played
async def test_of_two_fetchers_with_one_share_each_fetches_all_of_it() -> None:
    """As where several nodes of a trainer have more links than fetchers need."""
    made = Scene(share=(1, 2), expected_peers=1)
    origin, peer = made.holder("origin", is_origin=True), made.holder("peer")
    await peer.claim(1, 3, 5, 7)
    await asyncio.sleep(0.01)
    await origin.announce(*range(COUNT))
    await origin.gives([1, 3], [5], [7])
    await peer.announce(0)
    assert await peer.asked() == [0]
    await origin.not_asked(0.9 * LEAST_LATE_SECONDS)  # whoever has the other share is unknown


@played
async def test_a_fetcher_with_a_number_above_that_of_the_pieces_is_a_holder_too() -> None:
    made = Scene(share=(0, 2 * COUNT), expected_peers=1)
    origin, peer = made.holder("origin", is_origin=True), made.holder("peer")
    await origin.announce(*range(COUNT))
    await origin.gives([0])
    await peer.claim(1, share=COUNT + 1)
    await peer.announce(1)
    await peer.gives([1])
    await origin.not_asked(0.05)
    assert not made.tasks[1].done()


@played
async def test_a_claim_of_one_who_does_not_deliver_expires() -> None:
    clock = asyncio.get_running_loop().time
    made = Scene(share=(0, 2), expected_peers=1)
    origin, peer = made.holder("origin", is_origin=True), made.holder("peer")
    await peer.claim(*range(COUNT))
    await asyncio.sleep(0.01)
    await origin.announce(*range(COUNT))
    began = clock()
    while clock() < began + 0.8 * LEAST_LATE_SECONDS:
        await peer.announce(1)  # it is not silent
        await asyncio.sleep(0.02)
    assert await peer.asked() == [1]
    assert await origin.asked() == [0, 2]
    assert clock() - began < 1.3 * LEAST_LATE_SECONDS
    # Nor does a claim keep a damaged piece from being requested again.
    await peer.claim(0)
    await asyncio.sleep(0.01)
    await origin.piece(0, bytes(LEAF))
    for answered, next_one in ((2, 4), (4, 6), (6, 0)):
        assert await origin.asked() == [next_one]
        await origin.piece(answered)


@played
async def test_what_a_peer_has_claimed_of_ones_share_comes_from_it_unless_it_is_gone() -> None:
    made = Scene(share=(0, 2), expected_peers=1)
    peer, origin = made.holder("peer"), made.holder("origin", is_origin=True)
    await peer.claim(4, 6)
    await asyncio.sleep(0.01)
    await origin.announce(*range(COUNT))
    assert await origin.asked() == [0, 2]
    await origin.piece(0)
    await origin.not_asked(0.05)
    await peer.announce(6)
    async with asyncio.timeout(0.1):
        await peer.gives([6])
    peer.end.interrupt()
    assert await origin.asked() == [4]
    await made.ended(0, "has closed")


@played
async def test_a_damaged_piece_is_asked_for_again_and_damaged_twice_ends_the_link() -> None:
    made = Scene()
    a = made.holder("a")
    await a.announce(0)
    for _ in range(2):
        assert await a.asked() == [0]
        await a.piece(0, bytes(LEAF))
    await made.ended(0, "piece 0 arrived damaged twice")
    assert (made.store.commits, made.fetcher.missing) == ([], COUNT)


@played
async def test_pieces_of_a_holder_that_is_gone_are_asked_for_elsewhere_at_once() -> None:
    clock = asyncio.get_running_loop().time
    made = Scene()
    a, b = made.holder("a"), made.holder("b")
    await a.announce(0, 1)
    assert await a.asked() == [0, 1]
    await b.announce(0, 1, 2)
    assert await b.asked() == [2]
    began = clock()
    a.end.interrupt()
    assert await b.asked() == [0]
    assert clock() - began < LATE_LOOK_SECONDS
    await made.ended(0, "has closed")


@played
async def test_a_late_piece_is_asked_for_elsewhere_once_and_the_first_answer_counts() -> None:
    clock = asyncio.get_running_loop().time
    made = Scene()
    a, b, c = (made.holder(name) for name in "abc")
    await a.announce(*range(COUNT))
    assert await a.asked() == [0, 1]
    began = clock()
    await b.announce(0)
    assert await b.asked() == [0]
    assert LEAST_LATE_SECONDS <= clock() - began < LEAST_LATE_SECONDS + 0.1
    await c.announce(0)
    await c.not_asked(0.9 * LEAST_LATE_SECONDS)
    await b.piece(0)
    await a.piece(0, bytes(LEAF))  # damaged and late: nobody looks at it
    await a.piece(1)
    await a.finish()
    await a.serve()
    await made.whole()
    assert made.store.commits.count(0) == 1


@pytest.mark.parametrize("buffers", [False, True], ids=["place", "buffer"])
@played
async def test_an_answer_that_is_still_read_when_another_one_counts_is_written_no_further(
    *, buffers: bool
) -> None:
    made = Scene()
    made.store.buffers = buffers
    slow, fast = made.holder("slow", is_origin=True), made.holder("fast")
    slow.near.rate = 1000.0
    await slow.announce(0)
    assert await slow.asked() == [0]
    bad = bytearray(made.version.bytes_of(0))
    bad[LEAF // 2 :] = bytes(LEAF // 2)
    await slow.piece(0, bytes(bad))
    await fast.announce(*range(COUNT))
    await fast.finish()
    serving = asyncio.create_task(fast.serve())
    await made.tasks[1]
    assert made.store.memory == made.version.content
    await asyncio.sleep(5)
    assert made.store.memory == made.version.content, "the slow answer came later"
    assert made.fetcher.is_whole
    await serving
    slow.end.interrupt()
    await made.ended(0, "has closed")


@played
async def test_a_piece_that_two_send_at_once_comes_right_if_the_slow_one_breaks() -> None:
    made = Scene(there=range(1, COUNT))
    slow, other = made.holder("slow"), made.holder("other")
    slow.near.rate = other.near.rate = 1000.0
    for each in (slow, other):
        await each.announce(0)
    await slow.gives([0])
    await other.gives([0])
    slow.end.interrupt()
    await made.ended(0, "has closed")
    await other.finish()
    await made.tasks[1]
    assert made.fetcher.is_whole
    assert made.store.memory[:LEAF] == made.version.bytes_of(0)


@played
async def test_a_delta_makes_a_piece_and_a_damaged_one_is_asked_for_again() -> None:
    made = Scene()
    a = made.holder("a")
    await a.announce(*range(COUNT))
    assert await a.asked() == [0, 1]
    await a.delta(0)
    await asyncio.sleep(0.01)
    a.near.spoil = lambda frame, payload: bytes(len(payload))
    await a.delta(1)
    await asyncio.sleep(0.01)
    a.near.spoil = lambda frame, payload: payload
    assert made.store.commits == [0]
    await a.finish()
    with contextlib.suppress(Ended):
        while True:
            for piece in await a.asked():
                await a.delta(piece)
    await made.whole()
    assert made.store.commits == [piece * LEAF for piece in (0, 2, 3, 4, 5, 6, 7, 1)]


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"1234", "the delta of piece 0: it is none"), (bytes(LEAF), "does not make what it should")],
)
@played
async def test_a_delta_that_was_none_leaves_the_piece_to_the_holder_that_was_sending_it(
    content: bytes, says: str
) -> None:
    made = Scene(there=range(1, COUNT))
    slow, liar = made.holder("slow"), made.holder("liar")
    await slow.announce(0)
    assert await slow.asked() == [0]
    await slow.piece(0, bytes(LEAF))  # damaged, once
    assert await slow.asked() == [0]
    slow.near.rate = 2000.0
    await slow.piece(0)
    await liar.announce(0)
    assert await liar.asked() == [0]
    await liar.delta(0, content)
    await made.ended(1, says)
    await slow.gives([0])
    await slow.finish()
    await made.tasks[0]
    assert made.store.memory[:LEAF] == made.version.bytes_of(0)


@played
async def test_a_holder_that_takes_no_requests_is_dropped() -> None:
    made = Scene()
    deaf, other = made.holder("deaf"), made.holder("other")
    deaf.near.refusal = Silent("nobody took GET for 30 s")
    await deaf.announce(*range(COUNT))
    await made.ended(0, "has closed")
    await other.announce(*range(COUNT))
    await other.finish()
    serving = asyncio.create_task(other.serve())
    await made.tasks[1]
    await serving
    assert made.store.memory == made.version.content


@pytest.mark.parametrize("first", [True, False], ids=["said", "wanted"])
@played
async def test_a_holder_of_another_version_is_dropped(first: bool) -> None:
    """Than the one that is wanted, or that the first holder to know has."""
    wanted = None if first else MemoryVersion([COUNT * LEAF]).end.root_hash
    made = Scene(root_hash=wanted)
    if first:
        await made.holder("right").finish()
        await asyncio.sleep(0)
    wrong = made.holder("wrong")
    await wrong.finish(VersionEnd("another", made.version.end.digests))
    await made.ended(-1, "its content differs")


@pytest.mark.parametrize("digests", [{}, {"t0": 7}, {"t0": "0", "t1": "0"}, ["t0"], None], ids=repr)
@played
async def test_an_end_without_a_hash_for_each_tensor_is_refused(digests: object) -> None:
    made = Scene()
    await made.holder("a").end.send(Kind.END, {"root_hash": "x", "digests": digests})
    await made.ended(0, "a hash for each tensor and for nothing else")


@pytest.mark.parametrize(
    ("kind", "head", "size", "says"),
    [
        (Kind.PIECE, {"piece": 2}, LEAF, "piece 2 came, which was not asked for"),
        (Kind.DELTA, {"piece": 2}, 4, "piece 2 came, which was not asked for"),
        (Kind.PIECE, {"piece": COUNT}, LEAF, "PIECE.piece must be a number from 0 to 7"),
        (Kind.PIECE, {"piece": 0}, LEAF - 1, "came with 1023 bytes, not 1024"),
        (Kind.PIECE, {"piece": 0}, 0, "came with 0 bytes, not 1024"),
        (Kind.PIECE, {"piece": 0, "digests": ""}, LEAF, "PIECE.digests"),
        (Kind.DELTA, {"piece": 0, "digests": "0" * 32}, 4, "DELTA.hash must be a text"),
        (Kind.HAVE, {"ranges": [[0, 1], [0, 1]]}, 0, "HAVE.begin must be a number from 1"),
        (Kind.HAVE, {"ranges": [], "claimed": [[0, 9]]}, 0, "HAVE.end must be a number from 0"),
        (Kind.HAVE, {"ranges": [], "claimed": 1}, 0, "HAVE.claimed must be a list of runs"),
        (Kind.HAVE, {"ranges": [], "claimed": []}, 0, "HAVE.share must be a number from 0"),
        (Kind.MEMORY, {"address": 1, "size": 1}, 0, "MEMORY.agent must be a text"),
        (Kind.MEMORY, {"agent": "xy", "address": 1, "size": 1}, 0, "must be hexadecimal digits"),
        (Kind.MEMORY, {"agent": "00", "address": 0, "size": 1}, 0, "MEMORY.address must be"),
        (Kind.READY, {}, 0, "READY came from a holder"),
        (Kind.ERROR, {"detail": "the bytes are gone"}, 0, "the bytes are gone"),
    ],
)
@played
async def test_what_a_holder_should_not_send_ends_the_link(
    kind: Kind, head: dict[str, Any], size: int, says: str
) -> None:
    made = Scene()
    a = made.holder("a")
    await a.announce(0)
    assert await a.asked() == [0]
    await a.end.send(kind, head, bytes(size))
    await made.ended(0, says)


@pytest.mark.parametrize("installed", [True, False])
@played
async def test_pieces_in_registered_memory_are_asked_for_without_bytes_where_nixl_is_installed(
    monkeypatch: pytest.MonkeyPatch, *, installed: bool
) -> None:
    """A holder may send the bytes all the same; what was asked for with bytes must have them."""
    monkeypatch.setattr(holder_reading, "find_nixl", lambda: "nixl" if installed else None)
    made = Scene()
    a = made.holder("a")
    await a.announce(0)
    assert await a.asked() == [0]
    memory = {"agent": "00", "address": 1, "size": COUNT * LEAF}
    await a.end.send(Kind.MEMORY, memory)
    await a.announce(1, 2)
    request = await a.end.expect(Kind.GET)
    assert request.head.get("by") == ("nixl" if installed else None)
    first, _ = request.head["ranges"][0]
    await a.piece(first)
    await a.end.send(Kind.PIECE, {"piece": 0, "digests": made.version.digests_of(0).hex()})
    await made.ended(0, "came with 0 bytes, not 1024")


@played
async def test_a_holder_registers_its_memory_once() -> None:
    made = Scene()
    a = made.holder("a")
    for _ in range(2):
        await a.end.send(Kind.MEMORY, {"agent": "00", "address": 1, "size": 1})
    await made.ended(0, "MEMORY came from a holder")


@played
async def test_words_that_are_not_a_holders_go_to_their_listener() -> None:
    made, heard = Scene(), list[Kind]()
    far = Far(made.version, "a")
    task = asyncio.create_task(
        made.fetcher.fetch_from(far.link, lambda frame: heard.append(frame.kind))
    )
    await far.end.send(Kind.PROGRESS)
    await far.end.send(Kind.ERROR, {"detail": "x"})
    await asyncio.sleep(0.1)
    assert heard == [Kind.PROGRESS, Kind.ERROR]
    far.end.interrupt()
    with pytest.raises(Ended):
        await task
