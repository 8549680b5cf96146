"""The table of a version's pieces: what is there, what is told of it, and how it ends."""

from __future__ import annotations

import random
import threading
from functools import partial

import pytest

from rollout_common.transfer.held_version import HeldVersion, VersionEnd
from rollout_common.transfer.layout import PushLayout
from rollout_common.wire.root_hash import LEAF_BYTES
from tests.support.unit.digests import tensor_digest

LAYOUT = PushLayout.plan(
    [("a", "U8", (2 * LEAF_BYTES + 7,)), ("b", "U8", (0,)), ("c", "U8", (5,)), ("d", "U8", (9,))]
)
CONTENT = memoryview(random.Random(7).randbytes(LAYOUT.nbytes))
PIECES = LAYOUT.pieces
END = VersionEnd("root", {"a": "1", "b": "2", "c": "3", "d": "4"})


def empty() -> HeldVersion:
    return HeldVersion(LAYOUT, lambda begin, end: CONTENT[begin:end])


def digests_of(piece: int) -> bytes:
    return PIECES.hash_leaves(piece, CONTENT[slice(*PIECES.span(piece))])


def mark(held: HeldVersion, *pieces: int) -> None:
    for piece in pieces:
        held.mark_piece(piece, digests_of(piece))


def test_pieces_may_come_in_any_order_and_are_told_in_it() -> None:
    held = empty()
    assert (held.prefix_end, held.piece_count, held.nbytes_held) == (0, 0, 0)
    mark(held, 2, 0)
    assert [held.has(piece) for piece in range(3)] == [True, False, True]
    assert held.marked_since(0) == [2, 0]
    assert held.marked_since(1) == [0]
    assert held.prefix_end == LEAF_BYTES
    assert not held.is_complete
    mark(held, 1)
    assert held.is_complete
    assert held.prefix_end == LAYOUT.nbytes
    assert held.nbytes_held == sum(map(PIECES.nbytes_of, range(3)))


def test_a_piece_that_comes_twice_counts_once() -> None:
    held = empty()
    mark(held, 1, 1)
    assert (held.marked_since(0), held.nbytes_held) == ([1], LEAF_BYTES)


def test_a_piece_of_several_leaves_is_there_with_the_last_of_them() -> None:
    held = empty()
    first, *rest = PIECES.leaves_of(2)
    assert len(rest) == 2, "tensors share a piece"
    for leaf in (first, *rest):
        assert not held.has(2)
        assert held.leaf_digest(leaf) is None
        held.mark_leaf(leaf, b"%16d" % leaf)
        assert held.leaf_digest(leaf) == b"%16d" % leaf
    assert held.has(2)
    assert held.leaf_digests(2) == b"".join(b"%16d" % leaf for leaf in (first, *rest))


def test_the_digests_of_tensors_are_those_of_their_bytes() -> None:
    held = empty()
    mark(held, 0, 1, 2)
    assert held.tensor_digests() == {
        placed.name: tensor_digest(CONTENT[placed.start : placed.end]) for placed in LAYOUT.tensors
    }


def test_the_first_word_on_how_it_ends_counts() -> None:
    held = empty()
    held.finish(END)
    held.finish(VersionEnd("another", {}))
    held.fail("the first reason")
    held.fail("another one")
    assert (held.end, held.failure) == (END, "the first reason")


def test_listeners_are_called_at_every_change_until_they_are_not_wanted() -> None:
    held, called = empty(), list[str]()
    ends = [held.subscribe(partial(called.append, name)) for name in "xy"]
    mark(held, 0)
    assert held.listener_count == 2
    ends[0]()
    assert held.listener_count == 1
    mark(held, 0, 1)
    held.finish(END)
    ends[1]()
    held.fail("it is over")
    assert called == ["x", "y", "y", "y"]


@pytest.mark.parametrize("comes", ["what is waited for", "a failure", "nothing"])
def test_a_thread_waits_until_it_is_there_or_never_will_be(comes: str) -> None:
    held, found = empty(), list[bool]()
    seconds = 0.02 if comes == "nothing" else 10.0
    waiting = threading.Thread(
        target=lambda: found.append(held.wait_for(lambda: held.has(1), seconds))
    )
    waiting.start()
    if comes == "a failure":
        held.fail("it is gone")
    elif comes != "nothing":
        mark(held, 0, 1)
    waiting.join(5)
    assert found == [comes == "what is waited for"]


def test_threads_that_fill_at_once_lose_nothing() -> None:
    held = empty()
    leaves = list(range(PIECES.leaf_count)) * 3

    def fill(part: list[int]) -> None:
        for leaf in part:
            held.mark_leaf(leaf, b"0" * 16)

    threads = [
        threading.Thread(target=fill, args=[part]) for part in (leaves[0::2], leaves[1::2], leaves)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert sorted(held.marked_since(0)) == [0, 1, 2]
    assert held.is_complete
