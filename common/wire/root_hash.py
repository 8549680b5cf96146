"""The root hash over a set of tensors: a worker computes it of the bytes it read, and a manifest promises it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

HASH = "xxh3_128"
"""The content hash, as root hashes and manifests name it."""

OUTPUT_HEAD = "lm_head.weight"


class HashedTensor(NamedTuple):
    """One tensor: dtype (safetensors' name, such as `BF16`), shape, and hex digest of its bytes."""

    dtype: str
    shape: tuple[int, ...]
    digest: str


def root_hash_of(tensors: Mapping[str, HashedTensor]) -> str:
    """Return the hash over the ordered (name, dtype, shape, content hash).

    It is independent of sharding and order. An output head that equals another tensor (the embedding
    it is tied to) does not count, so it may be left out or written.
    """
    import xxhash

    head = tensors.get(OUTPUT_HEAD)
    bodies = [tensor for name, tensor in tensors.items() if name != OUTPUT_HEAD]
    root = xxhash.xxh3_128()
    for name in sorted(tensors):
        if name == OUTPUT_HEAD and head in bodies:
            continue
        dtype, shape, digest = tensors[name]
        root.update(f"{name}\0{dtype}\0{','.join(map(str, shape))}\0{digest}\n".encode())
    return f"{HASH}:{root.hexdigest()}"
