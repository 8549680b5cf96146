"""What of an incoming version came as deltas from its base."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rollout_common.transfer.delta import DeltaError
from rollout_common.transfer.layout import PushLayout

from .delta_base import PATCH_SHARE, Delta, DeltaBase, DeltaPatch
from .pushed_memory import Memory


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
