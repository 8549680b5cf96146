"""What a delta is applied to: the version that serves, whose bytes are brought under it, run by run.

The memory for the new version often holds the one before the base, and how the base differs from that is
known if it came as a delta, too: then both deltas are applied, and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rollout_common.transfer.delta import DeltaError, apply
from rollout_common.wire import Base

from .pushed_memory import Memory

PATCH_SHARE = 1 / 16
"""Of a version's bytes: more than that of deltas isn't kept, since a copy of its base is as fast."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What came for a run of bytes."""

    nbytes: int
    content: bytes


@dataclass(frozen=True, slots=True)
class Patch:
    """How a version differs from the one before it, as far as it came as deltas.

    Attributes:
        root_hash: Of the version before.
        deltas: By the offset where each begins.
    """

    root_hash: str
    deltas: Mapping[int, Delta]


@dataclass(frozen=True, slots=True)
class Basis:
    """A version that serves, held until `release`.

    Attributes:
        named: As a stage names it.
        layout_id: Of its bytes, which the new version must share.
        memory: Where they are.
        release: Lets it go; idempotent.
        patch: How it came; None: as a whole.
    """

    named: Base
    layout_id: str
    memory: Memory
    release: Callable[[], None]
    patch: Patch | None = field(repr=False)

    def renew(self, memory: Memory, begin: int, delta: Delta, *, untouched: bool) -> None:
        """Bring a run of the base there, and apply what makes it new.

        Args:
            memory: Of the new version.
            begin: Of the run.
            delta: What makes it new.
            untouched: Whether the run is as the memory was taken.

        Raises:
            DeltaError: It is no delta of this run.
        """
        end = begin + delta.nbytes
        with memory.bytes(begin, end) as place:
            if not untouched or not self._renewed(memory, begin, place):
                with self.memory.bytes(begin, end) as old:
                    place[:] = old
            apply(delta.content, place)

    def _renewed(self, memory: Memory, begin: int, place: memoryview) -> bool:
        """Whether the run holds the version before, and was made the base by what is known of it."""
        patch = self.patch
        if patch is None or memory.held_before != patch.root_hash:
            return False
        known = patch.deltas.get(begin)
        if known is None or known.nbytes != len(place):
            return False
        try:
            apply(known.content, place)
        except DeltaError:  # it was applied once; whatever has become of it, the base is there
            return False
        return True
