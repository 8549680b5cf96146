"""Sums of tensors: the same by a plain loop and for every layout, and another one after each accident."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_common.transfer import tensor_sums
from rollout_common.transfer.tensor_sums import (
    BLOCK_BYTES,
    BLOCK_WORDS,
    GOLDEN,
    MIXER,
    PIECE_BYTES,
    root_of_sums,
    sum_tensors,
)

SIZES = [0, 1, 3, 4, 5, 8, 15, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 2 * BLOCK_BYTES + 7]
DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int16),
    *(torch.uint8, torch.int8, torch.uint16, torch.uint32, torch.bool, torch.complex64),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]


def signed(number: int) -> int:
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


@cache
def weight(number: int) -> int:
    mixed = signed((number + 1) * GOLDEN)
    for _ in range(2):
        mixed = signed((mixed ^ (mixed >> 31)) * MIXER)
    return mixed ^ (mixed >> 31) | 1


def plain_sum(content: bytes) -> str:
    total = len(content) * GOLDEN
    for number, start in enumerate(range(0, len(content), BLOCK_BYTES)):
        block = content[start : start + BLOCK_BYTES]
        words = (block[i : i + 4].ljust(4, b"\0") for i in range(0, len(block), 4))
        found = sum(
            int.from_bytes(word, "little", signed=True) * weight(i) for i, word in enumerate(words)
        )
        total += found * weight(BLOCK_WORDS + number)
    return f"{total % (1 << 64):016x}"


def tensor_of(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0)


def bytes_of(tensor: torch.Tensor) -> bytes:
    copy = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    return bytes(copy.flatten().view(torch.uint8).tolist())


def test_sums_are_those_of_a_plain_loop() -> None:
    contents = [random.Random(size).randbytes(size) for size in SIZES]
    sums = sum_tensors([tensor_of(content) for content in contents])
    assert sums == [plain_sum(content) for content in contents]
    assert len(set(sums)) == len(SIZES)
    assert sum_tensors([]) == []


@given(
    content=st.binary(max_size=200),
    dtype=st.sampled_from(DTYPES),
    start=st.integers(0, 3),
    step=st.integers(1, 3),
    width=st.integers(1, 5),
)
@settings(max_examples=60, deadline=None)
def test_layouts_and_dtypes_do_not_count(
    content: bytes, dtype: torch.dtype, start: int, step: int, width: int
) -> None:
    size = torch.empty(0, dtype=dtype).element_size()
    content = bytes(each & 1 for each in content) if dtype == torch.bool else content
    flat = tensor_of(content[: len(content) // (size * width) * size * width])
    table = flat.to(torch.uint8).view(dtype).reshape(-1, width)
    views = [
        table,
        table.t(),
        table[start:, ::step],
        table[:, :0],
        table.t()[-1],
        table.unsqueeze(1),
    ]
    assert sum_tensors(views) == [plain_sum(bytes_of(view)) for view in views]


def test_bytes_at_any_address_have_the_same_sum() -> None:
    memory = torch.randint(0, 255, (BLOCK_BYTES + 64,), dtype=torch.uint8)
    for start in range(9):
        part = memory[start : start + BLOCK_BYTES + 5]
        assert sum_tensors([part]) == sum_tensors([part.clone()])
    odd = torch.frombuffer(bytearray(memory.tolist()), dtype=torch.uint8, offset=1)
    for part in (odd, odd[3:], odd[4:], odd[2:2]):
        assert sum_tensors([part]) == sum_tensors([part.clone()])


def test_single_numbers_parameters_and_conjugates() -> None:
    numbers = torch.randn(30, 3)
    one, single = numbers[3, 2], numbers[:, 1][::7][:1]
    learned, turned = torch.nn.Parameter(numbers), torch.randn(5, dtype=torch.complex64).conj()
    views = [one, single, learned.detach(), turned, turned.imag, turned.imag[2]]
    assert sum_tensors(views) == [plain_sum(bytes_of(each)) for each in views]
    assert sum_tensors([learned]) == sum_tensors([numbers])


def test_pieces_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    table = torch.randn(300, 2, 70)
    views = [table, table.permute(2, 0, 1), table[:, :, 1:], table.expand(2, 300, 2, 70)]
    whole = sum_tensors(views)
    assert table.nbytes < PIECE_BYTES["cpu"]
    for blocks in (1, 2, 5):
        monkeypatch.setitem(tensor_sums.PIECE_BYTES, "cpu", blocks * BLOCK_BYTES)
        assert sum_tensors(views) == whole
    monkeypatch.setitem(tensor_sums.PIECE_BYTES, "cpu", BLOCK_BYTES)
    flipped = torch.randn(3, BLOCK_BYTES).t()  # a row of the copy is larger than a piece
    wide = torch.randn(2, BLOCK_BYTES, 2)[..., 1]
    assert sum_tensors([flipped, wide]) == sum_tensors([flipped.contiguous(), wide.contiguous()])


def test_every_flipped_bit_changes_the_sum() -> None:
    content = bytearray(random.Random(0).randbytes(61))
    seen = {plain_sum(bytes(content))}
    tensors = []
    for bit in range(8 * len(content)):
        content[bit // 8] ^= 1 << bit % 8
        tensors.append(tensor_of(bytes(content)))
        content[bit // 8] ^= 1 << bit % 8
    assert len(seen.union(sum_tensors(tensors))) == 8 * len(content) + 1


def test_accidents_of_copies_change_the_sum() -> None:
    rows = torch.randn(6, BLOCK_BYTES // 2).to(torch.bfloat16)  # each is one block
    words = rows.view(torch.int64)
    swapped = words.clone()
    swapped[2, 5], swapped[2, 9] = words[2, 9], words[2, 5]
    signs = rows.clone()
    signs[0, 3], signs[0, 7] = -rows[0, 3], -rows[0, 7]
    accidents = [
        rows,
        swapped,
        signs,
        -rows,
        rows.roll(1, 0),
        rows.flatten().roll(1),
        words.flatten().roll(1),
        rows[[0, 2, 1, 3, 4, 5]],
        rows[[1, 0, 2, 3, 5, 4]],
        torch.cat([rows, torch.zeros_like(rows[:1])]),
        torch.cat([rows.flatten(), torch.zeros(1, dtype=torch.bfloat16)]),
        torch.cat([torch.zeros_like(rows[:1]), rows]),
        rows[:-1],
        torch.cat([rows[:4], torch.zeros_like(rows[:2])]),
        torch.cat([rows[:5], rows[:1]]),
        *(torch.zeros(size, dtype=torch.uint8) for size in SIZES),
    ]
    assert len(set(sum_tensors(accidents))) == len(accidents)


def test_pairs_of_rows_that_are_swapped_the_other_way_change_the_sum() -> None:
    """With weights that rise evenly, one swap would undo what the other one changed."""
    one, other = torch.randn(2, BLOCK_WORDS)
    rows = torch.stack([one, other, one, one, other, one, one])
    moved = torch.stack([other, one, one, one, one, other, one])
    assert len(set(sum_tensors([rows, moved]))) == 2


def test_two_words_of_a_block_can_not_be_swapped_unnoticed() -> None:
    assert len({weight(i) % (1 << 33) for i in range(BLOCK_WORDS)}) == BLOCK_WORDS
    assert all(weight(i) % 2 for i in range(2 * BLOCK_WORDS))


def test_the_root_is_over_names_dtypes_shapes_and_sums() -> None:
    rows = [("b", "BF16", [2, 3], "0" * 16), ("a", "F32", [], "f" * 16)]
    lines = f"a\0F32\0\0{'f' * 16}\nb\0BF16\0{'2,3'}\0{'0' * 16}\n"
    expected = f"sum64_blocks:{xxhash.xxh3_128_hexdigest(lines.encode())}"
    assert root_of_sums(rows) == root_of_sums(iter(rows[::-1])) == expected
    others = [("c", *rows[0][1:]), ("b", "F16", *rows[0][2:]), ("b", "BF16", [3, 2], "0" * 16)]
    roots = {root_of_sums([other, rows[1]]) for other in others}
    assert len({expected, *roots, root_of_sums(rows[:1]), root_of_sums([])}) == 6
