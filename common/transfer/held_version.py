"""The pieces of one version that this process holds: what a trainer has filled, what a worker has received.

One thread-safe table: threads that fill mark leaves or pieces, the loop that serves and fetches is called back, and
threads that read wait. It ends once: complete, with all hashes, or failed with a reason.
"""

from __future__ import annotations

import math
import threading
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollout_common.wire.root_hash import DIGEST_BYTES, combine_leaves

from .connections.frames import Frame, Malformed
from .layout import PushLayout


@dataclass(frozen=True, slots=True)
class VersionEnd:
    """The hashes of a complete version: its root hash, and by name the digest of each tensor."""

    root_hash: str
    digests: Mapping[str, str]

    def to_head(self) -> dict[str, Any]:
        """Return it as the head of an `END` frame."""
        return {"root_hash": self.root_hash, "digests": dict(self.digests)}


class HeldVersion:
    """The table of the pieces and hashes of one version.

    Args:
        layout: Of the version.
        read_bytes: Returns a run of its bytes that has come already.
    """

    def __init__(self, layout: PushLayout, read_bytes: Callable[[int, int], memoryview]) -> None:
        self.layout, self.pieces, self.read_bytes = layout, layout.pieces, read_bytes
        self._news = threading.Condition()
        self._have = bytearray(len(self.pieces))
        self._leaves = bytearray(self.pieces.leaf_count)
        """By leaf: 1 if it is here."""
        self._hashed = bytearray(self.pieces.leaf_count)
        """By leaf: 1 if its hash is known, since it is here or another holder has reported it."""
        self._unhashed = self.pieces.leaf_count
        self._digests = bytearray(self.pieces.leaf_count * DIGEST_BYTES)
        self._listeners: list[Callable[[], None]] = []
        self._prefix = 0
        self._marked = array("I")
        """Pieces in the order in which they came, for those that announce them."""
        self.share = 0
        """Which share of an origin's pieces this process fetches."""
        self._claims = array("I")
        """Pieces in the order in which this process first requested them from an origin."""
        self._claimed = bytearray(len(self.pieces))
        self.nbytes_held = 0
        self.marked_at = -math.inf
        """When the last piece came, on the monotonic clock."""
        self.said: VersionEnd | None = None
        """The hashes that a holder reported, whether or not everything is here."""
        self.end: VersionEnd | None = None
        self.failure: str | None = None

    # Threads that fill.

    def mark_leaf(self, leaf: int, digest: bytes) -> None:
        """Note a leaf that has come, and its hash; a piece is there once all of its leaves are."""
        with self._news:
            self._note_digests(leaf, digest)
            self._leaves[leaf] = 1
            piece = self.pieces.piece_of_leaf[leaf]
            leaves = self.pieces.leaves_of(piece)
            if self._have[piece] or 0 in self._leaves[leaves.start : leaves.stop]:
                return
            self._note(piece)
        self._call_listeners()

    def mark_piece(self, piece: int, digests: bytes) -> None:
        """Note a piece that has come, with the hashes of its leaves."""
        with self._news:
            if self._have[piece]:
                return
            leaves = self.pieces.leaves_of(piece)
            self._note_digests(leaves.start, digests)
            self._leaves[leaves.start : leaves.stop] = b"\1" * len(leaves)
            self._note(piece)
        self._call_listeners()

    def claim_pieces(self, pieces: Sequence[int]) -> None:
        """Note that these pieces are on their way here from an origin, which need not send them to others."""
        with self._news:
            fresh = [piece for piece in pieces if not self._claimed[piece]]
            for piece in fresh:
                self._claimed[piece] = 1
            self._claims.extend(fresh)
        if fresh:
            self._call_listeners()

    def note_digests(self, first: int, digests: bytes) -> None:
        """Note the concatenated hashes of leaves that another holder has, from the leaf `first` on."""
        with self._news:
            self._note_digests(first, digests)
            self._news.notify_all()

    def _note_digests(self, first: int, digests: bytes) -> None:
        last = first + len(digests) // DIGEST_BYTES
        self._digests[first * DIGEST_BYTES : last * DIGEST_BYTES] = digests
        self._unhashed -= self._hashed.count(0, first, last)
        self._hashed[first:last] = b"\1" * (last - first)

    def _note(self, piece: int) -> None:
        self._have[piece] = 1
        self._marked.append(piece)
        self.marked_at = time.monotonic()
        self.nbytes_held += self.pieces.nbytes_of(piece)
        if piece == self._prefix:
            gap = self._have.find(0, piece)
            self._prefix = len(self._have) if gap < 0 else gap
        self._news.notify_all()

    def finish(self, end: VersionEnd) -> None:
        """Note the hashes of the complete version; only the first call counts."""
        with self._news:
            self.end = self.end or end
            self._news.notify_all()
        self._call_listeners()

    def fail(self, why: str) -> None:
        """End it with a failure; only the first reason counts."""
        with self._news:
            self.failure = self.failure or why
            self._news.notify_all()
        self._call_listeners()

    def subscribe(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call this, from any thread, whenever something changes; return what ends that."""
        with self._news:
            self._listeners = [*self._listeners, listener]

        def unsubscribe() -> None:
            with self._news:
                self._listeners = [each for each in self._listeners if each is not listener]

        return unsubscribe

    @property
    def listener_count(self) -> int:
        """How many are called: about as many as others get it from here."""
        return len(self._listeners)

    def _call_listeners(self) -> None:
        for listener in self._listeners:
            listener()

    # Threads that read, and the loop.

    def has(self, piece: int) -> bool:
        """Whether a piece is there."""
        return bool(self._have[piece])

    @property
    def piece_count(self) -> int:
        """How many pieces are there."""
        return len(self._marked)

    @property
    def is_complete(self) -> bool:
        """Whether all pieces are there."""
        return len(self._marked) == len(self._have)

    @property
    def is_hashed(self) -> bool:
        """Whether the hash of every leaf is known."""
        return not self._unhashed

    @property
    def prefix_end(self) -> int:
        """The offset up to which all bytes are there."""
        if self._prefix == len(self._have):
            return self.layout.nbytes
        return self.pieces.span(self._prefix)[0]

    def marked_since(self, count: int) -> list[int]:
        """Return the pieces that came after the first `count`, in their order."""
        with self._news:
            return self._marked[count:].tolist()

    def claimed_since(self, count: int) -> list[int]:
        """Return the pieces that were claimed after the first `count` claims, in their order; none once all have come."""
        with self._news:
            return [] if self.is_complete else self._claims[count:].tolist()

    def leaf_digests(self, piece: int) -> bytes:
        """Return the concatenated hashes of the leaves of a piece, which must be there."""
        return self.leaf_digests_of(self.pieces.leaves_of(piece))

    def leaf_digests_of(self, leaves: range) -> bytes:
        """Return the concatenated hashes of a run of leaves, which must be hashed."""
        return bytes(self._digests[leaves.start * DIGEST_BYTES : leaves.stop * DIGEST_BYTES])

    def leaf_digest(self, leaf: int) -> bytes | None:
        """Return a leaf's hash; None: it is not there."""
        if not self._leaves[leaf]:
            return None
        return bytes(self._digests[leaf * DIGEST_BYTES : (leaf + 1) * DIGEST_BYTES])

    def tensor_digests(self) -> dict[str, str]:
        """Return each tensor's digest, once all leaves are hashed."""
        return {
            placed.name: combine_leaves(self._digests[self.pieces.tensor_leaves(placed)])
            for placed in self.layout.tensors
        }

    def wait_for(self, until: Callable[[], bool], seconds: float) -> bool:
        """Wait until `until` is true, the version has failed, or the time has passed; return whether `until` is true."""
        with self._news:
            self._news.wait_for(lambda: until() or self.failure is not None, seconds)
            return until()


def read_end(frame: Frame, held: HeldVersion) -> VersionEnd:
    """Return the hashes that an `END` frame reports.

    Raises:
        Malformed: It doesn't name every tensor.
    """
    digests = frame.head.get("digests")
    named = isinstance(digests, Mapping) and all(isinstance(each, str) for each in digests.values())
    if not named or set(digests or ()) != {placed.name for placed in held.layout.tensors}:
        raise Malformed(f"{frame.kind.name} must have a hash for each tensor and for nothing else")
    return VersionEnd(frame.text("root_hash", most=128), dict(digests or {}))
