"""The root hash over a set of tensors: a worker computes it of the bytes it read, and a manifest promises it.

It is a tree. Each tensor's bytes are cut into leaves of `LEAF_BYTES`, counted from the tensor's first byte, so that
anybody can hash any leaf, in any order and with any number of threads. A tensor's digest is the hash of its leaves'
digests in order; the root binds every tensor's name, dtype, shape and digest::

    leaf    xxh3_128(bytes)                                16 raw bytes
    tensor  xxh3_128(leaf_0 + leaf_1 + ...)                hex; of no bytes for a tensor without elements
    root    xxh3_128(lines of name NUL dtype NUL shape NUL tensor LF, by name)

Root hashes begin with the name of their scheme. Earlier releases hashed each tensor from its first byte to its last
(`WHOLE_SCHEME`): what they published is still read, and is hashed in their way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import xxhash

TREE_SCHEME = "xxh3_128_tree"
"""The scheme of this release, as root hashes and manifests name it."""

WHOLE_SCHEME = "xxh3_128"
"""The scheme of earlier releases: one hash over each whole tensor, and the same root over those."""

LEAF_BYTES = 1 << 20
"""Size of a leaf, but for a tensor's last one. It fits the second-level cache of any server, so that bytes which were
just copied or received are hashed without being read from memory again."""

DIGEST_BYTES = 16

OUTPUT_HEAD = "lm_head.weight"


class HashedTensor(NamedTuple):
    """One tensor: dtype (safetensors' name, such as `BF16`), shape, and hex digest of its bytes."""

    dtype: str
    shape: tuple[int, ...]
    digest: str


def scheme_of(root_hash: str | None) -> str:
    """Return the scheme to hash with, so that the result compares with this root hash; None: this release's."""
    named = None if root_hash is None else root_hash.partition(":")[0]
    return WHOLE_SCHEME if named == WHOLE_SCHEME else TREE_SCHEME


def leaf_spans(nbytes: int) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each leaf of a tensor of this size, in order."""
    for begin in range(0, nbytes, LEAF_BYTES):
        yield begin, min(begin + LEAF_BYTES, nbytes)


def hash_leaf(content: memoryview | bytes | bytearray) -> bytes:
    """Return the digest of one leaf. Other threads run until it is done: the interpreter's lock is released."""
    import xxhash

    running = xxhash.xxh3_128()
    running.update(content)  # before xxhash 4 its functions of one call keep the lock
    return running.digest()


def combine_leaves(digests: bytes | bytearray | memoryview) -> str:
    """Return a tensor's digest from those of its leaves, one behind the other."""
    import xxhash

    return xxhash.xxh3_128_hexdigest(digests)


class TensorHasher:
    """Hashes one tensor whose bytes come in order, in runs of any size.

    Args:
        scheme: As `scheme_of` returns it.
    """

    def __init__(self, scheme: str = TREE_SCHEME) -> None:
        import xxhash

        self._new = xxhash.xxh3_128
        self._running: xxhash.xxh3_128 = self._new()
        self._whole = scheme == WHOLE_SCHEME
        self._left = LEAF_BYTES
        self._leaves = bytearray()

    def update(self, run: memoryview | bytes) -> None:
        """Hash the next bytes."""
        if self._whole:
            self._running.update(run)
            return
        with memoryview(run) as rest:
            begin = 0
            while begin < len(rest):
                end = min(begin + self._left, len(rest))
                with rest[begin:end] as part:
                    self._running.update(part)
                self._left -= end - begin
                begin = end
                if not self._left:
                    self._close_leaf()

    def hexdigest(self) -> str:
        """Return the tensor's digest, once all of its bytes came."""
        if self._whole:
            return self._running.hexdigest()
        if self._left < LEAF_BYTES:
            self._close_leaf()
        return combine_leaves(self._leaves)

    @property
    def leaves(self) -> bytes:
        """The digests of the leaves that are complete, one behind the other."""
        return bytes(self._leaves)

    def _close_leaf(self) -> None:
        self._leaves += self._running.digest()
        self._running, self._left = self._new(), LEAF_BYTES


def root_hash_of(tensors: Mapping[str, HashedTensor], scheme: str = TREE_SCHEME) -> str:
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
    return f"{scheme}:{root.hexdigest()}"
