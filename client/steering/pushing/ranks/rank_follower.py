"""A rank that another rank of its node leads: it writes its shards into that rank's memory, and gets the outcome."""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Mapping
from typing import Any

from rollout_client.errors import PublishFailed, RolloutError
from rollout_client.steering.pushing.options import PushWork
from rollout_client.steering.pushing.settings import GRACE_SECONDS, MEMBER_LOOK_SECONDS
from rollout_client.steering.pushing.shards.node_parts import NodePart
from rollout_client.steering.pushing.shards.shard_plan import Offer, offers_to_json
from rollout_client.steering.pushing.shards.shard_writing import InMemory, ShardWriting
from rollout_client.steering.pushing.tensor_copying import Copier
from rollout_client.steering.steering_protocol import Published
from rollout_common.transfer.connections.blocking_connection import Connection
from rollout_common.transfer.connections.frames import Frame, Kind, Malformed, TransferError
from rollout_common.transfer.layout import LayoutError
from rollout_common.transfer.settings import LEASE_SECONDS

from .rank_outcome import of_json


class MeetingLeft(PublishFailed):
    """The leader meets the ranks again, before this one had anything to write: it may join them."""


class RankFollower:
    """The part of a rank above 0 in the publishes of a group, with its connection to the rank that leads it."""

    def __init__(self, connection: Connection, rank: int, leader: int = 0) -> None:
        self._closed = False
        self._began = 0.0
        self._connection, self._rank, self._leader = connection, rank, leader
        # `MEMORY` comes whenever the leader of this node makes new memory.
        connection.takes_memory = connection.unix
        self._copier = Copier()
        self._seconds, self._delta = 0.0, False
        self._maps: dict[int, mmap.mmap] = {}
        self._ended: Frame | None = None
        """The frame with the outcome, if it came while this rank was writing."""
        self._missed: Frame | None = None
        """The frame with the outcome of a publish that this rank has not called, or not before it was ended."""
        self._is_ordered = False
        """Whether the leader has said what to write in this publish."""
        self._offers: Mapping[int, Offer] = {}
        self._known: Mapping[int, Offer] | None = None
        """The offers that the leader has: once it has planned with them."""
        self._part: NodePart | None = None
        """What the ranks of this node, or this rank, write by the last order."""

    def take_part(self, work: PushWork) -> Published:
        """Write this rank's shards, and return what rank 0 has published.

        Raises:
            RolloutError: The publish failed: either all ranks raise, or none.
            LayoutError: A tensor of this rank can't be published; all others raise `PublishFailed`.
            MeetingLeft: Nothing was published so far, and all ranks meet again.
        """
        missed = self._take_missed()
        if missed is not None and missed.head.get("version") == work.version:
            return of_json(missed.head)
        limit = work.seconds + GRACE_SECONDS
        self._seconds, self._delta = work.seconds, work.plan.delta
        self._ended, self._is_ordered = None, False
        self._connection.patience(limit)
        self._began = self._connection.heard = time.monotonic()
        self._connection.start_pinging()
        try:
            return self._follow(work, self._began + limit)
        except TransferError as error:
            meets = not self._is_ordered and self._is_left()
            self.close(meets=meets)
            kind = MeetingLeft if meets else PublishFailed
            raise kind(f"rank {self._leader} of the group is gone: {error}") from error
        except (RolloutError, LayoutError):
            raise
        except BaseException:
            self.close(meets=False)
            raise
        finally:
            self._connection.stop_pinging()

    @property
    def broken(self) -> bool:
        """Whether the ranks have to meet again: rank 0 has left, or sent anything but pings and an outcome."""
        try:
            while not self._closed and self._connection.has_unread:
                frame = self._connection.poll(0)
                if frame is not None and frame.kind in (Kind.STAGED, Kind.FAILED):
                    self._missed = frame
                else:
                    self._closed = frame is not None
        except TransferError:
            self._closed = True
        return self._closed

    def has_missed(self, version: int) -> bool:
        """Whether the others have ended the publish of a version that this rank has not called yet."""
        return self._missed is not None and self._missed.head.get("version") == version

    def _take_missed(self) -> Frame | None:
        """Answer an outcome that came while this rank was elsewhere, and return it, if there is one."""
        missed, self._missed = self._missed, None
        if missed is not None:
            self._end_publish(missed)
            with contextlib.suppress(TransferError):  # the leader may wait no longer
                self._connection.send(Kind.RELEASED)
        return missed

    def close(self, *, meets: bool = True) -> None:
        """Close the connection, which the leader notices; `meets`: whether ranks that it leads may join the next meeting."""
        self._closed = True
        self._connection.close()
        self._keep(())

    def _follow(self, work: PushWork, until: float) -> Published:
        connection = self._connection
        wrong: Exception | None = None
        writing: ShardWriting | None = None
        try:
            writing = ShardWriting(work.tensors)
        except (TypeError, ValueError) as error:
            wrong = error
            self._report_failure(str(error))
        else:
            self._offer_parts(work.version, writing)
        while (frame := self._ended or self._next(until)).kind not in (Kind.STAGED, Kind.FAILED):
            match frame.kind:
                case Kind.MEMORY:
                    self._map(frame)
                case Kind.LAYOUT if writing is not None:
                    self._is_ordered = True
                    try:
                        self._write(frame, writing)
                    except (ValueError, RuntimeError) as error:
                        wrong = error
                        self._report_failure(f"{type(error).__name__}: {error}")
                case Kind.RELEASED:
                    self._ended = frame
                    raise TransferError("it lost another rank and must reconnect to all of them")
                case _:
                    self._take_frame(frame)
        self._end_publish(frame)
        connection.stop_pinging()
        # If the leader waits no longer, the outcome stands.
        with contextlib.suppress(TransferError):
            connection.send(Kind.RELEASED)
        if wrong is not None and not isinstance(wrong, RuntimeError):
            raise wrong
        done = of_json(frame.head)  # rank 0 may know the cause of a failed collective operation
        if wrong is not None:
            raise wrong
        return done

    def _report_failure(self, why: str) -> None:
        self._connection.send(Kind.FAILED, {"detail": f"rank {self._rank}: {why}"})

    def _offer_parts(self, version: int, writing: ShardWriting) -> None:
        """Describe to the leader what is here, unless it is the same as last time."""
        self._offers = self._collect_offers(version, writing)
        hello: dict[str, Any] = {"version": version}
        if self._offers != self._known:
            self._known = None  # the leader may read this without ever saying so
            hello |= offers_to_json(self._offers)
        self._connection.send(Kind.HELLO, hello)

    def _collect_offers(self, version: int, writing: ShardWriting) -> Mapping[int, Offer]:
        """Return by rank what is here."""
        return {self._rank: writing.offer}

    def _read_order(self, frame: Frame) -> NodePart:
        """Return what to write: what a frame says, else the same as last time."""
        self._known = self._offers
        if "layout" in frame.head:
            self._part = None
            self._part = NodePart.from_json(frame.head)
        if self._part is None:
            raise Malformed("LAYOUT came without the first order")
        return self._part

    def _take_frame(self, frame: Frame) -> None:
        """Handle another frame of the leader; there is none."""
        raise Malformed(f"{frame.kind.name} came in the middle of a publish")

    def _end_publish(self, outcome: Frame) -> None:
        """Do what has to be done before this rank reports that it has stopped."""

    def _next(self, until: float) -> Frame:
        """Return the next frame from the leader, before the deadline of the publish."""
        while (frame := self._connection.poll(MEMBER_LOOK_SECONDS)) is None:
            if time.monotonic() > until:
                raise TransferError("it does not say how the publish went")
            self._mind()
        self._mind()
        return frame

    def _mind(self) -> None:
        """Limit the silence of the leader from now on, since it pings during a publish."""
        if self._connection.heard > self._began:
            self._connection.patience(LEASE_SECONDS)

    def _map(self, frame: Frame) -> None:
        """Map new memory of the leader, before that seals it against further writable mappings."""
        if frame.handle is None:
            raise Malformed("MEMORY came without a descriptor")
        try:
            self._maps[frame.integer("slot")] = mmap.mmap(frame.handle, frame.integer("size", 1))
        except (OSError, ValueError) as error:
            raise TransferError(f"its memory can't be mapped: {error}") from error
        finally:
            os.close(frame.handle)
        self._connection.send(Kind.READY)

    def _write(self, frame: Frame, writing: ShardWriting) -> None:
        part = self._read_order(frame)
        layout = part.layout
        self._keep(frame.head["slots"])
        connection = self._connection

        def view(name: str, begin: int, end: int) -> memoryview:
            start = layout[name].start
            return memory[start + begin : start + end]

        def arrived(name: str, begin: int, end: int) -> None:
            connection.send(Kind.FILLED, {"name": name, "begin": begin, "end": end})

        def block(name: str, nbytes: int) -> None:
            connection.send(Kind.FILLED, {"name": name, "block": nbytes})

        with memoryview(self._maps[frame.integer("slot")]) as memory:
            shared = InMemory(view, arrived, block, self._copier)
            writing.write(part.boxes_of(self._rank), shared, self._stopped, layout)

    def _stopped(self) -> bool:
        """Whether the leader has ended the publish, so that this rank stops writing."""
        if self._ended is None:
            self._ended = self._connection.poll(0)
        return self._ended is not None

    def _is_left(self) -> bool:
        """Whether the leader's last word is that it meets the ranks again; a rank may fail to send before it reads that."""
        with contextlib.suppress(TransferError):
            while self._ended is None and self._connection.has_unread:
                self._ended = self._connection.poll(0)
        return self._ended is not None and self._ended.kind is Kind.RELEASED

    def _keep(self, slots: object) -> None:
        """Unmap the memory that the leader has freed."""
        kept = set(slots) if isinstance(slots, list | tuple) else set()
        for slot in self._maps.keys() - kept:
            with contextlib.suppress(BufferError):  # the frames of an error have a view of it
                self._maps.pop(slot).close()
