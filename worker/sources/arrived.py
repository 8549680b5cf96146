"""A pushed version that is here, or comes: a source of weights as files are one, followed as it arrives."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

from rollout_common.transfer.layout import Placed, PushLayout
from rollout_common.wire.root_hash import TREE_SCHEME, scheme_of
from rollout_worker.engine import TensorEntry, TensorSpec, WeightsRejected

from .pushed_memory import Memory
from .source_reading import ContentHashes, ReadCancelled, ReadLeaf, copy_leaf

if TYPE_CHECKING:
    from .incoming import End, Incoming


class Arrived:
    """A version that has arrived, or does, as a source; see `files.ReadableSource`."""

    def __init__(self, incoming: Incoming, layout: PushLayout, memory: Memory) -> None:
        self.layout, self.memory = layout, memory
        self.entries = entries_of(layout)
        self._incoming = incoming
        self._cancelled: Callable[[], bool] = lambda: False

    @property
    def bytes_total(self) -> int:
        """See `ReadableSource.bytes_total`."""
        return content_bytes(self.layout, self.skipped_names)

    @property
    def skipped_names(self) -> frozenset[str]:
        """See `ReadableSource.skipped_names`."""
        return self._incoming.left_out

    def promised_hashes(self) -> Mapping[str, str]:
        """See `ReadableSource.promised_hashes`: what the sender says at the end."""
        if not self.skipped_names:
            return {}
        said = self._end().digests
        return {name: said[name] for name in self.skipped_names}

    def _end(self) -> End:
        self._follow(lambda: self._incoming.end is not None)
        assert self._incoming.end is not None
        return self._incoming.end

    def open_tensor(
        self, entry: TensorEntry, cancelled: Callable[[], bool]
    ) -> AbstractContextManager[ReadLeaf]:
        """See `ReadableSource.open_tensor`: follows what arrives."""
        self._cancelled = cancelled
        return nullcontext(read_placed(self.layout[entry.name], self.memory, self._there))

    def _there(self, end: int) -> None:
        """Return once everything up to there is."""
        self._follow(lambda: self._incoming.upto >= end)

    def _follow(self, until: Callable[[], bool]) -> None:
        if not until() and not self._incoming.follow(until, self._cancelled):
            raise ReadCancelled

    @property
    def promised_scheme(self) -> str:
        """See `ReadableSource.promised_scheme`: the sender's; until that says it, this release's."""
        end = self._incoming.end
        return TREE_SCHEME if end is None else scheme_of(end.root_hash)

    def check_promise(self, found: Mapping[str, ContentHashes]) -> None:
        """See `ReadableSource.check_promise`: what the sender says at the end."""
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
    placed: Placed, memory: Memory, there: Callable[[int], None] = lambda end: None
) -> ReadLeaf:
    """Return what reads the leaves of a tensor that lies in pushed memory.

    `there`: returns once everything up to an offset may be read.
    """
    return partial(_read_leaf, placed.start, memory, there)


def _read_leaf(
    start: int,
    memory: Memory,
    there: Callable[[int], None],
    begin: int,
    end: int,
    part: memoryview | None,
) -> memoryview:
    there(start + end)
    content = memory.bytes(start + begin, start + end)
    return content if part is None else copy_leaf(content, part)


def content_bytes(layout: PushLayout, left_out: Collection[str] = ()) -> int:
    """Return the bytes of all other tensors of a layout, without the gaps between them."""
    return sum(placed.nbytes for placed in layout.tensors if placed.name not in left_out)


def entries_of(layout: PushLayout) -> tuple[TensorEntry, ...]:
    """Return the tensors of a layout."""
    return tuple(
        TensorEntry(each.name, TensorSpec(each.dtype, each.shape)) for each in layout.tensors
    )
