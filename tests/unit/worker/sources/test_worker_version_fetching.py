"""What a trainer's LAYOUT may name, and which deltas and seconds a version on its way takes."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from rollout_common.transfer.connections.frames import Frame, Kind, Malformed
from rollout_common.transfer.delta import DeltaError, encode_delta
from rollout_common.transfer.held_version import VersionEnd
from rollout_common.transfer.memory.slot import Slot
from rollout_common.transfer.settings import LEASE_SECONDS
from rollout_common.wire import CHECKPOINT, Base, Peer, PushedBytes
from rollout_worker.sources.pushed.arrived_deltas import DeltaBase
from rollout_worker.sources.pushed.incoming_version import IncomingVersion
from rollout_worker.sources.pushed.pushed_memory import Memory, OwnMemory
from rollout_worker.sources.pushed.trainer_connection import _share_of
from rollout_worker.sources.pushed.version_fetching import MAX_HOLDERS, HolderAddress, read_holders
from tests.support.unit.pushing import Version

HOLDER = {"host": "a", "port": 8002, "ticket": "0" * 32, "name": "b"}


def test_holders_are_read() -> None:
    [found] = read_holders([HOLDER])
    assert found == HolderAddress("a", 8002, "0" * 32, "b")
    assert read_holders([{**HOLDER, "name": ""}])[0].name == ""


@pytest.mark.parametrize(
    "given",
    [
        "a",
        {"a": HOLDER},
        [HOLDER] * (MAX_HOLDERS + 1),
        ["a"],
        [{**HOLDER, "port": 0}],
        [{**HOLDER, "port": 65536}],
        [{**HOLDER, "host": 7}],
        [{**HOLDER, "host": "a" * 254}],
        [{**HOLDER, "ticket": "0" * 65}],
        [{"host": "a", "port": 1}],
    ],
    ids=lambda given: repr(given)[:40],
)
def test_holders_that_are_none_are_refused(given: object) -> None:
    with pytest.raises(Malformed):
        read_holders(given)


def test_a_share_is_one_of_so_many() -> None:
    assert _share_of(Frame(Kind.LAYOUT, {})) == (0, 1)
    assert _share_of(Frame(Kind.LAYOUT, {"share": [2, 3]})) == (2, 3)
    for bad in ([3, 3], [-1, 3], [0, 0], [0], 7, [0, "1"]):
        with pytest.raises(Malformed):
            _share_of(Frame(Kind.LAYOUT, {"share": bad}))


def room(nbytes: int) -> tuple[Memory, Callable[[], None]]:
    return OwnMemory(Slot(nbytes, private=True)), lambda: None


def arriving(version: Version, base: DeltaBase | None = None, *peers: Peer) -> IncomingVersion:
    """A version that has memory, and no bytes yet."""
    made = IncomingVersion(CHECKPOINT, PushedBytes(peers=peers), lambda _: None, room, base)
    made.begin(version.layout)
    made.take_room()
    return made


def base_of(version: Version, layout_id: str | None = None) -> DeltaBase:
    """A version that serves."""
    memory = OwnMemory(Slot(version.layout.nbytes, private=True))
    with memory.view_bytes(0, memory.size) as place:
        place[:] = version.slot.view_bytes(0, memory.size)
    base = Base(epoch=1, version=1, root_hash=version.root_hash)
    return DeltaBase(base, layout_id or version.layout.layout_id, memory, memory.add_hold(), None)


async def test_a_delta_makes_the_new_bytes_and_goes_to_others_with_the_base() -> None:
    old, new = Version(1), Version(2)
    made = arriving(new, base_of(old))
    delta = encode_delta(old.piece(0), new.piece(0))
    assert delta is not None
    assert made.apply_delta(0, *new.pieces.span(0), delta) == new.piece(0)
    find = made.deltas.find_deltas(old.root_hash, new.layout)
    assert find is not None
    assert find(0) == delta
    assert made.deltas.find_deltas("another", new.layout) is None


async def test_a_delta_that_was_wrong_goes_to_nobody() -> None:
    """Once its piece has come as a whole."""
    old, new = Version(1), Version(2)
    made = arriving(new, base_of(old))
    wrong = encode_delta(old.piece(0), Version(9).piece(0))
    assert wrong is not None
    made.apply_delta(0, *new.pieces.span(0), wrong).release()
    begin, end = new.pieces.span(0)
    with made.writable(begin, end) as place:
        place[:] = new.piece(0)
        made.commit_run(begin, place, in_place=True)
    find = made.deltas.find_deltas(old.root_hash, new.layout)
    assert find is not None
    assert find(0) is None
    patch = made.deltas.make_patch(new.layout.nbytes)
    assert patch is not None
    assert not patch.deltas


async def test_a_delta_without_its_base_or_of_another_layout_is_refused() -> None:
    old, new = Version(1), Version(2)
    span = new.pieces.span(0)
    with pytest.raises(DeltaError, match="has no base"):
        arriving(new).apply_delta(0, *span, b"")
    with pytest.raises(DeltaError, match="the base has the layout another"):
        arriving(new, base_of(old, "another")).apply_delta(0, *span, b"")


async def test_a_version_without_a_sender_waits_for_the_others_as_long_as_pieces_come() -> None:
    version = Version(7, {"number": ("U8", (3 << 20,))})
    made = arriving(version)
    assert made.held is not None
    made._lost = time.monotonic() - LEASE_SECONDS
    assert made._seconds_left() <= 0
    made.peer_count = 2
    made.held.mark_piece(0, bytes(16))
    assert made._seconds_left() <= 0, "nobody knows what it should hash to"
    made.held.said = VersionEnd(version.root_hash, version.digests)
    assert made._seconds_left() > 1
    made.peer_count = 0
    assert made._seconds_left() <= 0
    made.peer_count = 2
    made.held.marked_at -= LEASE_SECONDS
    assert made._seconds_left() <= 0, "nothing came for too long"


async def test_a_version_that_comes_from_peers_alone_needs_no_sender() -> None:
    made = arriving(Version(7), None, Peer(host="a", port=1, ticket="0" * 32))
    made._lost = time.monotonic() - 2 * LEASE_SECONDS
    assert made._seconds_left() == LEASE_SECONDS
