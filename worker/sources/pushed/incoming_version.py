"""One pushed version that arrives at this worker: which bytes are there, and how it ends.

Connections bring layout, memory and bytes, on the transfer loop; the threads that fill the slot follow and hash. It
ends once: staged, or failed with a reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from typing_extensions import override

from rollout_common.transfer.connections.frame_stream import FrameStream
from rollout_common.transfer.connections.transfer_loop import transfer_loop
from rollout_common.transfer.delta import DeltaError
from rollout_common.transfer.held_version import HeldVersion
from rollout_common.transfer.layout import PushLayout
from rollout_common.transfer.memory.mapped_memory import SharedMemoryError
from rollout_common.transfer.piece_fetcher import PieceStore
from rollout_common.transfer.settings import LEASE_SECONDS
from rollout_common.wire import PushedBytes, WeightsId
from rollout_worker.engine import EngineError, TensorEntry, WeightsRejected
from rollout_worker.sources.settings import (
    FOLLOW_LOOK_SECONDS,
    RESUME_SECONDS,
)

from .arrived_deltas import ArrivedDeltas, DeltaBase
from .arrived_version import ArrivedVersion, entries_of
from .pushed_memory import Memory, Refusal, TransferFailed

Room = Callable[[int], tuple[Memory, Callable[[], None]]]
"""Takes a size; returns memory of this process, and what removes it from the budget of staged weights."""


class IncomingVersion(PieceStore):
    """One version that arrives; any thread may read its state, the transfer loop writes it.

    Args:
        identity: Of the version.
        wanted: What the stage announced.
        check: Refuses tensors that aren't the model's (`WeightsRejected`).
        room: Takes memory of this process.
        base: The version that deltas are applied to; None: all bytes have to come.
        unread: Returns which tensors this worker does not need; it doesn't wait for their bytes.
        free_soon: Calls what frees the bytes, best in a thread: gigabytes take a tenth of a second.
    """

    is_reported = False
    """Whether its trainer was told the outcome."""

    def __init__(
        self,
        identity: WeightsId,
        wanted: PushedBytes,
        check: Callable[[Sequence[TensorEntry]], None],
        room: Room,
        base: DeltaBase | None = None,
        unread: Callable[[Sequence[TensorEntry]], frozenset[str]] = lambda entries: frozenset(),
        free_soon: Callable[[Callable[[], object]], object] = lambda free: free(),
    ) -> None:
        self.identity = identity
        self._wanted, self._check, self._room, self._unread = wanted, check, room, unread
        self._free_soon = free_soon
        self.deltas = ArrivedDeltas(base)
        self._state = threading.Condition()
        self.held: HeldVersion | None = None
        """The pieces that are here; None: the layout is unknown so far."""
        self.by_nixl = False
        """Whether its trainer wants workers to read the bytes by NIXL, also from each other."""
        self.memory: Memory | None = None
        self.left_out: frozenset[str] = frozenset()
        """The names of the tensors that this worker does not need, once the layout is there."""
        self.unneeded = bytearray()
        """By piece: 1 if it has only bytes of `left_out` tensors."""
        self.root_hash: str | None = None
        """Set once it is staged."""
        self.staged_at = math.inf
        """When it was staged, on the monotonic clock."""
        self.failure: str | None = None
        self.tensor: str | None = None
        self._shared_upto = 0
        self.streams: list[FrameStream] = []
        """The trainer's connections, one but for a change of them."""
        self.peer_count = 0
        """How many holders other than the sender it is fetched from."""
        self._lost = time.monotonic()
        self._lease = LEASE_SECONDS
        self._why = f"no sender came within {LEASE_SECONDS:g} s"
        self.tried = ""
        """What became of a caller without a ticket, for the reason of a failure."""
        self._release: Callable[[], None] = lambda: None
        self.give_back: Callable[[], None] = lambda: None
        """Removes its memory from the budget of staged weights; idempotent."""
        self._loop = asyncio.get_running_loop()
        self._opened = asyncio.Event()
        self._change = asyncio.Event()
        """Set, for the transfer loop, when connections come or go, memory is there, or the version is over."""
        self.on_over: list[Callable[[], None]] = []
        """Called, from any thread, once it is staged or has failed."""

    # For the slot's task.

    async def opened(self) -> ArrivedVersion:
        """Return the version as a source, once layout and memory are there.

        Raises:
            TransferFailed: It did not come.
        """
        while self.memory is None and self.failure is None:
            left = self._seconds_left()
            if left <= 0:
                self.fail(self._explain_absence())
                break
            # Not `wait_for`, which before Python 3.12 loses a cancellation that comes with the result.
            self._opened.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left, FOLLOW_LOOK_SECONDS)):
                    await self._opened.wait()
        if self.failure is not None or self.held is None or self.memory is None:
            raise TransferFailed(self.failure or "it was given up")
        return ArrivedVersion(self, self.held, self.memory)

    def succeed(self, root_hash: str) -> None:
        """Note that it is staged; the connections report that to the other ends."""
        with self._state:
            self.root_hash, self.staged_at = root_hash, time.monotonic()
            if self.memory is not None:
                self.memory.note_verified(root_hash)
        self._note_over()

    def fail(self, why: str, tensor: str | None = None) -> None:
        """End it with a failure; only the first reason counts. A staged version ends, too."""
        with self._state:
            if self.failure is None:
                self.failure, self.tensor = why, tensor
            held = self.held
        if held is not None:
            held.fail(why)
        self._note_over()

    def _note_over(self) -> None:
        self._note_change()
        for listener in self.on_over:
            listener()

    def close(self, why: str) -> None:
        """Free the bytes, perhaps a little later, and end all work on them."""
        self.fail(why)
        self._free_soon(lambda: self.hand_over()())

    def hand_over(self) -> Callable[[], None]:
        """Remove bytes that serve now from the staged ones; return what ends the hold on them."""
        with self._state:
            release, self._release = self._release, lambda: None
        if self.deltas.base is not None:
            self.deltas.base.release()
        self.give_back()
        return release

    @property
    def fetched(self) -> bool:
        """Whether it comes from peers."""
        return bool(self._wanted.peers)

    @property
    def chunks(self) -> int:
        """How many pieces are there and verified."""
        return 0 if self.held is None else self.held.piece_count

    @property
    def nbytes_left_out(self) -> int:
        """Bytes of the pieces that are not fetched."""
        pieces = self.unneeded
        assert self.held is not None
        return sum(self.held.pieces.nbytes_of(each) for each in range(len(pieces)) if pieces[each])

    @property
    def over(self) -> bool:
        """Whether it was staged or has failed."""
        return self.root_hash is not None or self.failure is not None

    @property
    def takes_trainer(self) -> bool:
        """Whether its trainer may connect: until it is over, and to learn that it is staged if no connection has said so.

        Other workers may bring the rest while the trainer connects again.
        """
        return not self.over or (self.root_hash is not None and not self.is_reported)

    # What connections bring, on the transfer loop.

    async def wait_change(self, until: Callable[[], bool], seconds: float) -> bool:
        """Wait, on the transfer loop, until `until` is true or the time has passed; return whether it is true."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not until():
                    self._change.clear()
                    await self._change.wait()
        return until()

    def _note_change(self) -> None:
        """Wake all that wait: threads, tasks of the transfer loop, and the slot's task."""
        self.wake_followers()
        transfer_loop().call_soon_threadsafe(self._change.set)
        with contextlib.suppress(RuntimeError):  # the loop may have ended already
            self._loop.call_soon_threadsafe(self._opened.set)

    def detach(self, stream: FrameStream, why: str) -> None:
        """Note that a connection has ended; unless another one comes in time, the version fails."""
        with self._state:
            if stream not in self.streams:
                return
            self.streams.remove(stream)
            self._lost, self._why = time.monotonic(), why
            self._lease = RESUME_SECONDS if self.memory is None or self.memory.own else 0.0
        self._note_change()

    def begin(self, layout: PushLayout) -> HeldVersion:
        """Accept a layout; return the table of its pieces, with those that a former connection brought.

        Raises:
            Refusal: It is not what the stage announced, or not this model's.
        """
        wanted = self._wanted
        if wanted.layout_id not in (None, layout.layout_id):
            why = f"the layout is {layout.layout_id}, the stage announced {wanted.layout_id}"
            raise Refusal("wrong-layout", why)
        if wanted.bytes not in (None, layout.nbytes):
            why = f"the sender has {layout.nbytes} bytes, the stage announced {wanted.bytes}: stage again"
            raise Refusal("wrong-layout", why)
        if self.held is not None:
            if self.held.layout.layout_id != layout.layout_id:
                why = f"layout {self.held.layout.layout_id} is already arriving: stage again"
                raise Refusal("wrong-layout", why)
            return self.held
        entries = entries_of(layout)
        try:
            self._check(entries)
        except WeightsRejected as error:
            raise Refusal("weights-rejected", str(error), error.tensor) from error
        self.left_out = self._unread(entries)
        if self.left_out:
            self.unneeded = bytearray(b"\1" * len(layout.pieces))
            needed = [each for each in layout.tensors if each.name not in self.left_out]
            for piece in layout.pieces.pieces_of(needed):
                self.unneeded[piece] = 0
        held = HeldVersion(layout, self._read_bytes)
        held.subscribe(self.wake_followers)
        self.held = held
        return held

    def _read_bytes(self, begin: int, end: int) -> memoryview:
        assert self.memory is not None, "nothing is there before it"
        return self.memory.view_bytes(begin, end)

    def take_room(self) -> Memory:
        """Return memory of this process for it, which stays from one connection to the next; may block.

        Raises:
            Refusal: There is no room.
            TransferFailed: The version is over.
        """
        assert self.held is not None
        if self.memory is not None:
            return self.memory
        try:
            memory, give_back = self._room(self.held.layout.nbytes)
        except (EngineError, SharedMemoryError) as error:
            raise Refusal("no-room", str(error)) from error
        self.lay(memory, give_back)
        return memory

    def lay(self, memory: Memory, give_back: Callable[[], None] = lambda: None) -> None:
        """Note the memory where the bytes will be.

        Raises:
            Refusal: It has memory already.
            TransferFailed: The version is over. Its trainer learns why, as if it had ended a moment later.
        """
        release = memory.add_hold()
        with self._state:
            failure = self.failure
            late = failure is not None or self.memory is not None
            if not late:
                self.memory, self._release, self.give_back = memory, release, give_back
        if late:
            release()
            give_back()
            if failure is not None:
                raise TransferFailed(failure)
            raise Refusal("given-up", "the memory is there already")
        self._note_change()

    @contextlib.contextmanager
    def hold_memory(self) -> Iterator[None]:
        """Keep the memory, and the base's, while pieces are written: a slot that ends would free it for reuse.

        Raises:
            TransferFailed: They are gone.
        """
        base = self.deltas.base
        with contextlib.ExitStack() as held:
            for memory in (self.memory, None if base is None else base.memory):
                if memory is not None:
                    held.callback(memory.add_hold())
            yield

    @override
    def writable(self, begin: int, end: int) -> memoryview:
        assert self.memory is not None
        self.deltas.note_writing(begin)
        return self.memory.writable(begin, end)

    @override
    def commit_run(self, begin: int, content: memoryview, *, in_place: bool) -> None:
        assert self.memory is not None
        self.memory.commit_run(begin, content, in_place=in_place)
        self.deltas.drop_delta(begin)

    @override
    def apply_delta(self, piece: int, begin: int, end: int, delta: bytes) -> memoryview:
        if self.memory is None or self.held is None:
            raise DeltaError(f"piece {piece} came as a delta before there was memory for it")
        self.deltas.apply_delta(self.memory, self.held.layout, begin, end, delta)
        return self.memory.view_bytes(begin, end)

    # Shared memory.

    def advance(self, upto: int) -> None:
        """Note that shared memory is final up to there."""
        self._shared_upto = max(self._shared_upto, upto)
        self.wake_followers()

    def is_there(self, piece: int, end: int) -> bool:
        """Whether a piece with this end may be read."""
        if self.memory is None or self.held is None:
            return False
        return self.held.has(piece) if self.memory.own else self._shared_upto >= end

    @property
    def nbytes_there(self) -> int:
        """How many bytes may be read."""
        if self.memory is None or self.held is None:
            return 0
        if not self.memory.own:
            return self._shared_upto
        return self.held.layout.nbytes if self.held.is_complete else self.held.nbytes_held

    # For the threads that wait.

    def follow(self, until: Callable[[], bool], cancelled: Callable[[], bool]) -> bool:
        """Wait until `until` is true; return False once `cancelled` returns True.

        Raises:
            TransferFailed: The version failed first.
        """
        while True:
            with self._state:
                self._state.wait_for(
                    lambda: until() or self.failure is not None, FOLLOW_LOOK_SECONDS
                )
                if until():
                    return True
            if self.failure is not None:
                raise TransferFailed(self.failure)
            if cancelled():
                return False
            if self._seconds_left() <= 0:
                self.fail(self._explain_absence())

    def wake_followers(self) -> None:
        """Make the threads that wait check their conditions again."""
        with self._state:
            self._state.notify_all()

    def turned_away(self, why: str) -> None:
        """Note why a caller was refused before it showed a ticket, perhaps the ticket of this version."""
        with self._state:
            self.tried = f"; one that tried was turned away: {why}"

    def _explain_absence(self) -> str:
        return f"{self._why}{self.tried}: stage again"

    def _seconds_left(self) -> float:
        """Return the seconds that are left without a sender."""
        with self._state:
            # A fetcher ends the version itself when it can't continue.
            if self.streams or self._wanted.peers:
                return LEASE_SECONDS
            since = self._lost
            if self.peer_count and self.held is not None and self.held.said is not None:
                # Other replicas may have the rest, so wait for as long as pieces come from them.
                since = max(since, self.held.marked_at)
            return since + self._lease - time.monotonic()
