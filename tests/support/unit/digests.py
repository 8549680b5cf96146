"""Hashes of tensors, as the format says: a plain loop, of one's own beside the product's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import xxhash

from rollout_common.wire.root_hash import LEAF_BYTES, HashedTensor, root_hash_of


def tensor_digest(content: bytes | bytearray | memoryview) -> str:
    """Return the digest of a tensor with these bytes."""
    leaves = b""
    for begin in range(0, len(content), LEAF_BYTES):
        leaves += xxhash.xxh3_128_digest(content[begin : begin + LEAF_BYTES])
    return xxhash.xxh3_128_hexdigest(leaves)


Plain = Mapping[str, tuple[str, tuple[int, ...], bytes]]
"""By name: dtype, shape and bytes."""


def whole_digests(tensors: Plain) -> dict[str, str]:
    """Return the digests by name as releases without leaves computed them."""
    return {name: xxhash.xxh3_128_hexdigest(each[2]) for name, each in tensors.items()}


def whole_root_hash(tensors: Plain) -> str:
    """Return the root hash as releases without leaves computed it."""
    found = whole_digests(tensors)
    hashed = {name: HashedTensor(*tensors[name][:2], digest) for name, digest in found.items()}
    return root_hash_of(hashed, "xxh3_128")


def write_whole_manifest(folder: Path, tensors: Plain) -> str:
    """Write a manifest as releases without leaves did; return its root hash."""
    root = whole_root_hash(tensors)
    digests = {name: {"xxh3_128": each} for name, each in whole_digests(tensors).items()}
    (folder / "manifest.json").write_text(json.dumps({"root_hash": root, "tensors": digests}))
    return root
