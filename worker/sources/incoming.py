"""One pushed version on its way into this worker: what is there of it, and who waits for what.

Threads of connections bring layout, memory and bytes; the thread that fills the slot follows and
hashes; threads that pass it on follow, too. It ends once: staged, or failed with a reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rollout_worker.engine import EngineError, Entry, TensorSpec, WeightsRejected
from rollout_worker.schemas import PushedBytes, WeightsId
from rollout_worker.transfer.arena import ArenaError, Slot, map_readonly
from rollout_worker.transfer.frames import CHUNK_BYTES, LEASE_SECONDS, Connection
from rollout_worker.transfer.layout import PushLayout
from rollout_worker.weights import HASH

from .files import ReadCancelled

RESUME_SECONDS = 10.0
"""How long a transfer whose connection is gone waits for the next hop's."""
TAKEOVER_SECONDS = 2.5
"""Silence after which a second connection with the same ticket is the next hop's, and no replay."""
LEAVE_SECONDS = 10.0
"""What the thread of a former connection gets to notice that it is one."""
LOOK_SECONDS = 0.2
"""How often a thread that waits looks whether its work was given up."""

Claim = Callable[[int], Callable[[], None]]
"""As `Staging.claim`."""


class Refusal(Exception):
    """What the other end is told in `ERROR`: slug, detail, and the tensor at fault."""

    def __init__(self, slug: str, detail: str, tensor: str | None = None) -> None:
        super().__init__(detail)
        self.slug = slug
        self.tensor = tensor


class TransferFailed(EngineError):
    """The bytes did not arrive; the text says why and what to do."""


class Memory:
    """The bytes of one version: memory of this process, or the trainer's, as long as anybody holds it.

    Args:
        size: Bytes.
        handle: Descriptor of the trainer's, closed here; None: memory of our own.

    Raises:
        ArenaError: There is no room, or the trainer's memory can't be relied on.
    """

    def __init__(self, size: int, handle: int | None = None) -> None:
        self.size = size
        self.own = handle is None
        self.freed = threading.Event()
        """Set once nobody holds it."""
        self._lock = threading.Lock()
        self._holders = 0
        if handle is None:
            slot = Slot(size)
            self.handle, self._view = slot.handle, slot.bytes(0, slot.size)
            self._close = slot.close
            return
        try:
            mapped = map_readonly(handle, size)
        except BaseException:
            os.close(handle)
            raise
        self.handle, self._view = handle, memoryview(mapped)

        def close() -> None:
            with contextlib.suppress(BufferError):
                mapped.close()
            os.close(handle)

        self._close = close

    def bytes(self, begin: int, end: int) -> memoryview:
        """Return a run of it."""
        return self._view[begin:end]

    def hold(self) -> Callable[[], None]:
        """Keep it until what is returned is called; that is idempotent, from any thread."""
        with self._lock:
            if self.freed.is_set():
                raise TransferFailed("the bytes are gone: stage again")
            self._holders += 1
        held = [True]

        def release() -> None:
            with self._lock:
                if not held:
                    return
                held.clear()
                self._holders -= 1
                if self._holders:
                    return
                self.freed.set()
            with contextlib.suppress(BufferError):
                self._view.release()
            self._close()

        return release


@dataclass(frozen=True, slots=True)
class End:
    """What the sender says that everything hashes to."""

    root_hash: str
    digests: Mapping[str, str]


class Incoming:
    """See the module.

    Args:
        identity: Of the version.
        wanted: What the stage said of it.
        check: Refuses tensors that aren't the model's (`WeightsRejected`).
        claim: Charges memory of our own.
    """

    def __init__(
        self,
        identity: WeightsId,
        wanted: PushedBytes,
        check: Callable[[Sequence[Entry]], None],
        claim: Claim,
    ) -> None:
        self.identity = identity
        self._wanted, self._check, self._claim = wanted, check, claim
        self._state = threading.Condition()
        self.layout: PushLayout | None = None
        self.memory: Memory | None = None
        self.end: End | None = None
        self.root_hash: str | None = None
        """Set once it is staged."""
        self.failure: str | None = None
        self.tensor: str | None = None
        self._done = bytearray()
        self._upto = 0
        self._connections: list[Connection] = []
        self._lost = time.monotonic()
        self._lease = LEASE_SECONDS
        self._why = f"no sender came within {LEASE_SECONDS:g} s"
        self._release: Callable[[], None] = _nothing
        self.give_back: Callable[[], None] = _nothing
        """Takes what it was charged for off the budget of staged weights; idempotent."""
        self._loop = asyncio.get_running_loop()
        self._opened = asyncio.Event()

    # What the slot's task asks.

    async def opened(self) -> Arrived:
        """Return the version as a source, once layout and memory are there.

        Raises:
            TransferFailed: It never came.
        """
        while self.memory is None and self.failure is None:
            left = self._left()
            if left <= 0:
                self.fail(f"{self._why}: stage again")
                break
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._opened.wait(), min(left, 1.0))
        if self.failure is not None or self.layout is None or self.memory is None:
            raise TransferFailed(self.failure or "it was given up")
        return Arrived(self, self.layout, self.memory)

    def succeed(self, root_hash: str) -> None:
        """Note that it is staged; whoever waits tells the other ends."""
        with self._state:
            self.root_hash = root_hash
            self._state.notify_all()

    def fail(self, why: str, tensor: str | None = None) -> None:
        """Give it up, for the first reason that is told; a staged one ends, too."""
        with self._state:
            if self.failure is None:
                self.failure, self.tensor = why, tensor
            self._state.notify_all()
        with contextlib.suppress(RuntimeError):  # the loop may have ended before us
            self._loop.call_soon_threadsafe(self._opened.set)

    def close(self, why: str) -> None:
        """Give up the bytes, and whatever goes on with them."""
        self.fail(why)
        with self._state:
            release, self._release = self._release, _nothing
        release()
        self.give_back()

    @property
    def fetched(self) -> bool:
        """Whether it comes from peers."""
        return bool(self._wanted.peers)

    def hand_over(self) -> Callable[[], None]:
        """Give up the hold of staged bytes that serve now, and count them as staged no more."""
        with self._state:
            release, self._release = self._release, _nothing
        self.give_back()
        return release

    @property
    def chunks(self) -> int:
        """How many chunks are there and verified, or final in shared memory."""
        with self._state:
            if self.memory is None or self.layout is None:
                return 0
            if self.memory.own:
                return self._done.count(1)
            return -(-self._upto // CHUNK_BYTES)

    # What connections bring.

    def attach(self, connection: Connection) -> None:
        """Take over from a connection that is gone, or as good as gone.

        Raises:
            Refusal: The ticket is used up.
        """
        with self._state:
            lent = self.memory is not None and not self.memory.own
            # The former one may be about to notice that its other end is gone.
            self._state.wait_for(lambda: not self._connections or self.over, TAKEOVER_SECONDS)
            now, former = time.monotonic(), list(self._connections)
            if (
                self.over
                or lent
                or any(now - each.tally.heard < TAKEOVER_SECONDS for each in former)
            ):
                raise Refusal("bad-ticket", "the ticket is used: stage again for another one")
            self._connections.append(connection)
            for each in former:
                each.interrupt()
            gone = self._state.wait_for(
                lambda: not any(each in self._connections for each in former), LEAVE_SECONDS
            )
            if not gone:
                self._connections.remove(connection)
                raise Refusal("bad-ticket", "the former connection does not end: stage again")

    def detach(self, connection: Connection, why: str) -> None:
        """Note that a connection has ended; without another one it is the end after a while."""
        with self._state:
            if connection not in self._connections:
                return
            self._connections.remove(connection)
            self._lost, self._why = time.monotonic(), why
            self._lease = RESUME_SECONDS if self.memory is None or self.memory.own else 0.0
            self._state.notify_all()

    def begin(self, layout: PushLayout) -> list[tuple[int, int]]:
        """Accept what is to come; returns which ranges of it are there from a former connection.

        Raises:
            Refusal: It is not what the stage announced, or not this model's.
        """
        wanted = self._wanted
        if wanted.layout_id not in (None, layout.layout_id):
            why = f"the layout is {layout.layout_id}, the stage announced {wanted.layout_id}"
            raise Refusal("wrong-layout", why)
        if wanted.bytes not in (None, layout.nbytes):
            why = f"{layout.nbytes} bytes would come, the stage announced {wanted.bytes}"
            raise Refusal("wrong-layout", why)
        with self._state:
            known = self.layout
        if known is not None:
            if known.layout_id != layout.layout_id:
                raise Refusal("wrong-layout", f"{known.layout_id} has begun to arrive")
            return self._have()
        try:
            self._check(entries_of(layout))
        except WeightsRejected as error:
            raise Refusal("weights-rejected", str(error), error.tensor) from error
        with self._state:
            self.layout = layout
            self._done = bytearray(-(-layout.nbytes // CHUNK_BYTES))
        return []

    def _have(self) -> list[tuple[int, int]]:
        """Return the ranges that are there and verified."""
        with self._state:
            assert self.layout is not None
            done, size, found = bytes(self._done), self.layout.nbytes, []
        at = done.find(1)
        while at >= 0:
            after = done.find(0, at)
            after = len(done) if after < 0 else after
            found.append((at * CHUNK_BYTES, min(after * CHUNK_BYTES, size)))
            at = done.find(1, after)
        return found

    def take_room(self) -> Memory:
        """Return memory of our own for it, which stays from one connection to the next.

        Raises:
            Refusal: There is no room.
        """
        assert self.layout is not None
        if self.memory is not None:
            return self.memory
        try:
            give_back = self._claim(self.layout.nbytes)
            try:
                memory = Memory(max(self.layout.nbytes, 1))
            except BaseException:
                give_back()
                raise
        except (EngineError, ArenaError) as error:
            raise Refusal("no-room", str(error)) from error
        self.lay(memory, give_back)
        return memory

    def lay(self, memory: Memory, give_back: Callable[[], None] = lambda: None) -> None:
        """Note where the bytes will be.

        Raises:
            Refusal: It was given up meanwhile.
        """
        release = memory.hold()
        with self._state:
            late = self.failure is not None or self.memory is not None
            if not late:
                self.memory, self._release, self.give_back = memory, release, give_back
        if late:
            release()
            give_back()
            raise Refusal("given-up", self.failure or "the memory is there already")
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._opened.set)

    def has(self, chunk: int) -> bool:
        """Whether this chunk is there."""
        return bool(self._done[chunk])

    def mark(self, chunk: int) -> None:
        """Note that a chunk is there and verified."""
        assert self.layout is not None
        with self._state:
            self._done[chunk] = 1
            first = self._upto // CHUNK_BYTES
            if chunk == first:
                gap = self._done.find(0, first)
                end = len(self._done) if gap < 0 else gap
                self._upto = min(end * CHUNK_BYTES, self.layout.nbytes)
                self._state.notify_all()

    def advance(self, upto: int) -> None:
        """Note that shared memory is final up to there."""
        with self._state:
            self._upto = max(self._upto, upto)
            self._state.notify_all()

    @property
    def upto(self) -> int:
        """Up to where it is there without a gap."""
        return self._upto

    @property
    def over(self) -> bool:
        """Whether it was staged or given up."""
        return self.root_hash is not None or self.failure is not None

    def finish(self, end: End) -> None:
        """Note what everything should hash to."""
        with self._state:
            self.end = self.end or end
            self._state.notify_all()

    # Who waits.

    def wait(self, until: Callable[[], bool], seconds: float) -> bool:
        """Wait until something is true, it fails, or the time has passed; returns whether it is true."""
        with self._state:
            self._state.wait_for(lambda: until() or self.failure is not None, seconds)
            return until()

    def follow(self, until: Callable[[], bool], cancelled: Callable[[], bool]) -> bool:
        """Wait until something is true; False: `cancelled` said so.

        Raises:
            TransferFailed: It will never be.
        """
        while not self.wait(until, LOOK_SECONDS):
            if self.failure is not None:
                raise TransferFailed(self.failure)
            if cancelled():
                return False
            if self._left() <= 0:
                self.fail(f"{self._why}: stage again")
        return True

    def _left(self) -> float:
        """Return the seconds that are left without a connection."""
        with self._state:
            if self._connections or self._wanted.peers:  # who fetches says when it can't
                return LEASE_SECONDS
            return self._lost + self._lease - time.monotonic()


class Arrived:
    """A version that has arrived, or does: a source as files are one (`files.Readable`)."""

    def __init__(self, incoming: Incoming, layout: PushLayout, memory: Memory) -> None:
        self.layout, self.memory = layout, memory
        self.entries = entries_of(layout)
        self._incoming = incoming
        self._cancelled: Callable[[], bool] = lambda: False

    @property
    def bytes_total(self) -> int:
        """Bytes of all tensors."""
        return sum(placed.nbytes for placed in self.layout.tensors)

    def chunks(
        self, entry: Entry, view: memoryview | None, cancelled: Callable[[], bool]
    ) -> Iterator[memoryview]:
        """See `Readable.chunks`: follows what arrives."""
        self._cancelled = cancelled
        placed, step = self.layout[entry.name], 4 * CHUNK_BYTES
        for begin in range(placed.start, placed.end, step):
            end = min(begin + step, placed.end)
            self._follow(lambda end=end: self._incoming.upto >= end)  # type: ignore[misc]
            yield from copied(self.memory.bytes(begin, end), view, begin - placed.start)

    def _follow(self, until: Callable[[], bool]) -> None:
        if not until() and not self._incoming.follow(until, self._cancelled):
            raise ReadCancelled

    def check(self, digests: Mapping[str, str], root: str) -> None:
        """See `Readable.check`: what the sender says at the end."""
        self._follow(lambda: self._incoming.end is not None)
        end = self._incoming.end
        assert end is not None
        for name, digest in digests.items():
            if end.digests.get(name) != digest:
                raise WeightsRejected(
                    f"tensor {name!r} arrived with {HASH} {digest}, its sender says "
                    f"{end.digests.get(name, 'nothing')}: publish again",
                    tensor=name,
                )
        if end.root_hash != root:
            raise WeightsRejected(
                f"what arrived has root_hash {root}, its sender says {end.root_hash}: publish again"
            )


def copied(part: memoryview, view: memoryview | None, begin: int) -> Iterator[memoryview]:
    """Yield a part where it is, or where it was copied to."""
    with part:
        if view is None:
            yield part
            return
        with view[begin : begin + len(part)] as there:
            there[:] = part
            yield there


def entries_of(layout: PushLayout) -> tuple[Entry, ...]:
    """Return the tensors of a layout."""
    return tuple(Entry(each.name, TensorSpec(each.dtype, each.shape)) for each in layout.tensors)


def _nothing() -> None:
    """Release nothing."""
