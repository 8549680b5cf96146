"""A holder's end of a connection: it announces the pieces that are there and sends those that are requested.

A trainer serves what it has filled, a worker what it has received so far: for the other end both are holders.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from rollout_common.wire.root_hash import DIGEST_BYTES, hash_leaf

from .connections.frame_stream import FrameStream
from .connections.frames import Frame, Kind, Malformed, TransferError, check_kind
from .connections.rate_limit import RateLimit
from .connections.transfer_loop import running_tasks, wait_for_first, waking
from .held_version import HeldVersion
from .settings import ANNOUNCE_SECONDS, ANNOUNCE_SECONDS_EACH

NIXL = "nixl"
"""`GET.by` of a fetcher that reads the pieces itself: each `PIECE` then comes without its bytes."""

MAX_REQUESTED = 65536
"""Most pieces that one fetcher may have requested and not received yet."""

Ranges = list[tuple[int, int]]
"""Begin and end of runs of pieces."""

DeltaOf = Callable[[int], "bytes | None"]
"""Takes a piece, returns the delta from the fetcher's base; None: all of its bytes are to be sent."""


OnFrame = Callable[[Frame], bool]
"""Takes a frame of a fetcher other than a request; returns whether more may come."""


def ranges_of(pieces: list[int]) -> Ranges:
    """Return ascending pieces as runs."""
    found: Ranges = []
    for piece in sorted(pieces):
        if found and found[-1][1] == piece:
            found[-1] = found[-1][0], piece + 1
        else:
            found.append((piece, piece + 1))
    return found


def read_ranges(frame: Frame, count: int, field: str = "ranges") -> Ranges:
    """Return the runs of pieces that a field of a frame names.

    Raises:
        Malformed: They are not runs of a version with so many pieces, in order and without overlaps.
    """
    given = frame.head.get(field)
    if not isinstance(given, list) or len(given) > count:
        raise Malformed(f"{frame.kind.name}.{field} must be a list of runs of pieces")
    found: Ranges = []
    last = 0
    for each in given:
        pair = each if isinstance(each, list) and len(each) == 2 else [None, None]
        run = Frame(frame.kind, {"begin": pair[0], "end": pair[1]})
        begin = run.integer("begin", last, count)
        last = run.integer("end", begin, count)
        found.append((begin, last))
    return found


class PieceServer:
    """Serves one version to one fetcher, until either end is done with it.

    Args:
        stream: The connection to the fetcher, which knows the layout.
        held: The version.
        pace: The rate limit of all connections of this process; None: no limit.
        delta_of: Returns the delta of a piece; None: this end has no deltas from the fetcher's base.
        on_frame: Takes frames other than requests; None: none come.
        registered: How the fetcher reads the memory of the version by NIXL; None: it can't.
    """

    def __init__(
        self,
        stream: FrameStream,
        held: HeldVersion,
        pace: RateLimit | None = None,
        delta_of: DeltaOf | None = None,
        on_frame: OnFrame | None = None,
        registered: Mapping[str, Any] | None = None,
    ) -> None:
        self._stream, self._held, self._pace = stream, held, pace
        self._delta_of, self._on_frame = delta_of, on_frame
        self._registered = registered
        self._requested: deque[int] = deque()
        self._reads: set[int] = set()
        """Requested pieces that the fetcher reads itself."""
        self._has_requests, self._has_news = asyncio.Event(), asyncio.Event()

    async def run(self) -> None:
        """Serve until the fetcher closes the connection, or `on_frame` expects nothing more.

        Raises:
            TransferError: The connection broke, or the version has failed.
        """
        if self._registered is not None:
            await self._stream.send(Kind.MEMORY, self._registered)
        end = self._held.subscribe(waking(self._has_news))
        try:
            async with running_tasks(
                self._listen(), self._announce(), self._send_pieces()
            ) as tasks:
                # The first task to end ends all: only `_listen` ends without an error.
                await wait_for_first(tasks)
        finally:
            end()

    async def _listen(self) -> None:
        count = len(self._held.pieces)
        while True:
            frame = await self._stream.receive()
            if frame.kind is Kind.GET:
                reads = "by" in frame.head
                if reads and (self._registered is None or frame.text("by") != NIXL):
                    raise Malformed("GET.by names no way to read this memory")
                for begin, end in read_ranges(frame, count):
                    if len(self._requested) + end - begin > MAX_REQUESTED:
                        raise Malformed(f"more than {MAX_REQUESTED} pieces were asked for at once")
                    self._requested.extend(range(begin, end))
                    self._reads.update(range(begin, end) if reads else ())
                self._has_requests.set()
            elif self._on_frame is None:
                check_kind(frame, Kind.GET)
            else:
                await self._stream.skip(frame)
                if not self._on_frame(frame):
                    return

    async def _announce(self) -> None:
        announced, claimed, ended = 0, 0, False
        held = self._held
        while True:
            self._has_news.clear()
            news, claims = held.marked_since(announced), held.claimed_since(claimed)
            if news or claims:
                announced, claimed = announced + len(news), claimed + len(claims)
                head: dict[str, Any] = {"ranges": ranges_of(news)}
                if claims:
                    head |= {"claimed": ranges_of(claims), "share": held.share}
                await self._stream.send(Kind.HAVE, head)
            if held.end is not None and not ended:
                ended = True
                await self._stream.send(Kind.END, held.end.to_head())
            if held.failure is not None:
                raise TransferError(held.failure)
            await self._has_news.wait()
            each = ANNOUNCE_SECONDS_EACH * held.listener_count
            await asyncio.sleep(max(ANNOUNCE_SECONDS, each))

    async def _send_pieces(self) -> None:
        while True:
            while not self._requested:
                self._has_requests.clear()
                await self._has_requests.wait()
            await self._send_piece(self._requested.popleft())

    async def _send_piece(self, piece: int) -> None:
        held = self._held
        if not held.has(piece):
            raise Malformed(f"piece {piece} was asked for before it was announced")
        head: dict[str, Any] = {"piece": piece, "digests": held.leaf_digests(piece).hex()}
        reads = piece in self._reads
        self._reads.discard(piece)
        delta = None if self._delta_of is None else self._delta_of(piece)
        if delta is not None:
            await self._wait_for_pace(len(delta))
            head["hash"] = hash_leaf(delta).hex()
            return await self._stream.send(Kind.DELTA, head, delta)
        if reads:
            nbytes = held.pieces.nbytes_of(piece)
            await self._wait_for_pace(nbytes)
            self._stream.bytes_sent += nbytes
            return await self._stream.send(Kind.PIECE, head)
        try:
            content = held.read_bytes(*held.pieces.span(piece))
        except ValueError as error:  # the memory was freed
            raise TransferError(str(error)) from error
        with content:
            await self._wait_for_pace(len(content))
            return await self._stream.send(Kind.PIECE, head, content)

    async def _wait_for_pace(self, nbytes: int) -> None:
        if self._pace is not None:
            await asyncio.sleep(self._pace.wait_for(nbytes))


def split_digests(frame: Frame, leaves: int) -> bytes:
    """Return the concatenated hashes of a piece's leaves that a frame brings.

    Raises:
        Malformed: Their number is wrong.
    """
    try:
        found = bytes.fromhex(frame.text("digests", most=2 * DIGEST_BYTES * leaves))
    except ValueError as error:
        raise Malformed(f"{frame.kind.name}.digests must be hexadecimal digits") from error
    if len(found) != DIGEST_BYTES * leaves:
        raise Malformed(f"{frame.kind.name}.digests must have the hash of each of {leaves} leaves")
    return found
