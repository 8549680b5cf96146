"""What several ranks write of a version, in any order: hashed in a thread, noted leaf by leaf, ended for one reason."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_client import PublishFailed
from rollout_client.steering.pushing.shards.merged_version import MergedVersion
from rollout_client.steering.pushing.tensor_copying import Copier
from rollout_common.transfer.layout import LayoutError
from rollout_common.transfer.memory.arena import Arena
from rollout_common.transfer.memory.mapped_memory import SharedMemoryError
from rollout_common.wire.root_hash import HashedTensor, root_hash_of
from tests.support.unit.digests import tensor_digest
from tests.support.waiting import until_sync

MEBI = 1 << 20
Specs = tuple[tuple[str, str, tuple[int, ...]], ...]
SHORT: Specs = (("a", "U8", (300,)),)


def hashing() -> bool:
    """Whether a thread is there that hashes what ranks write."""
    return "weights-hash" in {thread.name for thread in threading.enumerate()}


class Ranks:
    """All ranks of a trainer at once: they write bytes, and say so."""

    def __init__(
        self,
        specs: Specs = SHORT,
        blocks: Mapping[str, tuple[int, int]] | None = None,
        due: int | None = None,
    ) -> None:
        self.arena = Arena()
        self.filling = MergedVersion(self.arena, Copier())
        self.filling.plan(specs)
        whole = sum(placed.nbytes for placed in self.filling.layout.tensors)
        self.filling.begin(whole if due is None else due, blocks or {})

    def write(self, name: str, begin: int, end: int, value: int = 1) -> None:
        """Write a run without a word on it."""
        view = self.filling.slot.view_tensor(self.filling.layout[name])
        view[begin:end] = bytes([value]) * (end - begin)
        view.release()

    def bring(self, name: str, begin: int, end: int, value: int = 1) -> None:
        """Write a run of bytes."""
        self.write(name, begin, end, value)
        self.filling.arrived(name, begin, end)

    def leaves(self, name: str) -> list[bool]:
        """Which leaves of a tensor are noted."""
        pieces = self.filling.held.pieces
        first, size = pieces.first_leaf[name], self.filling.layout[name].nbytes
        return [
            self.filling.held.leaf_digest(first + leaf) is not None
            for leaf in range(-(-size // MEBI))
        ]

    def end(self) -> None:
        """All is written, and what it ends with is what hashes to from the bytes that are there."""
        filling, hashed = self.filling, {}
        assert filling.all_written()
        filling.end()
        for placed in filling.layout.tensors:
            with filling.slot.view_tensor(placed) as view:
                hashed[placed.name] = HashedTensor(placed.dtype, placed.shape, tensor_digest(view))
        end = filling.held.end
        assert end is not None
        assert end.digests == {name: each.digest for name, each in hashed.items()}
        assert filling.root_hash == end.root_hash == root_hash_of(hashed)
        self.close()

    def close(self) -> None:
        self.filling.close()
        self.arena.close()


@pytest.fixture
def short() -> Iterator[Ranks]:
    """One tensor of 300 bytes."""
    made = Ranks()
    yield made
    made.close()


SEVERAL: Specs = (
    ("d", "U8", (700,)), ("a", "U8", (300,)), ("b", "U8", (0,)), ("c", "U8", (0, 2)),
)  # fmt: skip
RUNS = [
    (name, at, min(at + 90, size))
    for name, size in (("a", 300), ("d", 700))
    for at in range(0, size, 90)
]


@given(st.permutations(RUNS))
def test_bytes_that_come_in_any_order_are_hashed_in_theirs(
    runs: list[tuple[str, int, int]],
) -> None:
    ranks = Ranks(SEVERAL)
    for value, run in enumerate(runs):
        assert not ranks.filling.held.is_complete
        ranks.bring(*run, value)
    ranks.end()


def test_a_leaf_is_there_as_soon_as_it_is_hashed() -> None:
    ranks = Ranks((("a", "U8", (3 * MEBI + 5,)), ("b", "U8", (10,))))
    ranks.bring("a", 2 * MEBI, 3 * MEBI + 5)
    ranks.bring("b", 0, 10)
    until_sync(lambda: ranks.leaves("b") == [True], what="the short one to be hashed")
    assert ranks.leaves("a") == [False, False, True, True], "each of them once it is whole"
    ranks.bring("a", 0, MEBI + 1)
    until_sync(lambda: ranks.leaves("a")[0], what="its first leaf")
    assert ranks.leaves("a") == [True, False, True, True]
    assert ranks.filling.held.has(0)
    assert not ranks.filling.held.has(1)
    ranks.bring("a", MEBI + 1, 2 * MEBI)
    ranks.end()


def test_a_tensor_that_comes_in_blocks_is_hashed_once_all_of_them_are_there() -> None:
    ranks = Ranks((("a", "U8", (2, 100)), ("b", "U8", (50,))), {"a": (0, 200)})
    ranks.write("a", 0, 200, 7)
    ranks.filling.block("a", 120)
    ranks.bring("b", 0, 50)
    until_sync(lambda: ranks.leaves("b") == [True], what="the other one to be hashed")
    assert ranks.leaves("a") == [False]
    ranks.filling.block("a", 80)
    ranks.end()


def test_a_version_without_a_byte_is_there_at_once() -> None:
    ranks = Ranks((("a", "U8", (0,)), ("b", "F32", (0, 2))))
    ranks.end()
    until_sync(lambda: not hashing(), what="the end of the thread that hashes")


def test_bytes_that_no_tensor_has_are_refused(short: Ranks) -> None:
    short.bring("a", 0, 100)
    for name, begin, end in (("b", 0, 1), ("a", 200, 301), ("a", 200, 200)):
        with pytest.raises(LayoutError, match="has no bytes"):
            short.filling.arrived(name, begin, end)
    with pytest.raises(LayoutError, match="bytes 0 to 300 of 'a' came twice"):
        short.filling.arrived("a", 0, 300)
    for name in ("a", "b"):
        with pytest.raises(LayoutError, match="comes in blocks"):
            short.filling.block(name, 1)
    ranks = Ranks(SHORT, {"a": (0, 300)})
    with pytest.raises(LayoutError, match="more bytes of tensor 'a' came than it has"):
        ranks.filling.block("a", 301)
    ranks.close()


def test_bytes_of_other_nodes_are_no_bytes_that_this_node_waits_for() -> None:
    ranks = Ranks((("a", "U8", (3 * MEBI,)),), due=MEBI)
    ranks.write("a", 0, 3 * MEBI)
    ranks.filling.received("a", MEBI, 2 * MEBI)
    assert not ranks.filling.wait_node(0.05)
    ranks.filling.arrived("a", 0, MEBI)
    assert ranks.filling.wait_node(10)
    ranks.filling.held.note_digests(2, bytes(16))
    assert ranks.filling.all_written(), "the hash of the last leaf is known"
    assert not ranks.filling.held.is_complete
    ranks.filling.fail(PublishFailed("rank 3 is gone"))
    assert ranks.filling.held.failure is None, "this node's part is whole, and is served on"
    ranks.close()


# How it ends without all of it.


def test_what_was_given_up_before_it_was_planned_hashes_nothing() -> None:
    """Whoever gives up is in another thread than who plans."""
    arena = Arena()
    filling = MergedVersion(arena, Copier())
    filling.fail()
    filling.plan(SHORT)
    filling.begin(300, {})
    until_sync(lambda: not hashing(), what="the end of the thread that hashes")
    assert not filling.all_written()
    filling.close()
    arena.close()


def test_what_is_given_up_midway_is_hashed_no_further() -> None:
    ranks = Ranks((("a", "U8", (9 * MEBI,)),))
    filling = ranks.filling
    # Once the first leaf is noted.
    filling.held.subscribe(lambda: None if filling.given_up else filling.fail())
    ranks.bring("a", 0, 9 * MEBI)
    until_sync(lambda: not hashing(), what="the end of the thread that hashes")
    assert ranks.leaves("a") == [True] + [False] * 8, "it looks after each of them"
    assert ranks.filling.held.failure == "the publish was given up"
    assert not ranks.filling.all_written()
    assert ranks.filling.root_hash is None
    ranks.close()


def test_a_thread_that_waits_for_bytes_ends_when_none_come_any_more(short: Ranks) -> None:
    short.bring("a", 0, 100)
    assert hashing()
    short.filling.close()
    until_sync(lambda: not hashing(), what="the end of the thread that hashes")


def test_why_a_version_was_given_up_first_is_why_it_was() -> None:
    """A rank's failure ends the senders, whose end is no news to the rank that leads."""
    gone = ValueError("a rank is gone")
    for reasons in ((None,), (None, gone), (gone,), (gone, None), (gone, ValueError("given up"))):
        ranks = Ranks()
        for why in reasons:
            ranks.filling.fail(why)
        if reasons[0] is None:
            assert not ranks.filling.all_written()
        else:
            with pytest.raises(ValueError, match="a rank is gone"):
                ranks.filling.all_written()
        ranks.close()


def test_ranks_whose_pool_is_closed_are_told_so_where_their_bytes_were_hashed() -> None:
    ranks = Ranks((("a", "U8", (100,)), ("b", "U8", (100,))))
    ranks.bring("a", 0, 100)
    until_sync(lambda: ranks.leaves("a") == [True], what="the first hash")
    ranks.arena.close()
    ranks.filling.arrived("b", 0, 100)
    with pytest.raises(SharedMemoryError, match="this memory was given up"):
        ranks.filling.all_written()
    ranks.close()


def test_what_was_given_up_before_its_pool_was_closed_tells_nothing_of_that(short: Ranks) -> None:
    short.filling.fail(LayoutError("rank 1 has no values"))
    short.arena.close()
    short.filling.arrived("a", 0, 300)
    until_sync(lambda: not hashing(), what="the end of the thread that hashes")
    with pytest.raises(LayoutError, match="rank 1 has no values"):
        short.filling.all_written()
