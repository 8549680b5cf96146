"""The root hash: the same for any runs, against a plain loop, and another one for any other byte, place or scheme."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rollout_common.wire.root_hash import (
    DIGEST_BYTES,
    LEAF_BYTES,
    TREE_SCHEME,
    WHOLE_SCHEME,
    HashedTensor,
    TensorHasher,
    combine_leaves,
    hash_leaf,
    leaf_spans,
    root_hash_of,
    scheme_of,
)
from tests.support.unit.digests import tensor_digest

SIZES = (0, 1, LEAF_BYTES - 1, LEAF_BYTES, LEAF_BYTES + 1, 3 * LEAF_BYTES, 3 * LEAF_BYTES + 77)
CONTENT = random.Random(1).randbytes(max(SIZES))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(SIZES), st.lists(st.integers(0, max(SIZES)), max_size=8))
@example(max(SIZES), [LEAF_BYTES, 2 * LEAF_BYTES])
def test_runs_of_any_size_have_the_digest_of_a_plain_loop(size: int, cuts: list[int]) -> None:
    content = memoryview(CONTENT)[:size]
    places = sorted({0, *(cut for cut in cuts if cut < size), size})
    for scheme, expected in (
        (TREE_SCHEME, tensor_digest(content)),
        (WHOLE_SCHEME, xxhash.xxh3_128_hexdigest(content)),
    ):
        running = TensorHasher(scheme)
        for begin, end in pairwise(places):
            running.update(content[begin:end])
        assert running.hexdigest() == expected


@pytest.mark.parametrize("size", SIZES)
def test_leaves_cover_a_tensor_and_may_be_hashed_in_any_order(size: int) -> None:
    content, spans = memoryview(CONTENT)[:size], list(leaf_spans(size))
    assert b"".join(content[begin:end] for begin, end in spans) == content
    assert all(begin % LEAF_BYTES == 0 for begin, _ in spans)
    leaves = bytearray(DIGEST_BYTES * len(spans))
    for begin, end in random.Random(size).sample(spans, len(spans)):
        at = begin // LEAF_BYTES * DIGEST_BYTES
        leaves[at : at + DIGEST_BYTES] = hash_leaf(content[begin:end])
    assert combine_leaves(leaves) == tensor_digest(content)
    running = TensorHasher()
    running.update(content)
    assert running.leaves == leaves[: size // LEAF_BYTES * DIGEST_BYTES], "those that are complete"


@pytest.mark.parametrize("size", [size for size in SIZES if size])
def test_the_last_byte_counts(size: int) -> None:
    changed = bytearray(CONTENT[:size])
    changed[-1] ^= 1
    assert tensor_digest(changed) != tensor_digest(CONTENT[:size])


def test_a_root_hash_names_its_scheme() -> None:
    tensors = {"a": HashedTensor("U8", (1,), "0")}
    roots = [root_hash_of(tensors), root_hash_of(tensors, WHOLE_SCHEME)]
    assert [scheme_of(root) for root in roots] == [TREE_SCHEME, WHOLE_SCHEME]
    assert roots[0].partition(":")[2] == roots[1].partition(":")[2]
    assert scheme_of(None) == scheme_of("") == TREE_SCHEME
