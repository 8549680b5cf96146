"""What differs from the version before, found once, in a thread, as the new one comes into memory."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rollout_common.transfer.arena import ArenaError
from rollout_common.transfer.delta import SPAN_BYTES, WORTH, encode
from rollout_common.transfer.frames import CHUNK_BYTES
from rollout_common.wire import Base, WeightsId

from .stream_filling import Filling, GivenUp

logger = logging.getLogger(__name__)

WAIT_SECONDS = 1.0
"""How often a thread that waits for bytes looks whether they are still wanted."""

assert SPAN_BYTES % CHUNK_BYTES == 0, "a delta covers whole chunks"


@dataclass(frozen=True, slots=True)
class Before:
    """The version that serves, as long as this process has its bytes.

    Attributes:
        named: As workers know it.
        layout_id: Of its bytes.
        memory: Its bytes: pages that are read here stay, whatever becomes of the slot.
        give_back: Says that the slot may be written again; idempotent.
    """

    named: Base
    layout_id: str
    memory: memoryview
    give_back: Callable[[], None]

    @classmethod
    def of(cls, filling: Filling, identity: WeightsId) -> Before | None:
        """Keep what was published; None: it is gone already."""
        root_hash, layout = filling.root_hash, filling.layout
        assert root_hash is not None, "it was published"
        give_back = filling.slot.lend()
        try:
            memory = filling.slot.bytes(0, layout.nbytes)
        except ArenaError:
            give_back()
            return None
        named = Base(epoch=identity.epoch, version=identity.version, root_hash=root_hash)
        return cls(named, layout.layout_id, memory, give_back)

    def bytes(self, begin: int, end: int) -> memoryview:
        """Return a run of it.

        Raises:
            ArenaError: It was let go.
        """
        try:
            return self.memory[begin:end]
        except ValueError as error:
            raise ArenaError(str(error)) from error

    def close(self) -> None:
        """Let it go; who still reads a part of it keeps the pages until then."""
        with contextlib.suppress(BufferError):
            self.memory.release()
        self.give_back()


class Deltas:
    """See the module.

    Args:
        before: What the receivers have.
        filling: What they shall have.
    """

    def __init__(self, before: Before, filling: Filling) -> None:
        self._before, self._filling = before, filling
        self._news = threading.Condition()
        self._made: list[bytes | None] = []
        self._over = False
        self._thread = threading.Thread(target=self._run, name="weights-delta", daemon=True)

    @property
    def base(self) -> dict[str, Any]:
        """What they differ from, as `HELLO` names it."""
        return self._before.named.model_dump()

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """Look for nothing more; returns once that is so."""
        with self._news:
            self._over = True
            self._news.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    def ready(self, begin: int, seconds: float) -> bool:
        """Whether it is known, within these seconds, what to send for the span that begins there."""
        with self._news:
            return self._news.wait_for(
                lambda: self._over or len(self._made) > begin // SPAN_BYTES, seconds
            )

    def of(self, begin: int) -> bytes | None:
        """Return the delta of the span that begins there; None: its bytes are to be sent."""
        index = begin // SPAN_BYTES
        return self._made[index] if index < len(self._made) else None

    @property
    def any(self) -> bool:
        """Whether there is a span of which a delta was worth it."""
        return any(made is not None for made in self._made)

    def _run(self) -> None:
        try:
            total = self._filling.layout.nbytes
            for begin in range(0, total, SPAN_BYTES):
                if not self._find(begin, min(begin + SPAN_BYTES, total)):
                    break
        except (GivenUp, ArenaError):  # nobody fills it any more, or the pool was closed
            pass
        except Exception:  # what was not found is sent whole
            logger.exception("what differs from weights %s can't be found", self._before.named)
        finally:
            with self._news:
                self._over = True
                self._news.notify_all()

    def _find(self, begin: int, end: int) -> bool:
        """Find what differs in a span, once it is there; whether to go on."""
        while self._filling.wait_upto(end, WAIT_SECONDS) < end:
            if self._over:
                return False
        new = self._filling.slot.bytes(begin, end)
        made = encode(self._before.bytes(begin, end), new, WORTH)
        with self._news:
            self._made.append(made)
            self._news.notify_all()
            return not self._over
