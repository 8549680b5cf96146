"""One pushed version on its way into this worker: what is there, and who waits for what; whole, by its one lock.

Threads of connections bring layout, memory and bytes; the thread that fills the slot follows and
hashes; threads that pass it on follow, too. It ends once: staged, or failed with a reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from rollout_common.transfer.arena import ArenaError
from rollout_common.transfer.connection import Connection
from rollout_common.transfer.delta import DeltaError
from rollout_common.transfer.frames import CHUNK_BYTES, LEASE_SECONDS, Frame, Malformed
from rollout_common.transfer.layout import PushLayout
from rollout_common.wire import PushedBytes, WeightsId
from rollout_worker.engine import EngineError, TensorEntry, WeightsRejected

from .arrived import Arrived, entries_of
from .basis import PATCH_SHARE, Basis, Delta, Patch
from .pushed_memory import Memory, TransferFailed

RESUME_SECONDS = 10.0
"""How long a transfer whose connection is gone waits for the next hop's."""
TAKEOVER_SECONDS = 2.5
"""Silence after which a second connection with the same ticket is the next hop's, and no replay."""
LEAVE_SECONDS = 10.0
"""What the thread of a former connection gets to notice that it is one."""
LOOK_SECONDS = 0.2
"""How often a thread that waits looks whether its work was given up."""

Room = Callable[[int], tuple[Memory, Callable[[], None]]]
"""Takes memory of our own; returns it and what takes it off the budget of staged weights."""


class Refusal(Exception):
    """What the other end is told in `ERROR`: slug, detail, and the tensor at fault."""

    def __init__(self, slug: str, detail: str, tensor: str | None = None) -> None:
        super().__init__(detail)
        self.slug = slug
        self.tensor = tensor


@dataclass(frozen=True, slots=True)
class End:
    """What the sender says that everything hashes to."""

    root_hash: str
    digests: Mapping[str, str]


def end_of(frame: Frame, layout: PushLayout) -> End:
    """Return what a frame says that everything hashes to.

    Raises:
        Malformed: It doesn't name every tensor.
    """
    digests = frame.head.get("digests") or {}
    named = isinstance(digests, dict) and all(isinstance(each, str) for each in digests.values())
    if not named or set(digests) != {placed.name for placed in layout.tensors}:
        raise Malformed(f"{frame.kind.name} must have a hash for each tensor and for nothing else")
    return End(frame.text("root_hash", most=128), digests)


class Incoming:
    """See the module.

    Args:
        identity: Of the version.
        wanted: What the stage said of it.
        check: Refuses tensors that aren't the model's (`WeightsRejected`).
        room: Takes memory of our own.
        basis: What a delta of it is applied to; None: all bytes have to come.
        unread: Says which tensors nobody needs here; their bytes are not waited for.
    """

    def __init__(
        self,
        identity: WeightsId,
        wanted: PushedBytes,
        check: Callable[[Sequence[TensorEntry]], None],
        room: Room,
        basis: Basis | None = None,
        unread: Callable[[Sequence[TensorEntry]], frozenset[str]] = lambda entries: frozenset(),
    ) -> None:
        self.identity = identity
        self._unread = unread
        self.left_out: frozenset[str] = frozenset()
        """The names of those tensors, once the layout is there."""
        self.chunks_left_out = 0
        """How many chunks hold nothing else."""
        self._wanted, self._check, self._room = wanted, check, room
        self.basis = basis
        self.deltas: dict[int, Delta] = {}
        """By offset: what came instead of whole bytes."""
        self._begun: set[int] = set()
        """Chunks that were written to, whatever came of it."""
        self._state = threading.Condition()
        self.layout: PushLayout | None = None
        self.memory: Memory | None = None
        self.end: End | None = None
        self.root_hash: str | None = None
        """Set once it is staged."""
        self.failure: str | None = None
        self.tensor: str | None = None
        self._done = bytearray()
        self._hashes: dict[int, str] = {}
        self._upto = 0
        self._connections: list[Connection] = []
        self._lost = time.monotonic()
        self._lease = LEASE_SECONDS
        self._why = f"no sender came within {LEASE_SECONDS:g} s"
        self._tried = ""
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
                self.fail(self._why_nobody())
                break
            # Not `wait_for`, which before Python 3.12 loses a cancellation beside what it waits for.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left, 1.0)):
                    await self._opened.wait()
        if self.failure is not None or self.layout is None or self.memory is None:
            raise TransferFailed(self.failure or "it was given up")
        return Arrived(self, self.layout, self.memory)

    def succeed(self, root_hash: str) -> None:
        """Note that it is staged; whoever waits tells the other ends."""
        with self._state:
            self.root_hash = root_hash
            if self.memory is not None:
                self.memory.verified(root_hash)
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
        self._let_base_go()
        self.give_back()

    def _let_base_go(self) -> None:
        if self.basis is not None:
            self.basis.release()

    @property
    def patch(self) -> Patch | None:
        """How it differs from its base, if that is little and known."""
        size = sum(len(each.content) for each in self.deltas.values())
        if self.basis is None or self.layout is None or size > PATCH_SHARE * self.layout.nbytes:
            return None
        return Patch(self.basis.named.root_hash, self.deltas)

    @property
    def fetched(self) -> bool:
        """Whether it comes from peers."""
        return bool(self._wanted.peers)

    def hand_over(self) -> Callable[[], None]:
        """Give up the hold of staged bytes that serve now, and count them as staged no more."""
        with self._state:
            release, self._release = self._release, _nothing
        self._let_base_go()
        self.give_back()
        return release

    @property
    def hashes(self) -> dict[int, str]:
        """By number of the chunk: what it was verified against; not of those that came as deltas, or are shared."""
        return self._hashes

    @property
    def chunks(self) -> int:
        """How many chunks are there and verified, or final in shared memory."""
        with self._state:
            if self.memory is None or self.layout is None:
                return 0
            if self.memory.own:
                return self._done.count(1) - self.chunks_left_out
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
            self._tried = ""
            for each in former:
                each.interrupt()
            gone = self._state.wait_for(
                lambda: not any(each in self._connections for each in former), LEAVE_SECONDS
            )
            if not gone:
                self._connections.remove(connection)
                raise Refusal("bad-ticket", "the previous connection has not ended: stage again")

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
            why = f"the sender has {layout.nbytes} bytes, the stage announced {wanted.bytes}: stage again"
            raise Refusal("wrong-layout", why)
        with self._state:
            known = self.layout
        if known is not None:
            if known.layout_id != layout.layout_id:
                why = f"layout {known.layout_id} is already arriving: stage again"
                raise Refusal("wrong-layout", why)
            return self._have()
        try:
            self._check(entries_of(layout))
        except WeightsRejected as error:
            raise Refusal("weights-rejected", str(error), error.tensor) from error
        left_out = self._unread(entries_of(layout))
        with self._state:
            self.layout, self.left_out = layout, left_out
            # What nobody needs counts as there: nobody asks for it, or waits for it.
            self._done = _without(layout, left_out)
            self.chunks_left_out = self._done.count(1)
            self._upto = self._front()
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
            memory, give_back = self._room(self.layout.nbytes)
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

    def rest_on(self, base: object) -> None:
        """See that a sender's deltas are of the base that the stage named.

        Raises:
            Refusal: They are of another one.
        """
        named = None if self.basis is None else self.basis.named.model_dump()
        if named is None or base != named:
            why = f"the sender's deltas are based on {_told(base)}, the stage names {_told(named)}"
            raise Refusal("wrong-base", f"{why}: stage with the sender's base")
        assert self.basis is not None
        assert self.layout is not None
        if self.basis.layout_id != self.layout.layout_id:
            why = f"the base has the layout {self.basis.layout_id}: send all bytes"
            raise Refusal("wrong-base", why)

    def renew(self, offset: int, delta: Delta) -> None:
        """Apply what differs in a run of whole chunks, and note that they are there.

        Raises:
            DeltaError: It is no delta of this run, or parts of the run are there already.
        """
        assert self.basis is not None
        assert self.memory is not None
        first, after = offset // CHUNK_BYTES, -(-(offset + delta.nbytes) // CHUNK_BYTES)
        there = sum(map(self.has, range(first, after)))
        if there == after - first:
            return
        if there:
            # Who hashes them may just be reading them.
            raise DeltaError("a part of what the delta covers is there already")
        begun = not self._begun.isdisjoint(range(first, after))
        self._begun.update(range(first, after))
        self.basis.renew(self.memory, offset, delta, untouched=not begun)
        self.deltas[offset] = delta
        for chunk in range(first, after):
            self.mark(chunk)

    def begin_chunk(self, chunk: int) -> None:
        """Note that a chunk is going to be written."""
        self._begun.add(chunk)

    def has(self, chunk: int) -> bool:
        """Whether this chunk is there."""
        return bool(self._done[chunk])

    def mark(self, chunk: int, digest: str | None = None) -> None:
        """Note that a chunk is there and verified, against this hash if it came whole."""
        assert self.layout is not None
        with self._state:
            self._done[chunk] = 1
            if digest is not None:
                self._hashes[chunk] = digest
            first = self._upto // CHUNK_BYTES
            if chunk == first:
                self._upto = self._front()
                self._state.notify_all()

    def _front(self) -> int:
        """Return where the first gap begins."""
        assert self.layout is not None
        gap = self._done.find(0, self._upto // CHUNK_BYTES)
        end = len(self._done) if gap < 0 else gap
        return min(end * CHUNK_BYTES, self.layout.nbytes)

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
                self.fail(self._why_nobody())
        return True

    def turned_away(self, why: str) -> None:
        """Note why somebody could not show a ticket, who perhaps had the right one."""
        with self._state:
            self._tried = f"; one that tried was turned away: {why}"

    def _why_nobody(self) -> str:
        return f"{self._why}{self._tried}: stage again"

    def _left(self) -> float:
        """Return the seconds that are left without a connection."""
        with self._state:
            if self._connections or self._wanted.peers:  # who fetches says when it can't
                return LEASE_SECONDS
            return self._lost + self._lease - time.monotonic()


def _without(layout: PushLayout, left_out: Collection[str]) -> bytearray:
    """Return by number of the chunk whether it has nothing of all other tensors."""
    if not left_out:
        return bytearray(-(-layout.nbytes // CHUNK_BYTES))
    unneeded = bytearray(b"\1" * -(-layout.nbytes // CHUNK_BYTES))
    for placed in layout.tensors:
        if placed.nbytes and placed.name not in left_out:
            first, after = placed.start // CHUNK_BYTES, -(-placed.end // CHUNK_BYTES)
            unneeded[first:after] = bytes(after - first)
    return unneeded


def _told(base: object) -> str:
    """Return a base in a few words, whatever a sender named as one."""
    if not isinstance(base, Mapping):
        return "none" if base is None else "no version"
    epoch, version, root = (str(base.get(key))[:64] for key in ("epoch", "version", "root_hash"))
    return f"({epoch}, {version}) with root_hash {root}"


def _nothing() -> None:
    """Release nothing."""
