"""The base of a delta: the version that serves, whose bytes are copied to the new memory run by run.

The memory for the new version often holds the version before the base. If the base came as a delta, too, both
deltas are applied to that memory, and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rollout_common.transfer.delta import DeltaError, apply_delta
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
