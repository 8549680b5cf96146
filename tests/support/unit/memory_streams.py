"""Connections in memory with the interface of `FrameStream`, at any speed, which tests freeze, damage and cut."""

from __future__ import annotations

import asyncio
import gc
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping
from functools import partial, wraps
from typing import Any, cast

from rollout_common.transfer.connections.frame_stream import FrameStream
from rollout_common.transfer.connections.frames import (
    FIRST_BYTES,
    Ended,
    Frame,
    Kind,
    TransferError,
    check_kind,
    decode_head,
    encode_frame,
)
from rollout_common.transfer.connections.payload import Payload
from tests.support.unit import virtualtime

PART_BYTES = 64
"""How much of a payload is written at once."""
SCENE_SECONDS = 3600.0
"""Of virtual time: a scene that lasts longer has come to a stop."""
QUEUED_BYTES = 4096
"""Payloads that are on their way at most, as in the buffers of sockets."""


class MemoryStream:
    """One end.

    Attributes:
        rate: Bytes of payload a second that come here.
        frozen: While it is set, nothing comes here.
        spoil: Changes the payload of a frame that comes here.
        frames_left: After how many frames to come here the connection breaks; None: it doesn't.
        refusal: What `send` raises; None: nothing.
        sent: Kind and head of all that went out.
        bytes_sent: Bytes that the fetcher reads itself.
    """

    def __init__(self) -> None:
        self.rate = 1e6
        self.frozen = False
        self.spoil: Callable[[Frame, bytes], bytes] = lambda frame, payload: payload
        self.frames_left: int | None = None
        self.refusal: TransferError | None = None
        self.sent: list[tuple[Kind, Mapping[str, Any]]] = []
        self.other: MemoryStream
        self.bytes_sent = 0
        self.closed = False
        self._queue: deque[tuple[Frame, bytes]] = deque()
        self._payload = b""
        self._changed = asyncio.Event()

    async def send(
        self, kind: Kind, head: Mapping[str, Any] | None = None, payload: memoryview | bytes = b""
    ) -> None:
        """Send one frame, whole, once there is room for it."""
        text = encode_frame(kind, head or {}, len(payload))[FIRST_BYTES:]
        frame = Frame(kind, decode_head(kind, text), len(payload))
        if self.refusal is not None:
            raise self.refusal
        self.sent.append((kind, frame.head))
        await self._wait(lambda: not payload or self.other.queued <= QUEUED_BYTES)
        self.other._queue.append((frame, bytes(payload)))
        self._tell()

    @property
    def queued(self) -> int:
        """Bytes of payload that are still to be received here."""
        return sum(len(payload) for _, payload in self._queue)

    async def receive(self) -> Frame:
        await self._wait(lambda: self._queue and not self.frozen)
        if self.frames_left is not None:
            self.frames_left -= 1
            if self.frames_left < 0:
                self.interrupt()
                raise Ended("it broke")
        frame, payload = self._queue.popleft()
        self._payload = self.spoil(frame, payload)
        self._tell()
        return frame

    async def expect(self, *kinds: Kind) -> Frame:
        """Return the next frame, which must be of one of these kinds."""
        return check_kind(await self.receive(), *kinds)

    async def read_into(self, view: memoryview) -> None:
        """Fill a buffer with the payload, part by part."""
        await self.read_payload(Payload(view))

    async def read_payload(self, payload: Payload) -> bool:
        """Read the payload to its memory, part by part, until it is revoked."""

        def step(view: memoryview) -> int:
            part = self._payload[payload.count : payload.count + PART_BYTES]
            view[: len(part)] = part
            return len(part)

        while payload.is_moving:
            await asyncio.sleep(PART_BYTES / self.rate)
            await self._wait(lambda: not self.frozen)
            payload.move_some(step)
        return payload.count == payload.size

    async def skip(self, frame: Frame) -> None:
        """Drop the payload."""

    def interrupt(self) -> None:
        """End it for both ends."""
        self.closed = self.other.closed = True
        self._tell()

    def thaw(self) -> None:
        """Let things come again."""
        self.frozen = False
        self._tell()

    def _tell(self) -> None:
        for end in (self, self.other):
            end._changed.set()

    async def _wait(self, until: Callable[[], object]) -> None:
        while not self.closed and not until():
            self._changed.clear()
            await self._changed.wait()
        if self.closed:
            raise Ended("the other end has closed the connection")


def memory_pair() -> tuple[MemoryStream, MemoryStream]:
    """Both ends of a connection."""
    ours, theirs = MemoryStream(), MemoryStream()
    ours.other, theirs.other = theirs, ours
    return ours, theirs


def play(scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a scene in virtual time; no task of it may fail unseen."""
    unseen: list[Mapping[str, Any]] = []

    async def whole(clock: Callable[[], float]) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: unseen.append(context))
        async with asyncio.timeout(SCENE_SECONDS):
            await scene()
        gc.collect(0)

    gc.disable()  # so that all that the scene makes is young: to look at everything takes longer than a scene
    try:
        virtualtime.run(whole)
    finally:
        gc.enable()
    assert not unseen, unseen


def played(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a whole test in virtual time."""

    @wraps(test)
    def run(**given: Any) -> None:
        play(partial(test, **given))

    return run


def as_stream(end: MemoryStream) -> FrameStream:
    """For code that takes streams."""
    return cast(FrameStream, end)


def heads_of(end: MemoryStream, kind: Kind) -> Iterator[Mapping[str, Any]]:
    """The heads of what went out of this kind."""
    return (head for sent, head in end.sent if sent is kind)
