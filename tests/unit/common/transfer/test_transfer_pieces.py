"""How layouts are cut into pieces: all bytes once, none too large, alike at both ends."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rollout_common.transfer import pieces
from rollout_common.transfer.connections.frames import MAX_PAYLOAD_BYTES
from rollout_common.transfer.layout import PushLayout
from rollout_common.wire import root_hash
from rollout_common.wire.root_hash import DIGEST_BYTES, combine_leaves, hash_leaf, leaf_spans
from tests.support.unit.memory_versions import LEAF, small_leaves

SIZES = st.sampled_from((0, 1, 255, 256, 257, 511, LEAF - 1, LEAF, LEAF + 1, 3 * LEAF + 77))


@pytest.fixture(autouse=True, scope="module")
def leaves_of_a_kibibyte() -> Iterator[None]:
    with small_leaves():
        yield


def layout_of(sizes: list[int]) -> PushLayout:
    return PushLayout.plan((f"t{number}", "U8", (size,)) for number, size in enumerate(sizes))


@given(st.lists(SIZES, max_size=12), st.sampled_from((1, 4, pieces.MOST_PIECES)))
@example([], 1)
@example([0, 0], 1)
@example([LEAF, 1], 1)
@example([1] * 5, 1)
@example([1, 9 * LEAF, 5 * LEAF + 1, 1], 4)
def test_pieces_hold_every_leaf_once_in_order_and_span_no_more_than_they_may(
    sizes: list[int], most: int
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pieces, "MOST_PIECES", most)
        layout = layout_of(sizes)
        span = pieces.piece_span(sum(sizes))
        cut = layout.pieces
    leaves = [leaf for piece in range(len(cut)) for leaf in cut.leaves_of(piece)]
    assert leaves == list(range(cut.leaf_count))
    placed_tensors = sorted(layout.tensors, key=lambda each: each.start)
    whole = [
        (placed.start + begin, placed.start + end)
        for placed in placed_tensors
        for begin, end in leaf_spans(placed.nbytes)
    ]
    assert [cut.leaf_span(leaf) for leaf in leaves] == whole
    for piece in range(len(cut)):
        assert len(cut.leaves_of(piece)) > 0
        assert cut.nbytes_of(piece) <= span
        assert all(cut.piece_of_leaf[leaf] == piece for leaf in cut.leaves_of(piece))
    large = {placed.start for placed in placed_tensors if placed.nbytes >= span}
    for piece in range(1, len(cut)):
        begin, _ = cut.span(piece - 1)
        first, next_end = cut.leaf_span(cut.leaves_of(piece)[0])
        assert first in large or next_end - begin > span, "the first leaf would have fitted before"
    assert large <= {cut.span(piece)[0] for piece in range(len(cut))}


@pytest.mark.parametrize(
    ("leaves", "span"), [(0, 1), (1, 1), (8, 1), (9, 2), (16, 2), (17, 4), (1000, 4)]
)
def test_pieces_of_large_versions_are_larger(
    leaves: int, span: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "MOST_PIECES", 8)
    assert pieces.piece_span(leaves * LEAF) == span * LEAF
    assert span * root_hash.LEAF_BYTES <= MAX_PAYLOAD_BYTES


@given(st.lists(SIZES, max_size=12))
def test_both_ends_cut_alike(sizes: list[int]) -> None:
    ours = layout_of(sizes)
    theirs = PushLayout.from_json(ours.to_json())
    assert [ours.pieces.span(each) for each in range(len(ours.pieces))] == [
        theirs.pieces.span(each) for each in range(len(theirs.pieces))
    ]


@settings(max_examples=30)
@given(st.lists(SIZES, min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_the_hashes_of_pieces_are_those_of_tensors(sizes: list[int], chance: random.Random) -> None:
    layout = layout_of(sizes)
    content = memoryview(chance.randbytes(layout.nbytes))
    found = b"".join(
        layout.pieces.hash_leaves(piece, content[slice(*layout.pieces.span(piece))])
        for piece in range(len(layout.pieces))
    )
    assert len(found) == layout.pieces.leaf_count * DIGEST_BYTES
    for placed in layout.tensors:
        own = content[placed.start : placed.end]
        leaves = b"".join(hash_leaf(own[begin:end]) for begin, end in leaf_spans(placed.nbytes))
        assert found[layout.pieces.tensor_leaves(placed)] == leaves
        assert combine_leaves(found[layout.pieces.tensor_leaves(placed)]) == combine_leaves(leaves)


@settings(max_examples=50)
@given(st.lists(st.tuples(SIZES, st.booleans()), min_size=1, max_size=12))
def test_the_pieces_of_tensors_are_those_that_hold_something_of_them(
    tensors: list[tuple[int, bool]],
) -> None:
    layout = layout_of([size for size, _ in tensors])
    wanted = [layout[f"t{number}"] for number, (_, wants) in enumerate(tensors) if wants]
    cut = layout.pieces
    holding = {
        piece
        for piece in range(len(cut))
        for leaf in cut.leaves_of(piece)
        for placed in wanted
        if placed.nbytes and placed.start <= cut.leaf_span(leaf)[0] < placed.end
    }
    assert set(cut.pieces_of(wanted)) == holding
