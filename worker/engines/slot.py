"""The staging slot of an adapter: one reading at a time, which a later one or a discard ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from rollout_worker import weights
from rollout_worker.engine import StagedInfo, WeightsRejected
from rollout_worker.schemas import WeightsId

T = TypeVar("T")


async def in_thread(work: Callable[[Callable[[], bool]], T], cancel: threading.Event) -> T:
    """Run `work(cancelled)` in a thread; a cancelled caller makes it give up."""
    future = asyncio.get_running_loop().run_in_executor(None, work, cancel.is_set)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        cancel.set()
        await asyncio.wait([future])
        if not future.cancelled():
            future.exception()  # looked at: a thread that gave up is no unheard error
        raise


class Content(Protocol):
    """A verified version beside the serving one."""

    @property
    def root_hash(self) -> str:
        """Content hash of its bytes."""
        ...

    @property
    def bytes_total(self) -> int:
        """How many bytes were read."""
        ...


C = TypeVar("C", bound=Content)


@dataclass(slots=True)
class _Turn(Generic[C]):
    """One stage: first a reading thread, then what it read."""

    identity: WeightsId
    cancel: threading.Event = field(default_factory=threading.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    content: C | None = None


class StagingSlot(Generic[C]):
    """See the module; used from one loop.

    Args:
        close: Frees a version that is not needed any more.
    """

    def __init__(self, close: Callable[[C], None] = lambda content: None) -> None:
        self._close = close
        self._turn: _Turn[C] | None = None

    @property
    def content(self) -> C | None:
        """What is staged, if the reading has ended."""
        return self._turn.content if self._turn else None

    async def fill(
        self, identity: WeightsId, read: Callable[[threading.Event], Awaitable[C]]
    ) -> StagedInfo:
        """Drop the former content and take what `read` returns.

        Raises:
            WeightsRejected: what `read` raised, or a discard or a later stage came in between.
        """
        while self._turn is not None:
            await self.discard()
        turn = self._turn = _Turn(identity)
        try:
            content = await read(turn.cancel)
            if self._turn is not turn:  # discarded just after the last look at `cancel`
                self._close(content)
                raise weights.ReadCancelled
            turn.content = content
        except weights.ReadCancelled:
            raise WeightsRejected(
                f"staging {identity} was given up: a discard or a later stage took its place"
            ) from None
        finally:
            turn.ended.set()
            if turn.content is None and self._turn is turn:
                self._turn = None
        return StagedInfo(content.root_hash, content.bytes_total)

    async def discard(self) -> None:
        """End a reading, drop what is staged."""
        turn, self._turn = self._turn, None
        if turn is not None:
            turn.cancel.set()
            await turn.ended.wait()
            if turn.content is not None:
                self._close(turn.content)
                turn.content = None

    def holds(self, identity: WeightsId) -> C:
        """Return the content staged under this identity.

        Raises:
            WeightsRejected: there is none.
        """
        turn = self._turn
        if turn is None or turn.identity != identity or turn.content is None:
            raise WeightsRejected(f"weights {identity} are not staged: stage them first")
        return turn.content

    def empty(self, content: C) -> None:
        """Forget content that serves now, without closing it; a later stage is left alone."""
        if self._turn is not None and self._turn.content is content:
            self._turn = None
