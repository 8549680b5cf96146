"""Packing tensors into buckets: whatever goes in comes out, and nothing else is believed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_common.transfer.layout import LayoutError
from rollout_common.transfer.tensor_buckets import Bucket, flat_bytes, pack_buckets, unpack_buckets

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn, torch.uint8]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Any plain tensor: whole, empty, a number, a slice, transposed, expanded, negated in place."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    count = torch.Size(shape).numel() + 3
    raw = torch.randint(0, 2, (count * dtype.itemsize,), dtype=torch.uint8)
    base = raw.view(dtype)
    skip = draw(st.integers(0, 3))
    made = base[skip : count - 3 + skip].view(shape)  # begins anywhere in its storage
    match draw(st.integers(0, 3)):
        case 1 if made.dim() > 1:
            made = made.transpose(0, -1)
        case 2 if made.dim() and made.shape[0] > 1:
            made = made[::2]
        case 3:
            made = made.unsqueeze(-1).expand(*made.shape, 3)
    return made


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return (
        left.dtype == right.dtype
        and left.shape == right.shape
        and torch.equal(flat_bytes("", left), flat_bytes("", right))
    )


@settings(deadline=None)
@given(
    st.lists(tensors(), max_size=6),
    st.integers(1, 64),
    st.sampled_from([1, 2, 8, 16, 256]),
)
def test_what_goes_in_comes_out(values: list[torch.Tensor], bucket_bytes: int, align: int) -> None:
    named = [(f"t{index}", value) for index, value in enumerate(values)]
    named += [("alias", values[0])] if values else []
    buckets = list(pack_buckets(named, bucket_bytes, align=align))
    assert [bucket.last for bucket in buckets] == [False] * (len(buckets) - 1) + [True]
    assert all(bucket.buffer.numel() <= bucket_bytes for bucket in buckets)
    found = list(unpack_buckets(buckets))
    assert [name for name, _ in found] == [name for name, _ in named]
    for (_, put), (name, got) in zip(named, found, strict=True):
        assert same(put, got), name


def places(buckets: list[Bucket]) -> list[list[tuple[str, int, int]]]:
    return [[(p.name, p.start, p.nbytes) for p in bucket.pieces] for bucket in buckets]


def test_small_tensors_share_a_bucket_and_an_empty_one_is_kept() -> None:
    named = [
        ("a", torch.arange(10.0)),
        ("b", torch.ones(3, dtype=torch.bfloat16)),
        ("z", torch.empty(0, 4)),
        ("s", torch.tensor(2.0)),
    ]
    found = places(list(pack_buckets(named, 16, align=8)))
    assert found == [
        [("a", 0, 16)],
        [("a", 0, 16)],
        [("a", 0, 8), ("b", 8, 6), ("z", 16, 0)],
        [("s", 0, 4)],
    ]


def test_a_wider_dtype_after_a_narrow_one_is_viewed_in_place() -> None:
    named = [("b", torch.ones(3, dtype=torch.bfloat16)), ("f", torch.arange(4.0))]
    (bucket,) = pack_buckets(named, 1024)
    (_, first), (_, second) = unpack_buckets([bucket])
    assert {each.untyped_storage().data_ptr() for each in (first, second)} == {
        bucket.buffer.untyped_storage().data_ptr()
    }
    assert same(second, named[1][1])


def test_a_buffer_that_is_used_again_does_not_change_what_was_taken() -> None:
    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        buffer = torch.empty(4)
        for index in range(3):
            yield f"t{index}", buffer.fill_(index)

    found = dict(unpack_buckets(pack_buckets(gathered(), 4096)))
    assert [found[f"t{index}"].tolist() for index in range(3)] == [[float(i)] * 4 for i in range(3)]


def test_no_tensor_at_all_is_one_empty_last_bucket() -> None:
    (bucket,) = pack_buckets([], 8)
    assert (bucket.pieces, bucket.last) == ((), True)
    assert list(unpack_buckets([bucket])) == []


@pytest.mark.parametrize(
    ("value", "fix"),
    [
        (torch.eye(2).to_sparse(), "dense tensor"),
        (torch.empty(2, device="meta"), "dense tensor"),
        (3.5, "leave it out"),
        (None, "leave it out"),
    ],
)
def test_what_has_no_values_is_refused_by_name(value: Any, fix: str) -> None:
    with pytest.raises(LayoutError, match=fix) as caught:
        list(pack_buckets([("odd", value)], 64))
    assert caught.value.tensor == "odd"


def test_two_tensors_of_one_name_are_refused() -> None:
    with pytest.raises(LayoutError, match="'a' came twice"):
        list(pack_buckets([("a", torch.ones(1)), ("a", torch.ones(1))], 64))


@pytest.mark.parametrize(("bucket_bytes", "align"), [(0, 8), (8, 0)])
def test_impossible_sizes_are_refused(bucket_bytes: int, align: int) -> None:
    with pytest.raises(ValueError, match="1 or more"):
        list(pack_buckets([], bucket_bytes, align=align))


@given(st.data())
def test_no_tampered_bucket_is_believed(data: st.DataObject) -> None:
    buckets = list(pack_buckets([("a", torch.arange(10.0)), ("b", torch.ones(3))], 16, align=8))
    index = data.draw(st.integers(0, len(buckets) - 1))
    bucket = buckets[index]
    where = data.draw(st.integers(0, len(bucket.pieces) - 1))
    piece = bucket.pieces[where]
    changed: dict[str, Any] = {
        "offset": piece.offset + 4,
        "start": bucket.buffer.numel() - piece.nbytes + 4,
        "nbytes": piece.nbytes - 4,
        "shape": (*piece.shape, 2),
    }
    kind = data.draw(st.sampled_from([*changed, "dropped", "doubled", "early end", "late"]))
    pieces = list(bucket.pieces)
    if kind in changed:
        pieces[where] = dataclasses.replace(piece, **{kind: changed[kind]})
    elif kind == "dropped":
        del pieces[where]
    elif kind == "doubled":
        pieces.insert(where, piece)
    buckets[index] = dataclasses.replace(bucket, pieces=tuple(pieces))
    if kind == "early end":
        buckets.pop()
    if kind == "late":
        buckets.append(bucket)
    whole = kind == "dropped" and piece.name == "b"  # a tensor that was never announced
    if whole:
        assert [name for name, _ in unpack_buckets(buckets)] == ["a"]
        return
    with pytest.raises(LayoutError):
        list(unpack_buckets(buckets))
