"""A joiner's way to a pushed version: its peers have it, each gives a part, and who fails is dropped."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence

from rollout_common.transfer.connection import Connection
from rollout_common.transfer.frames import CHUNK_BYTES, Frame, Kind, Malformed, TransferError
from rollout_common.transfer.layout import LayoutError, PushLayout
from rollout_common.wire import Peer

from .incoming import LOOK_SECONDS, End, Incoming, Refusal, end_of
from .outward import Outward
from .pushed_memory import Memory, TransferFailed

logger = logging.getLogger(__name__)

RANGE_CHUNKS = 16
"""What one peer is asked for at once: enough to keep its link busy, little to lose with it."""


class Fetching:
    """Brings a version from peers, in a thread for each; ends with the version, or with the last peer.

    Args:
        incoming: What is fetched.
        peers: Who has it.
        outward: How they are reached.
        root_hash: Of the version that is wanted; None: the first peer says.
    """

    def __init__(
        self,
        incoming: Incoming,
        peers: Sequence[Peer],
        outward: Outward,
        root_hash: str | None = None,
    ) -> None:
        self._incoming = incoming
        self._lock = threading.Condition()
        self._todo: deque[int] | None = None
        self._root = root_hash
        self._missing = 0
        self._reasons: list[str] = []
        self._left = len(peers)
        self._peers, self._outward = peers, outward

    def start(self) -> None:
        """Begin; how it went is the incoming version's to tell."""
        for peer in self._peers:
            threading.Thread(
                target=self._run, args=(peer,), name="weights-fetch", daemon=True
            ).start()

    def _run(self, peer: Peer) -> None:
        where = f"{peer.host}:{peer.port}"
        try:
            connection = self._outward.dial(peer.host, peer.port)
            try:
                self._fetch(connection, peer)
            finally:
                connection.close()
            why = "" if self._incoming.end is not None else "it has none of the missing chunks"
        except Refusal as refusal:
            why = str(refusal)
        except (TransferError, TransferFailed, LayoutError) as error:
            why = str(error)
        with self._lock:
            self._left -= 1
            if why:
                self._reasons.append(f"{where}: {why}")
            last, reasons = self._left == 0, "; ".join(self._reasons)
        if why:
            logger.info("no more weights from %s: %s", where, why)
        if last and self._incoming.end is None:
            self._incoming.fail(f"no peer could give the weights ({reasons}): stage again")

    def _fetch(self, connection: Connection, peer: Peer) -> None:
        connection.keep_alive()
        connection.send(Kind.FETCH, {"ticket": peer.ticket})
        told = self._awaited_layout(connection)
        if told is None:
            return
        layout = PushLayout.from_json(told.head.get("layout"))
        # Without a hash it is still arriving there.
        end = end_of(told, layout) if "root_hash" in told.head else None
        memory = self._begin(layout, end)
        release = memory.hold()
        try:
            while (span := self._take()) is not None:
                try:
                    self._bring(connection, layout, memory, span)
                except BaseException:
                    self._give_back(span)
                    raise
        finally:
            release()
        if self._missing == 0:
            if end is None:
                connection.send(Kind.GET, {"ranges": [], "hashes": True})
                end = end_of(connection.expect(Kind.END), layout)
            self._incoming.finish(end)

    def _awaited_layout(self, connection: Connection) -> Frame | None:
        """Return the first answer, for which a peer may have this worker queue; None: nobody wants it any more."""
        while (frame := connection.poll(LOOK_SECONDS)) is None:
            if self._incoming.over:
                return None
        return connection.checked(frame, Kind.LAYOUT)

    def _begin(self, layout: PushLayout, end: End | None) -> Memory:
        """Take the first peer's layout; all others must have the same content, that which is wanted.

        Raises:
            Refusal: This one has another, or there is no room.
        """
        with self._lock:
            if end is not None and self._root not in (None, end.root_hash):
                raise Refusal("other-content", f"its content differs (root_hash {end.root_hash})")
            self._incoming.begin(layout)
            memory = self._incoming.take_room()
            if self._todo is None:
                if end is not None:
                    self._root = end.root_hash
                chunks = range(-(-layout.nbytes // CHUNK_BYTES))
                missing = [each for each in chunks if not self._incoming.has(each)]
                self._missing = len(missing)
                starts = {each // RANGE_CHUNKS * RANGE_CHUNKS for each in missing}
                self._todo = deque(sorted(starts))
            return memory

    def _take(self) -> int | None:
        """Return the next part to fetch; waits as long as another peer may give one back."""
        with self._lock:
            while not self._incoming.over and self._missing:
                if self._todo:
                    return self._todo.popleft()
                self._lock.wait(LOOK_SECONDS)
            return None

    def _give_back(self, first: int) -> None:
        with self._lock:
            if self._todo is not None:
                self._todo.appendleft(first)
            self._lock.notify_all()

    def _bring(
        self, connection: Connection, layout: PushLayout, memory: Memory, first: int
    ) -> None:
        """Fetch the chunks from this one on that aren't there."""
        after = min(first + RANGE_CHUNKS, -(-layout.nbytes // CHUNK_BYTES))
        wanted = [chunk for chunk in range(first, after) if not self._incoming.has(chunk)]
        spans = [
            [chunk * CHUNK_BYTES, min((chunk + 1) * CHUNK_BYTES, layout.nbytes)] for chunk in wanted
        ]
        connection.send(Kind.GET, {"ranges": spans})
        for chunk, (begin, end) in zip(wanted, spans, strict=True):
            if self._incoming.over:
                raise TransferFailed(self._incoming.failure or "it is staged")
            frame = connection.expect(Kind.DATA)
            if frame.integer("offset") != begin or frame.payload != end - begin:
                raise Malformed("it sent another chunk than it was asked for")
            found = memory.take(begin, end, connection.read_into)
            if found != frame.text("hash"):
                raise Malformed(f"the chunk at {begin} arrived damaged")
            self._incoming.mark(chunk, found)
            with self._lock:
                self._missing -= 1
                if not self._missing:
                    self._lock.notify_all()
