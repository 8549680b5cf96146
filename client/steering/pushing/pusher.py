"""What a pool keeps from one push of tensors to the next: memory, the layout, connections."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from rollout_common.transfer.arena import Arena
from rollout_common.transfer.layout import PushLayout

from .copying import Copier
from .deltas import Before
from .push_tensors import Dtypes, Given, given
from .routes import Transport
from .sending import Sender
from .stream_filling import Filling

if TYPE_CHECKING:
    from rollout_client.steering.spool import Tensors
from .push import Push


class Begin(Protocol):
    """Begins a push."""

    def __call__(self, *, dtypes: Dtypes | None) -> Push:
        """Return it, to be filled, carried and closed; `dtypes`: what floating-point tensors are cast to."""


class Pusher:
    """What a pool keeps from one push to the next: two slots of memory, the layout, connections."""

    def __init__(self) -> None:
        self._arena, self.copier = Arena(), Copier()
        self._lock = threading.Lock()
        self._known: PushLayout | None = None
        """Of what was published last."""
        self._before: Before | None = None
        self._senders: list[Sender] = []

    def begin(
        self,
        tensors: Tensors,
        transport: Transport = "auto",
        rate: float | None = None,
        *,
        delta: bool = False,
        dtypes: Dtypes | None = None,
    ) -> Push:
        """Return a push of these tensors, which is to be filled, carried and closed.

        Args:
            tensors: The new version.
            transport: Which ways may be used.
            rate: Most bytes a second over TCP; None: no limit.
            delta: Whether what differs from the last one may go instead; else nothing is kept of it.
            dtypes: What floating-point tensors are cast to.

        Raises:
            LayoutError: Something can't be published; names the tensor.
        """
        found = given(tensors)
        with self._lock:
            filling = Filling(self._arena, self._known, self.copier, dtypes)
        before = self._base(delta)
        return Push(found, filling, transport, self._settled, rate, before=before, delta=delta)

    def _base(self, delta: bool) -> Before | None:
        """Return what a push may differ from; without `delta` it is let go."""
        if not delta:
            self.forget()
        return self._before

    def forget(self) -> None:
        """Let the version before go: the next one goes out as all its bytes."""
        with self._lock:
            self._forget()

    def _forget(self) -> None:
        before, self._before = self._before, None
        if before is not None:
            before.close()

    def begin_filled(
        self,
        filling: Filling,
        fill: Callable[[], None],
        transport: Transport,
        rate: float | None = None,
        *,
        delta: bool = False,
    ) -> Push:
        """Return a push that this fills, as several ranks do."""
        found = Given((), None, at_rest=True)
        before = self._base(delta)
        return Push(
            found, filling, transport, self._settled, rate, fill, before=before, delta=delta
        )

    def _settled(self, push: Push) -> None:
        """Take over what a push leaves: memory that replicas read goes with its last reader."""
        with self._lock:
            if push.published is not None:
                # What was refused says nothing of the next stream: it may be the corrected one.
                self._known = push.filling.layout
                self._forget()
                if push.keeps:
                    self._before = Before.of(push.filling, push.published)
            alive = [sender for sender in self._senders if not sender.join(0)]
            self._senders = [*alive, *push.senders]

    def close(self) -> None:
        """End all connections and give up all memory; replicas keep what they have mapped."""
        with self._lock:
            senders, self._senders = self._senders, []
            self._forget()
        for sender in senders:
            sender.stop()
        self._arena.close()
