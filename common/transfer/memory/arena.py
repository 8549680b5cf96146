"""The memory of a trainer's versions: two slots, written in turn.

A slot is reused, since fresh pages cost more than the copy, and is written only when every receiver has returned it;
a receiver that never does costs a fresh slot, not a wait without a limit. A receiver that is silent or whose
connection broke has returned nothing: it may serve from those pages. Its slot is written again only once the
kernel says that no process has it (`nobody_has`).
"""

from __future__ import annotations

import threading

from rollout_common.transfer.settings import RETURN_SECONDS

from .mapped_memory import SharedMemoryError
from .page_locking import lock_pages as page_lock
from .slot import Lock, Release, Share, Slot

SLOTS = 2
"""The engines read one while the trainer writes the other."""

MOST_CONDEMNED = 4
"""How many slots may be out of use because a receiver that can't be asked any more still has them."""


class Arena:
    """The slots of a trainer; may be used by several threads.

    Args:
        lock: Locks their pages, for trainers whose tensors are on a GPU.
        share: As each `Slot` takes it.
    """

    def __init__(self, lock: Lock = page_lock, share: Share | None = None) -> None:
        self._page_lock, self._share = lock, share
        self.writable = False
        """Whether the slots that it gives are those that other processes may map to write."""
        self._lock = threading.Lock()
        self._slots: list[Slot] = []
        self._condemned: list[Slot] = []

    def take_slot(self, nbytes: int, expected: int | None = None) -> tuple[Slot, Release]:
        """Return a slot that nothing reads, and what to call once it is written and lent to its readers.

        Args:
            nbytes: Its size.
            expected: How many of its bytes will be written, if it is for this machine's processes alone: only their
                pages are allocated. None: all.

        Raises:
            SharedMemoryError: There is no room.
        """
        with self._lock:
            for slot in [each for each in self._condemned if not each.is_lent]:
                self._condemned.remove(slot)
                slot.close()
            if len(self._slots) >= SLOTS and all(slot.is_lent for slot in self._slots):
                # A receiver that has just switched to the newer slot is about to return this one.
                self._slots[0].wait_free(RETURN_SECONDS)
            for slot in self._slots:
                fits = slot.size >= max(nbytes, 1) and slot.writable == self.writable
                if fits and not slot.is_lent:
                    self._slots.remove(slot)
                    self._slots.append(slot)  # the one used longest ago comes first
                    return slot, slot.lend_slot()
            if len(self._slots) >= SLOTS:
                # A free slot that does not fit, else the one whose reader doesn't return it.
                gone = next((each for each in self._slots if not each.is_lent), self._slots[0])
                if gone.doubts:
                    self._condemn_slot(gone)
                else:
                    gone.close()
                self._slots.remove(gone)
            slot = Slot(
                *(nbytes, self._page_lock, self._share), expected=expected, writable=self.writable
            )
            self._slots.append(slot)
            return slot, slot.lend_slot()

    def _condemn_slot(self, slot: Slot) -> None:
        """Take a slot out of use; its pages stay until a later version finds that no process has them.

        Raises:
            SharedMemoryError: There are too many of them.
        """
        if len(self._condemned) >= MOST_CONDEMNED:
            names = ", ".join(sorted(set().union(*(each.doubts for each in self._condemned))))
            nbytes = sum(each.size for each in self._condemned)
            raise SharedMemoryError(
                f"{nbytes} bytes of {len(self._condemned)} former versions are still open in replicas whose"
                f" connection ended before they gave them back ({names}): restart those that are stopped or"
                " hang, or publish from a new process"
            )
        self._condemned.append(slot)

    @property
    def handles(self) -> tuple[int, ...]:
        """Descriptors of all its slots that are still used."""
        return tuple(slot.handle for slot in self._slots)

    @property
    def nbytes(self) -> int:
        """Memory of all its slots."""
        return sum(slot.size for slot in (*self._slots, *self._condemned))

    def close(self) -> None:
        """Free all slots; receivers keep what they have mapped."""
        with self._lock:
            slots = [*self._slots, *self._condemned]
            self._slots, self._condemned = [], []
        for slot in slots:
            slot.close()
