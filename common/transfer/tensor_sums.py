"""A checksum of tensors that a CPU and a GPU compute alike, where the tensors are: only the sums reach the host.

It finds accidents: copies that are cut, late, shifted, swapped or of another version, and bits that flip. It is not a hash:
anybody can make other tensors of the same sum, so it proves nothing about tensors of a stranger. In arithmetic that wraps
at 64 bits::

    block   sum of word_i * weight_i        over 4,096 words of 4 bytes, signed; zeros fill the last block
    tensor  sum of block_j * weight_(4096 + j), plus the tensor's bytes * GOLDEN    16 hex digits
    root    as `wire/root_hash.py` forms it of names, dtypes, shapes and these sums

Weights are odd, so that a change of one word is always found; two swapped words of a block are, as well, since the
first 4,096 weights differ in their low 33 bits. Anything else is missed about once in 2**32 cases, or less often.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from rollout_common.wire.root_hash import HashedTensor, root_hash_of

if TYPE_CHECKING:
    import torch

SUM_SCHEME = "sum64_blocks"
"""The scheme's name, with which roots of such sums begin."""

WORD_BYTES, BLOCK_WORDS = 4, 4096
BLOCK_BYTES = WORD_BYTES * BLOCK_WORDS

PIECE_BYTES = {"cpu": 64 * BLOCK_BYTES}
"""Bytes that are multiplied at once, by kind of device: what the caches of a processor hold."""

LARGE_PIECE_BYTES = 1024 * BLOCK_BYTES
"""The same for other devices; with the products, and copies of what is not contiguous, four times as much memory."""

GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
MIXER = 0xBF58476D1CE4E5B9 - (1 << 64)
"""Odd numbers of random bits (as in splitmix64), as signed ones."""


def sum_tensors(tensors: Sequence[torch.Tensor]) -> list[str]:
    """Return the sum of each tensor's bytes in the order of its indices, whatever its layout in memory.

    The host waits once, for all sums.

    Args:
        tensors: Of any dtypes and shapes, all of one device.
    """
    import torch

    if not tensors:
        return []
    device = tensors[0].device
    most = max(_count_blocks(tensor) for tensor in tensors)
    weights = _make_weights(0, BLOCK_WORDS, device)
    block_weights = _make_weights(BLOCK_WORDS, most, device)
    sums = [
        _sum_blocks(tensor, weights).mul_(block_weights[: _count_blocks(tensor)]).sum()
        for tensor in tensors
    ]
    return [
        f"{(total + tensor.nbytes * GOLDEN) % (1 << 64):016x}"
        for tensor, total in zip(tensors, torch.stack(sums).tolist(), strict=True)
    ]


def root_of_sums(rows: Iterable[tuple[str, str, Sequence[int], str]]) -> str:
    """Return one hash over rows of name, dtype (safetensors' name), shape and sum, in any order.

    As in every root hash, an output head that equals another tensor does not count.
    """
    tensors = {name: HashedTensor(dtype, tuple(shape), each) for name, dtype, shape, each in rows}
    return root_hash_of(tensors, SUM_SCHEME)


def _count_blocks(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // BLOCK_BYTES)


def _make_weights(first: int, count: int, device: torch.device) -> torch.Tensor:
    """Return the weights of these numbers: odd, and without a pattern."""
    import torch

    mixed = torch.arange(first + 1, first + count + 1, dtype=torch.int64, device=device) * GOLDEN
    for _ in range(2):
        mixed = (mixed ^ (mixed >> 31)) * MIXER
    return mixed ^ (mixed >> 31) | 1


def _sum_blocks(tensor: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the sum of each block."""
    import torch

    device = tensor.device
    sums = torch.empty(_count_blocks(tensor), dtype=torch.int64, device=device)
    most = PIECE_BYTES.get(device.type, LARGE_PIECE_BYTES)
    size = min(most, max(len(sums), 1) * BLOCK_BYTES)
    shape = (size // BLOCK_BYTES, BLOCK_WORDS)
    products = torch.empty(shape, dtype=torch.int64, device=device)
    done = 0
    for piece in _cut_pieces(tensor, size):
        blocks = piece.view(torch.int32).view(-1, BLOCK_WORDS)
        count = len(blocks)
        torch.mul(blocks, weights, out=products[:count])
        torch.sum(products[:count], dim=1, out=sums[done : done + count])
        done += count
    return sums


def _cut_pieces(tensor: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
    """Yield a tensor's bytes as pieces of whole blocks; the next piece may take the memory of this one."""
    import torch

    plain = tensor.detach().resolve_conj().resolve_neg()
    # torch views no words at another offset, and a GPU reads none at another address.
    offset = plain.storage_offset() * plain.element_size()
    if not plain.is_contiguous() or offset % WORD_BYTES or plain.data_ptr() % WORD_BYTES:
        yield from _pack_runs(_cut_runs(plain, size), size, tensor.device)
        return
    content = _view_bytes(plain)
    whole = len(content) // BLOCK_BYTES * BLOCK_BYTES
    if whole:
        yield from torch.split(content[:whole], size)
    yield from _pack_runs([content[whole:]], BLOCK_BYTES, tensor.device)


def _cut_runs(tensor: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
    """Yield a tensor's bytes in the order of its indices, as runs of at most this size; it is not copied as a whole."""
    import torch

    if tensor.is_contiguous():
        yield from torch.split(_view_bytes(tensor), size)
    elif tensor.nbytes <= size:
        yield _view_bytes(tensor.contiguous())
    elif len(tensor) == 1:
        yield from _cut_runs(tensor[0], size)
    else:
        for part in torch.split(tensor, max(size * len(tensor) // tensor.nbytes, 1)):
            yield from _cut_runs(part, size)


def _view_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor; one with a single element may still have any strides."""
    import torch

    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _pack_runs(
    runs: Iterable[torch.Tensor], size: int, device: torch.device
) -> Iterator[torch.Tensor]:
    """Yield runs one behind the other as pieces of this size, in the same memory; zeros fill the last block."""
    import torch

    packed = torch.empty(size, dtype=torch.uint8, device=device)
    filled = 0
    for run in runs:
        for part in (run[: size - filled], run[size - filled :]):
            packed[filled : filled + len(part)] = part
            filled += len(part)
            if filled == size:
                yield packed
                filled = 0
    if filled:
        end = -(-filled // BLOCK_BYTES) * BLOCK_BYTES
        packed[filled:end] = 0
        yield packed[:end]
