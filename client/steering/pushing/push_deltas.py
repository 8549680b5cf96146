"""The previous version, as long as this process has its bytes, and the deltas from it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rollout_common.transfer.delta import WORTH, encode_delta
from rollout_common.transfer.held_version import HeldVersion
from rollout_common.transfer.memory.mapped_memory import SharedMemoryError
from rollout_common.wire import Base, WeightsId

from .stream_filling import Filling


@dataclass(frozen=True, slots=True)
class PreviousVersion:
    """The version that serves, as long as this process has its bytes.

    Attributes:
        named: The version as workers name it.
        layout_id: Of its layout.
        memory: Its bytes: a mapping that stays valid after the slot is closed.
        give_back: Returns the slot, so that it may be written again; idempotent.
    """

    named: Base
    layout_id: str
    memory: memoryview
    give_back: Callable[[], None]

    @classmethod
    def from_filling(
        cls, filling: Filling, identity: WeightsId, root_hash: str
    ) -> PreviousVersion | None:
        """Keep what this process has of a published version; None: its memory is gone already."""
        layout = filling.layout
        give_back = filling.slot.lend_slot()
        try:
            memory = filling.slot.view_bytes(0, layout.nbytes)
        except SharedMemoryError:
            give_back()
            return None
        named = Base(epoch=identity.epoch, version=identity.version, root_hash=root_hash)
        return cls(named, layout.layout_id, memory, give_back)

    def view_bytes(self, begin: int, end: int) -> memoryview:
        """Return a view of a run of its bytes.

        Raises:
            SharedMemoryError: It was closed.
        """
        try:
            return self.memory[begin:end]
        except ValueError as error:
            raise SharedMemoryError(str(error)) from error

    def close(self) -> None:
        """Release it; a view that still exists keeps the pages until it is gone."""
        with contextlib.suppress(BufferError):
            self.memory.release()
        self.give_back()


class PieceDeltas:
    """The deltas from the previous version, which the receivers have, to the one that is held now.

    Each piece's is found when a replica first requests it, and kept.
    """

    def __init__(self, before: PreviousVersion, held: HeldVersion) -> None:
        self._before, self._held = before, held
        self._found: dict[int, bytes | None] = {}

    @property
    def base(self) -> dict[str, Any]:
        """The base of the deltas, as `LAYOUT` names it."""
        return self._before.named.model_dump()

    @property
    def has_deltas(self) -> bool:
        """Whether the delta of at least one piece was small enough to send."""
        return any(found is not None for found in self._found.values())

    def find_delta(self, piece: int) -> bytes | None:
        """Return the delta of a piece that is there; None: send all of its bytes."""
        if piece not in self._found:
            self._found[piece] = self._encode(piece)
        return self._found[piece]

    def _encode(self, piece: int) -> bytes | None:
        span = self._held.pieces.span(piece)
        try:
            with self._before.view_bytes(*span) as old, self._held.read_bytes(*span) as new:
                return encode_delta(old, new, WORTH)
        except SharedMemoryError:  # the pool or the previous version was closed
            return None
