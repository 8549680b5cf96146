"""A part of a version, fetched over a real port: the pieces that hold it, no others, and the hash of the whole."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rollout_common.transfer.connections.transfer_loop import run_on_loop
from rollout_common.transfer.held_version import VersionEnd
from rollout_common.transfer.memory.slot import Slot
from rollout_common.transfer.piece_server import PieceServer
from rollout_common.wire.root_hash import LEAF_BYTES
from rollout_worker.engine import (
    EngineError,
    MappedWeights,
    TensorEntry,
    TensorSpec,
    WeightsLayout,
    WeightsRejected,
)
from rollout_worker.engines.shared_memory.sinks import MappedSink, read_index
from rollout_worker.ports.weights_port import WeightsPort
from rollout_worker.schemas import CHECKPOINT
from rollout_worker.sources.pushed.incoming_version import IncomingVersion
from rollout_worker.sources.pushed.kept_version import KeptVersion
from rollout_worker.sources.pushed.peer_route import PeerRoute
from rollout_worker.sources.pushed.pushed_memory import Memory, OwnMemory
from rollout_worker.sources.pushed.pushed_source import PushedSource, receive
from rollout_worker.sources.pushed.version_fetching import VersionFetching
from rollout_worker.sources.source_reading import read_source
from rollout_worker.sources.tensor_bytes import TensorSource
from rollout_worker.sources.tensor_filling import SinkFilling
from tests.support.unit.digests import whole_digests, whole_root_hash
from tests.support.unit.pushing import Version, kept_of
from tests.support.unit.tiny_worker import settings as worker_settings

SIZES = (0, 1, 256, LEAF_BYTES - 256, LEAF_BYTES, LEAF_BYTES + 1, 2 * LEAF_BYTES + 77)
SECONDS = 30
ANY = WeightsLayout({}, {}, {})


class Giver:
    """A head's port, and which pieces went out of it."""

    def __init__(self, pushed_source: PushedSource) -> None:
        self.pushed_source = pushed_source
        self.sent: list[int] = []


@pytest.fixture(scope="module")
def giver() -> Iterator[Giver]:
    giver = Giver(PushedSource())
    port = WeightsPort(
        worker_settings("--weights-port", "0", "--data-host", "127.0.0.1"), giver.pushed_source
    )
    port.start()
    send = PieceServer._send_piece

    async def noted(self: PieceServer, piece: int) -> None:
        giver.sent.append(piece)
        await send(self, piece)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(PieceServer, "_send_piece", noted)
        yield giver
    port.stop()


def version_of(sizes: Sequence[int]) -> Version:
    """A version whose tensors all differ, in the order of their names."""
    contents = (os.urandom(1) * size for size in sizes)
    return Version.of({f"t{i:02}": ("U8", (len(c),), c) for i, c in enumerate(contents)})


async def fetch(
    giver: Giver, kept: KeptVersion, unread: Collection[str], expected: str | None = None
) -> tuple[dict[str, bytes], str]:
    """Fetch all other tensors; returns what a slot then has, and the root hash that was found."""
    source = giver.pushed_source.for_member(kept, "127.0.0.1").pushed
    assert source is not None
    left = frozenset(unread)

    def room(nbytes: int) -> tuple[Memory, Callable[[], None]]:
        return OwnMemory(Slot(nbytes, private=True, expected=nbytes)), lambda: None

    with tempfile.TemporaryDirectory() as folder:

        async def open_slot(
            entries: Sequence[TensorEntry], given: MappedWeights | None = None
        ) -> MappedSink:
            return MappedSink(entries, skip=left, slots=Path(folder))

        filling = SinkFilling(open_slot, ANY, lambda _: None, expected=expected)
        incoming = IncomingVersion(CHECKPOINT, source, lambda _: None, room, unread=lambda _: left)
        run_on_loop(VersionFetching(incoming, PeerRoute()).fetch_from_peers(source.peers))
        try:
            async with asyncio.timeout(SECONDS):
                sink = await receive(filling, incoming)
        finally:
            incoming.close("the test is over")
        assert isinstance(sink, MappedSink)
        handle = os.open(sink.path, os.O_RDONLY)
        starts = read_index(handle)
        sizes = {placed.name: placed.nbytes for placed in kept.layout.tensors}
        content = {name: os.pread(handle, sizes[name], at) for name, at in starts.items()}
        os.close(handle)
        sink.close()
    return content, filling.root_hash


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(SIZES), st.booleans()), min_size=1, max_size=7))
@example([(LEAF_BYTES, False), (0, True), (1, False)])
@example([(1, False), (1, True), (1, False)])
@example([(20 * LEAF_BYTES, False), (1, True)])
@example([(17 * LEAF_BYTES + 5, True), (17 * LEAF_BYTES, False), (3, True)])
@example([(LEAF_BYTES + 1, True), (LEAF_BYTES + 1, True), (LEAF_BYTES + 1, False)])
@example([(0, True)])
@example([(0, False)])
def test_just_the_pieces_of_what_is_read_are_fetched(
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
        name: bytes(version.slot.view_bytes(places[name].start, places[name].end)) for name in read
    }
    assert root_hash == version.root_hash, "of all tensors, as of one that was fetched whole"
    needed = [each for each in version.layout.tensors if each.name in read]
    assert sorted(giver.sent) == sorted(set(version.pieces.pieces_of(needed)))
    version.slot.close()


@pytest.mark.parametrize("unread", [set(), {"t00"}], ids=["all", "a part"])
async def test_a_version_that_an_earlier_release_kept_is_fetched_in_its_scheme(
    giver: Giver, unread: set[str]
) -> None:
    version = version_of([LEAF_BYTES, 2 * LEAF_BYTES + 77])
    plain = {
        each.name: (each.dtype, each.shape, bytes(version.slot.view_tensor(each)))
        for each in version.layout.tensors
    }
    old = whole_root_hash(plain)
    earlier = kept_of(version, VersionEnd(old, whole_digests(plain)))
    assert (await fetch(giver, earlier, unread, old))[1] == old
    mixed = kept_of(version, VersionEnd(old, version.digests))
    with pytest.raises(EngineError, match="arrived with xxh3_128 "):
        await fetch(giver, mixed, unread, old)
    for each in (earlier, mixed):
        each.release()


Lie = Callable[[Mapping[str, str]], Mapping[str, str]]
LIES: dict[str, tuple[Lie, str]] = {
    "the hash of one that stays": (
        lambda digests: {**digests, "t00": "0" * 32},
        "what arrived has root_hash",
    ),
    "the hash of one that comes": (
        lambda digests: {**digests, "t01": "0" * 32},
        "tensor 't01' arrived with",
    ),
    "the hashes of two exchanged": (
        lambda digests: {**digests, "t00": digests["t02"], "t02": digests["t00"]},
        "what arrived has root_hash",
    ),
    "no hash of one that stays": (
        lambda digests: {name: digests[name] for name in ("t01", "t02")},
        "a hash for each tensor",
    ),
    "the root hash": (lambda digests: digests, "its sender says xxh3_128_tree:000"),
}


@pytest.mark.parametrize("what", LIES)
async def test_a_sender_that_lies_of_what_stays_with_it_is_not_believed(
    giver: Giver, what: str
) -> None:
    version, (lie, why) = version_of([LEAF_BYTES, 300, LEAF_BYTES]), LIES[what]
    root = "xxh3_128_tree:" + "0" * 32 if what == "the root hash" else version.root_hash
    kept = kept_of(version, VersionEnd(root, lie(version.digests)))
    with pytest.raises(EngineError, match=why):
        await fetch(giver, kept, {"t00", "t02"})
    kept.release()


def test_an_engine_with_room_for_what_is_left_out_is_refused() -> None:
    """Else it would serve what nobody has written."""

    class Lacking(TensorSource):
        skipped_names = frozenset({"a"})

        def promised_hashes(self) -> dict[str, str]:
            return {"a": "0" * 32}

    sink = MappedSink([TensorEntry("a", TensorSpec("F32", (1,)))])
    with pytest.raises(WeightsRejected, match="'a' are left out, but the engine needs them"):
        read_source(Lacking({"a": torch.ones(1)}), {}, sink.allocate)
    sink.close()
