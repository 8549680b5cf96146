"""A pushed version as a source of weights, as files are one: readers follow it while it arrives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from typing import TYPE_CHECKING

from typing_extensions import override

from rollout_common.transfer.held_version import HeldVersion, VersionEnd
from rollout_common.transfer.layout import Placed, PushLayout
from rollout_common.wire.root_hash import LEAF_BYTES, TREE_SCHEME, scheme_of
from rollout_worker.engine import TensorEntry, TensorSpec, WeightsRejected
from rollout_worker.sources.source_reading import (
    ContentHashes,
    ReadableSource,
    ReadCancelled,
    ReadLeaf,
    copy_leaf,
)

from .pushed_memory import Memory

if TYPE_CHECKING:
    from .incoming_version import IncomingVersion


class ArrivedVersion(ReadableSource):
    """A pushed version as a source, from the moment when its layout and memory are there."""

    def __init__(self, incoming: IncomingVersion, held: HeldVersion, memory: Memory) -> None:
        self.held, self.layout, self.memory = held, held.layout, memory
        self._incoming = incoming
        self._cancelled: Callable[[], bool] = lambda: False

    @cached_property
    @override
    def entries(self) -> tuple[TensorEntry, ...]:
        """Its tensors in the order of their bytes, since the bytes come in that order."""
        return tuple(map(_entry_of, sorted(self.layout.tensors, key=lambda each: each.start)))

    @property
    @override
    def skipped_names(self) -> frozenset[str]:
        return self._incoming.left_out

    @override
    def promised_hashes(self) -> Mapping[str, str]:
        if not self.skipped_names:
            return {}
        said = self._end().digests
        return {name: said[name] for name in self.skipped_names}

    def _end(self) -> VersionEnd:
        self._follow(lambda: self.held.end is not None)
        assert self.held.end is not None
        return self.held.end

    @override
    def open_tensor(
        self, entry: TensorEntry, cancelled: Callable[[], bool]
    ) -> AbstractContextManager[ReadLeaf]:
        self._cancelled = cancelled
        placed = self.layout[entry.name]
        first = self.held.pieces.first_leaf.get(entry.name, 0)
        return nullcontext(read_placed(placed, self.memory, partial(self._wait_leaf, first)))

    def _wait_leaf(self, first: int, begin: int, end: int) -> None:
        """Wait for a leaf of the tensor whose first leaf is `first`: from `begin` in the tensor to `end` in the layout."""
        piece = self.held.pieces.piece_of_leaf[first + begin // LEAF_BYTES]
        self._follow(lambda: self._incoming.is_there(piece, end))

    @override
    def verified_digest(self, name: str, leaf: int) -> bytes | None:
        """Return the hash of a leaf that was verified as it came; None: not yet, or it lies in shared memory."""
        return self.held.leaf_digest(self.held.pieces.first_leaf[name] + leaf)

    @override
    def note_digest(self, name: str, leaf: int, digest: bytes) -> None:
        """Note the hash of a leaf of shared memory, so that other workers can fetch it from here."""
        self.held.mark_leaf(self.held.pieces.first_leaf[name] + leaf, digest)

    def _follow(self, until: Callable[[], bool]) -> None:
        if not until() and not self._incoming.follow(until, self._cancelled):
            raise ReadCancelled

    @property
    @override
    def promised_scheme(self) -> str:
        """The scheme of the sender's hashes; until the sender reports it, the scheme of this release."""
        end = self.held.end
        return TREE_SCHEME if end is None else scheme_of(end.root_hash)

    @override
    def check_promise(self, found: Mapping[str, ContentHashes]) -> None:
        """Compare all hashes with those that the sender reports at the end, in the scheme of the sender."""
        end = self._end()
        if (scheme := scheme_of(end.root_hash)) not in found:
            raise WeightsRejected(
                f"its sender says {end.root_hash}, and hashes of {scheme} were not expected: use the"
                " same release at both ends"
            )
        for name, digest in found[scheme].digests.items():
            if end.digests.get(name) != digest:
                raise WeightsRejected(
                    f"tensor {name!r} arrived with {scheme} {digest}, its sender says "
                    f"{end.digests.get(name, 'nothing')}: publish again",
                    tensor=name,
                )
        if end.root_hash != (root := found[scheme].root_hash):
            raise WeightsRejected(
                f"what arrived has root_hash {root}, its sender says {end.root_hash}: publish again"
            )


def read_placed(
    placed: Placed, memory: Memory, wait_leaf: Callable[[int, int], None] = lambda begin, end: None
) -> ReadLeaf:
    """Return a function that reads the leaves of a tensor in pushed memory.

    `wait_leaf`: takes where a leaf begins in the tensor and ends in the memory; returns once the leaf is there.
    """

    def read_leaf(begin: int, end: int, part: memoryview | None) -> memoryview:
        wait_leaf(begin, placed.start + end)
        content = memory.view_bytes(placed.start + begin, placed.start + end)
        return content if part is None else copy_leaf(content, part)

    return read_leaf


def entries_of(layout: PushLayout) -> tuple[TensorEntry, ...]:
    """Return the entries of all tensors of a layout, in its order."""
    return tuple(map(_entry_of, layout.tensors))


def _entry_of(placed: Placed) -> TensorEntry:
    return TensorEntry(placed.name, TensorSpec(placed.dtype, placed.shape))
