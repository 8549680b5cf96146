"""What NIXL reads from one holder: the pieces that were requested so, and those that are being read."""

from __future__ import annotations

import logging
from collections.abc import Collection, Coroutine
from typing import Any

from rollout_common.transfer.connections.frame_stream import FrameStream
from rollout_common.transfer.connections.frames import Frame
from rollout_common.transfer.connections.transfer_loop import TaskSet
from rollout_common.transfer.piece_server import NIXL

from .agent_handle import NixlFailed, find_nixl
from .piece_reading import RemoteMemory, piece_reader

logger = logging.getLogger(__name__)


class HolderReading:
    """The reads from one holder, on the transfer loop.

    Args:
        name: Of the holder, for the log.
        stream: The connection to it; a read that fails ends it.
    """

    def __init__(self, name: str, stream: FrameStream) -> None:
        self._name, self._stream = name, stream
        self.memory: RemoteMemory | None = None
        """Registered memory of the holder; None: it sends the bytes."""
        self.pieces: set[int] = set()
        """Pieces that are being read."""
        self._requested: set[int] = set()
        self._tasks = TaskSet()
        self.failure: Exception | None = None
        """Why it has ended the connection."""

    def take_memory(self, frame: Frame) -> None:
        """Note the memory that a `MEMORY` frame describes.

        Raises:
            Malformed: It describes none.
        """
        self.memory = RemoteMemory.from_frame(frame)
        if find_nixl() is None:
            self.memory.broken = "NIXL is not installed"

    def request_pieces(self, pieces: Collection[int]) -> dict[str, Any]:
        """Return what a `GET` of these pieces says of how their bytes come."""
        if self.memory is None or self.memory.broken is not None:
            return {}
        self._requested.update(pieces)
        return {"by": NIXL}

    def expects(self, piece: int) -> bool:
        """Whether the answer to a request may say that the piece can be read."""
        return piece in self._requested

    def settle_piece(self, piece: int) -> None:
        """Note that a piece was answered, in one way or another."""
        self._requested.discard(piece)
        self.pieces.discard(piece)

    def start_reading(self, piece: int, work: Coroutine[Any, Any, None]) -> None:
        """Run the work that reads a piece; an error of it ends the connection."""
        self.pieces.add(piece)
        self._tasks.start_task(self._run_reading(work))

    async def _run_reading(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:  # noqa: BLE001  # as one does while a payload is read
            self.failure = self.failure or error
            self._stream.interrupt()

    def note_failure(self, error: NixlFailed) -> None:
        """Log why the bytes come over the connection from now on."""
        logger.warning(
            "weights of %s come over TCP, since NIXL can't read them: %s", self._name, error
        )

    async def end_reading(self) -> None:
        """Wait for no more pieces. What is still being read comes to the ring, where nobody looks."""
        if self.memory is not None:
            piece_reader().drop_remote(self.memory)
        await self._tasks.end_tasks()
