"""Keeps memory, layout and senders of a pool from one push of tensors to the next."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from rollout_common.transfer.layout import PushLayout
from rollout_common.transfer.memory.arena import Arena
from rollout_common.wire.adapters import ADAPTERS_PREFIX

from .options import PushPlan
from .push import Push, Ranks
from .push_deltas import PreviousVersion
from .push_tensors import Dtypes, Given, given
from .sending import Sender
from .stream_filling import Filling
from .tensor_copying import Copier

if TYPE_CHECKING:
    from rollout_client.steering.spool import Tensors


Begin = Callable[[Dtypes | None], Push]
"""Begins a push of tensors, whose floating-point ones are cast to these dtypes."""


class Pusher:
    """What a pool keeps from one push to the next: two slots of memory, the layout, connections."""

    def __init__(self) -> None:
        self._arena, self.copier = Arena(), Copier()
        self._lock = threading.Lock()
        self._known: PushLayout | None = None
        """The layout of the model's version that was published last."""
        self._before: PreviousVersion | None = None
        self._senders: list[Sender] = []

    def begin(self, tensors: Tensors, plan: PushPlan, dtypes: Dtypes | None = None) -> Push:
        """Return a push of these tensors; the caller fills, starts and closes it.

        Raises:
            LayoutError: A tensor can't be published; names it.
        """
        found = given(tensors)
        with self._lock:
            self._arena.writable = plan.transport == "nixl"
            filling = Filling(self._arena, self._known, self.copier, dtypes)
        return self.begin_filled(found, filling, plan)

    def begin_filled(
        self, found: Given, filling: Filling, plan: PushPlan, ranks: Ranks | None = None
    ) -> Push:
        """Return a push into this memory, of the tensors that were found or of what several ranks fill in."""
        if not plan.delta:
            self.forget()
        return Push(found, filling, plan, self._settled, ranks, self._before)

    def forget(self) -> None:
        """Release the previous version, so that the next one is sent with all of its bytes."""
        with self._lock:
            self._forget()

    def _forget(self) -> None:
        before, self._before = self._before, None
        if before is not None:
            before.close()

    def _settled(self, push: Push) -> None:
        """Take over the senders of a push: the memory that replicas read is freed with its last reader."""
        with self._lock:
            if push.published is not None:
                layout = push.filling.layout
                # A refused layout is not kept: the next stream may be a corrected one. Nor is that of adapters,
                # which says nothing about the model.
                if not any(each.name.startswith(ADAPTERS_PREFIX) for each in layout.tensors):
                    self._known = layout
                self._forget()
                if push.keeps:
                    root_hash = push.filling.root_hash
                    assert root_hash is not None, "it was published"
                    self._before = PreviousVersion.from_filling(
                        push.filling, push.published, root_hash
                    )
            alive = [sender for sender in self._senders if not sender.join(0)]
            self._senders = [*alive, *push.senders]

    def close(self) -> None:
        """Close all connections and free all memory; replicas keep what they have mapped."""
        with self._lock:
            senders, self._senders = self._senders, []
            self._forget()
        for sender in senders:
            sender.stop()
        self._arena.close()
