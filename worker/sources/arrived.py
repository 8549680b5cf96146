"""A pushed version that is here, or comes: a source of weights as files are one, followed as it arrives."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING

from rollout_common.transfer.frames import CHUNK_BYTES
from rollout_common.transfer.layout import PushLayout
from rollout_worker.engine import TensorEntry, TensorSpec, WeightsRejected
from rollout_worker.weights import HASH

from .checkpoint_files import ReadCancelled
from .pushed_memory import Memory

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

    def read_chunks(
        self, entry: TensorEntry, view: memoryview | None, cancelled: Callable[[], bool]
    ) -> Iterator[memoryview]:
        """See `ReadableSource.read_chunks`: follows what arrives."""
        self._cancelled = cancelled
        return chunks_of(self.layout, self.memory, entry, view, self._there)

    def _there(self, end: int) -> None:
        """Return once everything up to there is."""
        self._follow(lambda: self._incoming.upto >= end)

    def _follow(self, until: Callable[[], bool]) -> None:
        if not until() and not self._incoming.follow(until, self._cancelled):
            raise ReadCancelled

    def check_promise(self, digests: Mapping[str, str], root: str) -> None:
        """See `ReadableSource.check_promise`: what the sender says at the end."""
        end = self._end()
        for name, digest in digests.items():
            if end.digests.get(name) != digest:
                raise WeightsRejected(
                    f"tensor {name!r} arrived with {HASH} {digest}, its sender says "
                    f"{end.digests.get(name, 'nothing')}: publish again",
                    tensor=name,
                )
        if end.root_hash != root:
            raise WeightsRejected(
                f"what arrived has root_hash {root}, its sender says {end.root_hash}: publish again"
            )


def chunks_of(
    layout: PushLayout,
    memory: Memory,
    entry: TensorEntry,
    view: memoryview | None,
    there: Callable[[int], None] = lambda end: None,
) -> Iterator[memoryview]:
    """Yield a tensor's bytes part by part, where they are or where they were copied to.

    `there`: returns once everything up to an offset may be read.
    """
    placed, step = layout[entry.name], 4 * CHUNK_BYTES
    for begin in range(placed.start, placed.end, step):
        end = min(begin + step, placed.end)
        there(end)
        yield from _copied(memory.bytes(begin, end), view, begin - placed.start)


def _copied(part: memoryview, view: memoryview | None, begin: int) -> Iterator[memoryview]:
    """Yield a part where it is, or where it was copied to."""
    with part:
        if view is None:
            yield part
            return
        with view[begin : begin + len(part)] as there:
            there[:] = part
            yield there


def content_bytes(layout: PushLayout, left_out: Collection[str] = ()) -> int:
    """Return the bytes of all other tensors of a layout, without the gaps between them."""
    return sum(placed.nbytes for placed in layout.tensors if placed.name not in left_out)


def entries_of(layout: PushLayout) -> tuple[TensorEntry, ...]:
    """Return the tensors of a layout."""
    return tuple(
        TensorEntry(each.name, TensorSpec(each.dtype, each.shape)) for each in layout.tensors
    )
