"""Many fetchers of any layout, and holders with any faults, in virtual time: all end with the same bytes."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_common.transfer.connections.frames import Ended, Frame, Kind, Malformed
from rollout_common.transfer.held_version import HeldVersion
from rollout_common.transfer.piece_choice import HolderLink
from rollout_common.transfer.piece_fetcher import PieceFetcher
from rollout_common.transfer.piece_server import PieceServer
from tests.support.unit.memory_streams import MemoryStream, as_stream, heads_of, memory_pair, play
from tests.support.unit.memory_versions import LEAF, MemoryVersion, PieceMemory, small_leaves
from tests.support.waiting import until


@pytest.fixture(autouse=True, scope="module")
def leaves_of_a_kibibyte() -> Iterator[None]:
    with small_leaves():
        yield


SIZES = st.sampled_from((0, 1, 255, 256, 257, LEAF - 1, LEAF, LEAF + 1, 3 * LEAF + 77, 9 * LEAF))


class Pool:
    """Fetchers of a version that get it from its origin, from each other and from holders of a part of it."""

    def __init__(
        self, version: MemoryVersion, count: int, chance: random.Random, shares: int
    ) -> None:
        self.version, self.chance = version, chance
        self.origin = version.held()
        self.origin_sent = 0
        self.stores = [PieceMemory(version, buffers=chance.random() < 0.5) for _ in range(count)]
        self.held = [HeldVersion(version.layout, store.read_bytes) for store in self.stores]
        self.fetchers = [
            PieceFetcher(held, store, (index % shares, shares), expected_peers=count - 1)
            for index, (held, store) in enumerate(zip(self.held, self.stores, strict=True))
        ]
        self.tasks: list[asyncio.Task[None]] = []
        self.ends: list[MemoryStream] = []

    def start(self, work: Any) -> None:
        self.tasks.append(asyncio.create_task(work))

    async def fill_origin(self) -> None:
        """Have the pieces come to the origin in any order, now and then after longer than makes a fetcher late."""
        numbers = list(range(len(self.version.layout.pieces)))
        self.chance.shuffle(numbers)
        for piece in numbers:
            self.origin.mark_piece(piece, self.version.digests_of(piece))
            await asyncio.sleep(self.chance.choice((0, 0, 0.001, 0.05, 1.2)))
        self.origin.finish(self.version.end)

    async def connect(self, index: int, held: HeldVersion, *, faults: bool) -> None:
        """Let a fetcher fetch from a holder, again if the connection breaks; one to the origin does not break at last."""
        origin = held is self.origin
        try:
            for left in range(2, -1, -1):
                near, far = memory_pair()
                self.ends.append(near)
                if faults and not origin:
                    self.add_faults(near)
                elif faults and left:
                    near.frames_left = self.chance.randrange(30)
                serving = asyncio.create_task(PieceServer(as_stream(far), held).run())
                link = HolderLink("a holder", as_stream(near), is_origin=origin)
                try:
                    with contextlib.suppress(Ended):
                        return await self.fetchers[index].fetch_from(link)
                    if self.fetchers[index].is_whole:
                        return None
                except Malformed as error:
                    if not faults or "arrived damaged twice" not in str(error):
                        raise
                    return None
                finally:
                    near.interrupt()
                    await asyncio.gather(serving, return_exceptions=True)
                    self.origin_sent += origin * len(list(heads_of(far, Kind.PIECE)))
        finally:
            if not origin:
                self.fetchers[index].drop_peer()

    def add_faults(self, near: MemoryStream) -> None:
        chance = self.chance
        near.rate = chance.choice((1e3, 1e5, 1e7))
        match chance.randrange(4):
            case 0:
                near.frames_left = chance.randrange(30)
            case 1:
                near.spoil = self.flip
            case 2:
                asyncio.get_running_loop().call_later(chance.random(), self.freeze, near)

    def freeze(self, near: MemoryStream) -> None:
        """Now and then for ever."""
        near.frozen = True
        if self.chance.random() < 0.5:
            asyncio.get_running_loop().call_later(5 * self.chance.random(), near.thaw)

    def flip(self, frame: Frame, payload: bytes) -> bytes:
        """Damage some pieces."""
        if not payload or self.chance.random() < 0.5:
            return payload
        changed = bytearray(payload)
        changed[self.chance.randrange(len(payload))] ^= 1 << self.chance.randrange(8)
        return bytes(changed)

    async def run(self, *, faults: bool) -> None:
        """Start everything, and return once all fetchers have all, or their links to the origin have ended."""
        self.start(self.fill_origin())
        origins = []
        for index in range(len(self.fetchers)):
            origins.append(asyncio.create_task(self.connect(index, self.origin, faults=faults)))
            for held in self.held:
                if held is not self.held[index]:
                    self.start(self.connect(index, held, faults=faults))
            if faults:
                known = [
                    each
                    for each in range(len(self.version.layout.pieces))
                    if self.chance.random() < 0.5
                ]
                self.start(self.connect(index, self.version.held(*known), faults=True))
        await until(lambda: all(each.is_whole for each in self.fetchers), what="all of it")
        await asyncio.sleep(20)  # for answers that come late
        for end in self.ends:
            end.interrupt()
        await asyncio.gather(*self.tasks, *origins)

    def check(self) -> None:
        """See that everybody has the same bytes, each piece written once."""
        for store, held in zip(self.stores, self.held, strict=True):
            for placed in self.version.layout.tensors:
                expected = self.version.content[placed.start : placed.end]
                assert store.memory[placed.start : placed.end] == expected
            assert held.end == self.version.end
            assert held.tensor_digests() == self.version.end.digests
            assert len(store.commits) == len(set(store.commits)) == len(self.version.layout.pieces)


@settings(max_examples=settings().max_examples // 2)
@given(st.lists(SIZES, min_size=1, max_size=6), st.integers(1, 4), st.integers(0, 1 << 32))
def test_all_fetchers_end_with_the_same_bytes_whatever_holders_do(
    sizes: list[int], count: int, seed: int
) -> None:
    async def scene() -> None:
        chance = random.Random(seed)
        pool = Pool(MemoryVersion(sizes), count, chance, chance.randint(1, count))
        await pool.run(faults=True)
        pool.check()

    play(scene)


@settings(max_examples=settings().max_examples // 2)
@given(st.lists(SIZES, min_size=1, max_size=6), st.integers(1, 6), st.integers(0, 1 << 32))
def test_each_piece_leaves_the_origin_once_however_many_fetch(
    sizes: list[int], count: int, seed: int
) -> None:
    async def scene() -> None:
        pool = Pool(MemoryVersion(sizes), count, random.Random(seed), count)
        await pool.run(faults=False)
        pool.check()
        assert pool.origin_sent == len(pool.version.layout.pieces)

    play(scene)
