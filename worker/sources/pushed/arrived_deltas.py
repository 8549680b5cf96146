"""What of an incoming version came as deltas from its base, the version that serves.

The bytes of the base are copied to the new memory run by run. That memory often holds the version before the base: if
the base came as a delta, too, both deltas are applied to it, and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rollout_common.transfer.delta import DeltaError, apply_delta
from rollout_common.transfer.layout import PushLayout
from rollout_common.wire import Base

from .pushed_memory import Memory

PATCH_SHARE = 1 / 16
"""Largest share of a version's bytes that its deltas may have to be kept: beyond it a copy of the base is as fast."""


@dataclass(frozen=True, slots=True)
class Delta:
    """A delta that came for a run of bytes."""

    nbytes: int
    content: bytes


@dataclass(frozen=True, slots=True)
class DeltaPatch:
    """The deltas that turn the version before into this one, as far as it came as deltas.

    Attributes:
        root_hash: Of the version before.
        deltas: By the offset where each begins.
    """

    root_hash: str
    deltas: Mapping[int, Delta]


@dataclass(frozen=True, slots=True)
class DeltaBase:
    """A version that serves, held until `release`.

    Attributes:
        named: The version as a stage names it.
        layout_id: Of its layout, which the new version must share.
        memory: Its bytes.
        release: Ends the hold; idempotent.
        patch: The deltas by which it came; None: it came as a whole.
    """

    named: Base
    layout_id: str
    memory: Memory
    release: Callable[[], None]
    patch: DeltaPatch | None = field(repr=False)

    def renew(self, memory: Memory, begin: int, delta: Delta, *, untouched: bool) -> None:
        """Write a run of the base to the new memory, and apply the delta to it.

        Args:
            memory: Of the new version.
            begin: Offset of the run.
            delta: Turns the run of the base into the new one.
            untouched: Whether nothing was written to the run since the memory was taken.

        Raises:
            DeltaError: It is not a delta of this run.
        """
        end = begin + delta.nbytes
        with memory.view_bytes(begin, end) as place:
            if not untouched or not self._renewed(memory, begin, place):
                with self.memory.view_bytes(begin, end) as old:
                    place[:] = old
            apply_delta(delta.content, place)

    def _renewed(self, memory: Memory, begin: int, place: memoryview) -> bool:
        """Turn a run of the version before the base into the base; return False if that is impossible."""
        patch = self.patch
        if patch is None or memory.held_before != patch.root_hash:
            return False
        known = patch.deltas.get(begin)
        if known is None or known.nbytes != len(place):
            return False
        try:
            apply_delta(known.content, place)
        except DeltaError:  # it was valid when the base came; the caller copies the base then
            return False
        return True


class ArrivedDeltas:
    """The deltas of one version, for the memory of the version and for workers that have the same base.

    Args:
        base: The version that deltas are applied to; None: all bytes have to come.
    """

    def __init__(self, base: DeltaBase | None) -> None:
        self.base = base
        self.by_offset: dict[int, Delta] = {}
        """By the offset where the piece begins: the delta that came instead of its bytes."""
        self._written: set[int] = set()
        """Offsets of the pieces that were written to, even if the write failed."""

    def note_writing(self, begin: int) -> None:
        """Note that the piece that begins there is written to."""
        self._written.add(begin)

    def drop_delta(self, begin: int) -> None:
        """Forget the delta of a piece whose bytes came, too: it had a wrong result, and no other worker gets it."""
        self.by_offset.pop(begin, None)

    def check_base(self, base: object, layout: PushLayout) -> str:
        """Return why a sender's deltas from `base` can't be applied, with the fix; empty: they can."""
        named = None if self.base is None else self.base.named.model_dump()
        if self.base is None or base != named:
            return (
                f"the sender's deltas are based on {_describe_base(base)}, the stage names "
                f"{_describe_base(named)}: stage with the sender's base"
            )
        if self.base.layout_id != layout.layout_id:
            return f"the base has the layout {self.base.layout_id}: send all bytes"
        return ""

    def apply_delta(
        self, memory: Memory, layout: PushLayout, begin: int, end: int, content: bytes
    ) -> None:
        """Make a run of the version from the base and the delta.

        Raises:
            DeltaError: There is nothing to apply it to, or it is not a delta of this run.
        """
        if self.base is None:
            raise DeltaError("this worker has no base")
        if self.base.layout_id != layout.layout_id:
            raise DeltaError(f"the base has the layout {self.base.layout_id}")
        untouched, delta = begin not in self._written, Delta(end - begin, content)
        self._written.add(begin)
        self.base.renew(memory, begin, delta, untouched=untouched)
        self.by_offset[begin] = delta

    def find_deltas(self, base: object, layout: PushLayout) -> Callable[[int], bytes | None] | None:
        """Return what gives another worker with this base the delta of a piece; None: the bases differ."""
        if self.base is None or base != self.base.named.root_hash:
            return None

        def find_delta(piece: int) -> bytes | None:
            delta = self.by_offset.get(layout.pieces.span(piece)[0])
            return None if delta is None else delta.content

        return find_delta

    def make_patch(self, nbytes: int) -> DeltaPatch | None:
        """Return the deltas of a version of this size; None: they are too large to keep, or the version has no base."""
        size = sum(len(each.content) for each in self.by_offset.values())
        if self.base is None or size > PATCH_SHARE * nbytes:
            return None
        return DeltaPatch(self.base.named.root_hash, self.by_offset)


def _describe_base(base: object) -> str:
    """Return a base as a short text, even if the sender named nonsense."""
    if not isinstance(base, Mapping):
        return "none" if base is None else "no version"
    epoch, version, root = (str(base.get(key))[:64] for key in ("epoch", "version", "root_hash"))
    return f"({epoch}, {version}) with root_hash {root}"
