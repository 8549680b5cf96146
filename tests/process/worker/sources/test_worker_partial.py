"""A part of a version, fetched over a real port: the chunks that hold it, no others, and the hash of the whole."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rollout_common.transfer.connection import Connection
from rollout_common.transfer.frames import CHUNK_BYTES, Kind
from rollout_worker.engine import (
    EngineError,
    MappedWeights,
    TensorEntry,
    TensorSpec,
    WeightsLayout,
    WeightsRejected,
)
from rollout_worker.engines.shared_memory.sinks import MappedSink, open_mapped_sink, read_index
from rollout_worker.ports.weights_port import WeightsPort
from rollout_worker.schemas import CHECKPOINT
from rollout_worker.sources import giving
from rollout_worker.sources.fetching import Fetching
from rollout_worker.sources.giving import Kept
from rollout_worker.sources.incoming import End, Incoming
from rollout_worker.sources.outward import Outward
from rollout_worker.sources.pushed import Desk, receive
from rollout_worker.sources.pushed_memory import Memory
from rollout_worker.sources.source_reading import read_source
from rollout_worker.sources.tensor_bytes import HandedOver
from tests.support.unit.digests import whole_digests, whole_root_hash
from tests.support.unit.pushing import Version
from tests.support.unit.tiny_worker import settings as worker_settings

SIZES = (0, 1, 256, CHUNK_BYTES - 256, CHUNK_BYTES, CHUNK_BYTES + 1, 2 * CHUNK_BYTES + 77)
SECONDS = 30
ANY = WeightsLayout({}, {}, {})


class Giver:
    """A head's port, and which chunks went out of it."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.sent: list[int] = []


@pytest.fixture(scope="module")
def giver() -> Iterator[Giver]:
    giver = Giver(Desk())
    port = WeightsPort(
        worker_settings("--weights-port", "0", "--data-host", "127.0.0.1"), giver.desk
    )
    port.start()
    send = giving._send

    def noted(connection: Connection, source: Any, memory: Memory, begin: int, end: int) -> None:
        giver.sent.append(begin)
        send(connection, source, memory, begin, end)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(giving, "_send", noted)
        yield giver
    port.stop()


def version_of(sizes: Sequence[int]) -> Version:
    """A version whose tensors all differ, in the order of their names."""
    contents = (os.urandom(1) * size for size in sizes)
    return Version.of({f"t{i:02}": ("U8", (len(c),), c) for i, c in enumerate(contents)})


def kept_of(version: Version) -> Kept:
    """What a head has of it."""
    size = version.layout.nbytes
    memory = Memory(max(size, 1), private=True)
    with memory.bytes(0, size) as place:
        place[:] = version.slot.bytes(0, size)
    end = End(version.root_hash, version.digests)
    return Kept(CHECKPOINT, version.layout, memory, end, memory.hold())


async def fetch(
    giver: Giver, kept: Kept, unread: Collection[str], expected: str | None = None
) -> tuple[dict[str, bytes], str]:
    """Fetch all other tensors; returns what a slot then has, and the root hash that was found."""
    source = giver.desk.for_member(kept, "127.0.0.1").pushed
    assert source is not None
    left, found = frozenset(unread), list[str]()

    def room(nbytes: int) -> tuple[Memory, Callable[[], None]]:
        return Memory(max(nbytes, 1), hollow=True, private=True), lambda: None

    with tempfile.TemporaryDirectory() as folder:

        async def open_slot(
            entries: Sequence[TensorEntry], given: MappedWeights | None = None
        ) -> MappedSink:
            return await open_mapped_sink(entries, skip=left, slots=Path(folder))

        incoming = Incoming(CHECKPOINT, source, lambda _: None, room, unread=lambda _: left)
        Fetching(incoming, source.peers, Outward()).start()
        try:
            async with asyncio.timeout(SECONDS):
                sink = await receive(
                    open_slot,
                    ANY,
                    incoming,
                    found.append,
                    lambda done, total: None,
                    expected=expected,
                )
        finally:
            incoming.close("the test is over")
        assert isinstance(sink, MappedSink)
        handle = os.open(sink.path, os.O_RDONLY)
        starts = read_index(handle)
        sizes = {placed.name: placed.nbytes for placed in kept.layout.tensors}
        content = {name: os.pread(handle, sizes[name], at) for name, at in starts.items()}
        os.close(handle)
        sink.close()
    return content, found[0]


def chunks_of(version: Version, names: Collection[str]) -> list[int]:
    """The offsets of the chunks that hold something of these tensors."""
    held: set[int] = set()
    for placed in version.layout.tensors:
        if placed.name in names and placed.nbytes:
            first = placed.start // CHUNK_BYTES * CHUNK_BYTES
            held.update(range(first, placed.end, CHUNK_BYTES))
    return sorted(held)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(SIZES), st.booleans()), min_size=1, max_size=7))
@example([(CHUNK_BYTES, False), (0, True), (1, False)])
@example([(1, False), (1, True), (1, False)])
@example([(20 * CHUNK_BYTES, False), (1, True)])
@example([(17 * CHUNK_BYTES + 5, True), (17 * CHUNK_BYTES, False), (3, True)])
@example([(CHUNK_BYTES + 1, True), (CHUNK_BYTES + 1, True), (CHUNK_BYTES + 1, False)])
@example([(0, True)])
@example([(0, False)])
def test_just_the_chunks_of_what_is_read_are_fetched(
    giver: Giver, tensors: list[tuple[int, bool]]
) -> None:
    version = version_of([size for size, _ in tensors])
    names = [placed.name for placed in version.layout.tensors]
    read = {name for name, (_, needed) in zip(names, tensors, strict=True) if needed}
    kept = kept_of(version)
    giver.sent.clear()
    try:
        content, root_hash = asyncio.run(fetch(giver, kept, set(names) - read))
    finally:
        kept.release()
    places = {placed.name: placed for placed in version.layout.tensors}
    assert content == {
        name: bytes(version.slot.bytes(places[name].start, places[name].end)) for name in read
    }
    assert root_hash == version.root_hash, "of all tensors, as of one that was fetched whole"
    assert giver.sent == chunks_of(version, read)
    version.slot.close()


@pytest.mark.parametrize("unread", [set(), {"t00"}], ids=["all", "a part"])
async def test_a_version_that_an_earlier_release_kept_is_fetched_in_its_scheme(
    giver: Giver, unread: set[str]
) -> None:
    version = version_of([CHUNK_BYTES, 2 * CHUNK_BYTES + 77])
    plain = {
        each.name: (each.dtype, each.shape, bytes(version.slot.view(each)))
        for each in version.layout.tensors
    }
    old, kept = whole_root_hash(plain), kept_of(version)
    earlier = replace(kept, end=End(old, whole_digests(plain)))
    assert (await fetch(giver, earlier, unread, old))[1] == old
    with pytest.raises(EngineError, match="arrived with xxh3_128 "):
        await fetch(giver, replace(kept, end=End(old, version.digests)), unread, old)
    kept.release()


Lie = Callable[[Version, End], dict[str, object]]


def told(end: End, **fields: object) -> dict[str, object]:
    return {"root_hash": end.root_hash, "digests": dict(end.digests), **fields}


LIES: dict[str, tuple[Lie, str]] = {
    "the hash of one that stays": (
        lambda _, end: told(end, digests={**end.digests, "t00": "0" * 32}),
        "what arrived has root_hash",
    ),
    "the hash of one that comes": (
        lambda _, end: told(end, digests={**end.digests, "t01": "0" * 32}),
        "tensor 't01' arrived with",
    ),
    "the hashes of two exchanged": (
        lambda _, end: told(
            end, digests={**end.digests, "t00": end.digests["t02"], "t02": end.digests["t00"]}
        ),
        "what arrived has root_hash",
    ),
    "the root hash": (
        lambda _, end: told(end, root_hash="xxh3_128_tree:" + "0" * 32),
        "its sender says xxh3_128_tree:000",
    ),
    "no hash of one that stays": (
        lambda _, end: told(end, digests={"t01": end.digests["t01"], "t02": end.digests["t02"]}),
        "a hash for each tensor",
    ),
}


@pytest.mark.parametrize(("lie", "why"), LIES.values(), ids=LIES)
async def test_a_sender_that_lies_of_what_stays_with_it_is_not_believed(
    giver: Giver, monkeypatch: pytest.MonkeyPatch, lie: Lie, why: str
) -> None:
    version = version_of([CHUNK_BYTES, 300, CHUNK_BYTES])
    monkeypatch.setattr(giving, "_hashes", lambda end: lie(version, end))
    kept = kept_of(version)
    with pytest.raises(EngineError, match=why):
        await fetch(giver, kept, {"t00", "t02"})
    kept.release()


async def test_a_part_that_arrives_damaged_is_refused(
    giver: Giver, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = version_of([CHUNK_BYTES, CHUNK_BYTES, CHUNK_BYTES])
    kept = kept_of(version)

    def damaged(connection: Connection, _: Any, memory: Memory, begin: int, end: int) -> None:
        whole = bytearray(memory.bytes(begin, end))
        digest = xxhash.xxh3_128_hexdigest(whole)
        whole[-1] ^= 1
        connection.send(Kind.DATA, {"offset": begin, "hash": digest}, bytes(whole))

    monkeypatch.setattr(giving, "_send", damaged)
    with pytest.raises(EngineError, match=f"the chunk at {CHUNK_BYTES} arrived damaged"):
        await fetch(giver, kept, {"t00", "t02"})
    kept.release()


async def test_a_sender_that_is_gone_midway_fails_the_part(
    giver: Giver, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = version_of([CHUNK_BYTES, 3 * CHUNK_BYTES])
    kept, send = kept_of(version), giving._send

    def cut(connection: Connection, source: Any, memory: Memory, begin: int, end: int) -> None:
        if begin == 2 * CHUNK_BYTES:
            connection.close()
        send(connection, source, memory, begin, end)

    monkeypatch.setattr(giving, "_send", cut)
    with pytest.raises(EngineError, match="no peer could give the weights"):
        await fetch(giver, kept, {"t00"})
    kept.release()


def test_an_engine_with_room_for_what_is_left_out_is_refused() -> None:
    """Else it would serve what nobody has written."""

    class Lacking(HandedOver):
        skipped_names = frozenset({"a"})

        def promised_hashes(self) -> dict[str, str]:
            return {"a": "0" * 32}

    sink = MappedSink([TensorEntry("a", TensorSpec("F32", (1,)))])
    with pytest.raises(WeightsRejected, match="'a' are left out, but the engine needs them"):
        read_source(
            Lacking({"a": torch.ones(1)}), {}, sink.allocate, lambda *_: None, lambda: False
        )
    sink.close()
