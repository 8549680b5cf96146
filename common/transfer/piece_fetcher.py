"""A fetcher's end: it fetches the missing pieces of a version from its holders, each piece from any of them.

`piece_choice` chooses which. All of it runs on one loop, without locks.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Protocol

from rollout_common.wire.root_hash import hash_leaf

from .connections.frames import Frame, Kind, Malformed, TransferError
from .connections.payload import THREADED_BYTES, Payload, payload_threads
from .delta import DeltaError
from .held_version import HeldVersion, read_end
from .nixl.agent_handle import NixlFailed
from .nixl.piece_reading import piece_reader
from .piece_choice import HolderLink, PieceChoice
from .piece_server import ranges_of, read_ranges, split_digests
from .pieces import LeafHashes
from .settings import LATE_LOOK_SECONDS


class PieceStore(Protocol):
    """Memory for the pieces of one version."""

    def writable(self, begin: int, end: int) -> memoryview:
        """Return the place of a run of bytes, or a buffer for it; `commit_run` follows once the run has come."""
        ...

    def commit_run(self, begin: int, content: memoryview, *, in_place: bool) -> None:
        """Note that a run has come and is verified; `in_place`: `content` is what `writable` returned, else the store writes it.

        Raises:
            TransferError: There is no room.
        """
        ...

    def apply_delta(self, piece: int, begin: int, end: int, delta: bytes) -> memoryview:
        """Make a run from the base and the delta, and return it.

        Raises:
            DeltaError: It is not a delta of this run.
        """
        ...


class PieceFetcher:
    """Fetches one version; created and used on the transfer loop.

    Args:
        held: The pieces that are here; notes those that come.
        store: Memory for the pieces.
        share: The number of this fetcher, and how many fetchers there are.
        unneeded: By piece: 1 if it is not to be fetched.
        expected_peers: How many holders other than origins will be linked.
        root_hash: Of the wanted version; None: the first holder that knows it reports it.
    """

    def __init__(
        self,
        held: HeldVersion,
        store: PieceStore,
        share: tuple[int, int] = (0, 1),
        unneeded: bytes | bytearray | None = None,
        expected_peers: int = 0,
        root_hash: str | None = None,
    ) -> None:
        self._held, self._store = held, store
        held.share = share[0]
        self._count = len(held.pieces)
        self._wanted = bytearray(
            0 if held.has(piece) or (unneeded and unneeded[piece]) else 1
            for piece in range(self._count)
        )
        self.missing = self._wanted.count(1)
        """How many pieces are still to come."""
        clock = asyncio.get_running_loop().time
        self._choice = PieceChoice(self._wanted, share, expected_peers, clock)
        self._writers: dict[int, Payload] = {}
        """By piece: the answer that is being written to its place."""
        self._root_hash = root_hash
        self._origin_spoke = root_hash is not None
        """Whether what everything hashes to is known from an origin, or from the caller."""

    def drop_peer(self) -> None:
        """Expect one holder less."""
        self._choice.expected_peers = max(0, self._choice.expected_peers - 1)

    @property
    def is_whole(self) -> bool:
        """Whether all pieces are here, and the hashes are known."""
        return self._held.end is not None and not self.missing

    async def fetch_from(
        self, link: HolderLink, on_frame: Callable[[Frame], None] | None = None
    ) -> None:
        """Fetch from one holder until everything is here; read from an origin until it closes the connection.

        Args:
            link: The holder, which has sent its layout already.
            on_frame: Takes frames other than those of a holder; None: none come.

        Raises:
            TransferError: The holder is gone, gave up, or sends a wrong frame.
        """
        self._choice.add_link(link)
        asking = asyncio.create_task(self._ask(link))
        try:
            while link.is_origin or not self.is_whole:
                await self._take_frame(link, await link.stream.receive(), on_frame)
        except TransferError as error:
            if link.reading.failure is not None:
                raise link.reading.failure from error
            if link.is_origin or not self.is_whole:
                raise
        finally:
            asking.cancel()
            await asyncio.wait([asking])
            self._choice.remove_link(link)
            await link.reading.end_reading()

    # What comes.

    async def _take_frame(
        self, link: HolderLink, frame: Frame, on_frame: Callable[[Frame], None] | None
    ) -> None:
        match frame.kind:
            case Kind.HAVE:
                self._take_news(link, frame)
            case Kind.MEMORY if link.reading.memory is None:
                link.reading.take_memory(frame)
            case Kind.PIECE:
                await self._take_piece(link, frame)
            case Kind.DELTA:
                await self._take_delta(link, frame)
            case Kind.END if link.says_end:
                self._take_end(link, frame)
            case _ if on_frame is not None:
                on_frame(frame)
            case Kind.ERROR:
                raise TransferError(frame.text("detail", "it gave no reason"))
            case _:
                raise Malformed(f"{frame.kind.name} came from a holder")

    def _take_news(self, link: HolderLink, frame: Frame) -> None:
        if "claimed" in frame.head:
            claimed = read_ranges(frame, self._count, "claimed")
            # Not bounded by the pieces: a short version may have more fetchers.
            self._choice.note_claims(link, claimed, frame.integer("share"))
        self._choice.note_news(link, read_ranges(frame, self._count))

    def _due(self, link: HolderLink, frame: Frame) -> int:
        """Return the number of the piece that a frame brings; refuse one that was not requested."""
        piece = frame.integer("piece", 0, max(self._count - 1, 0))
        if piece not in link.requested or piece in link.reading.pieces:
            raise Malformed(f"piece {piece} came, which was not asked for")
        return piece

    def _settle(self, link: HolderLink, piece: int) -> None:
        """Note that a piece was answered."""
        self._choice.note_answer(link, piece)
        link.reading.settle_piece(piece)

    async def _take_piece(self, link: HolderLink, frame: Frame) -> None:
        piece = self._due(link, frame)
        begin, end = self._held.pieces.span(piece)
        reads = not frame.payload and link.reading.expects(piece)
        if not reads and frame.payload != end - begin:
            raise Malformed(f"piece {piece} came with {frame.payload} bytes, not {end - begin}")
        digests = split_digests(frame, len(self._held.pieces.leaves_of(piece)))
        if reads:
            work = self._read_piece(link, piece, digests)
            return link.reading.start_reading(piece, work)
        if not self._wanted[piece]:
            await link.stream.skip(frame)
            return self._settle(link, piece)
        # At most one answer is read to the place: a second one at the same time goes through a buffer.
        direct = piece not in self._writers
        place = self._store.writable(begin, end) if direct else memoryview(bytearray(end - begin))
        with place:
            found = LeafHashes(self._held.pieces, piece, place)
            payload = Payload(place, found.hash_upto)
            if direct:
                self._writers[piece] = payload
            try:
                whole = await link.stream.read_payload(payload)
            finally:
                if direct and self._writers.get(piece) is payload:
                    del self._writers[piece]
            self._settle(link, piece)
            if not self._wanted[piece]:
                return None
            if not whole:  # another holder's delta was applied here, but was made for other bytes
                return self._choice.ask_again(link, piece)
            if found.digests != digests:
                return self._note_damage(link, piece)
            self._end_writing(piece)
            self._store.commit_run(begin, place, in_place=direct)
            self._note_piece(piece, digests)
        return None

    def _end_writing(self, piece: int) -> None:
        """Drop an answer that is still being read to the place of a piece."""
        if (writing := self._writers.pop(piece, None)) is not None:
            writing.revoke()

    async def _read_piece(self, link: HolderLink, piece: int, digests: bytes) -> None:
        """Read a piece from the holder's memory, where it is now."""
        remote = link.reading.memory
        assert remote is not None, "it was requested so"
        begin, end = self._held.pieces.span(piece)
        try:
            async with piece_reader().read_piece(remote, begin, end - begin) as place:
                found = await self._hash_place(piece, place)
                self._settle(link, piece)
                if not self._wanted[piece]:
                    return
                if found != digests:
                    return self._note_damage(link, piece)
                self._end_writing(piece)
                self._store.commit_run(begin, place, in_place=False)
            self._note_piece(piece, digests)
        except NixlFailed as error:
            link.reading.note_failure(error)
            self._settle(link, piece)
            self._choice.ask_again(link, piece)

    async def _hash_place(self, piece: int, place: memoryview) -> bytes:
        """Hash a piece, in a thread if it is large."""
        if len(place) < THREADED_BYTES:
            return self._held.pieces.hash_leaves(piece, place)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            payload_threads(), self._held.pieces.hash_leaves, piece, place
        )

    async def _take_delta(self, link: HolderLink, frame: Frame) -> None:
        piece = self._due(link, frame)
        digests = split_digests(frame, len(self._held.pieces.leaves_of(piece)))
        content = bytearray(frame.payload)
        await link.stream.read_into(memoryview(content))
        self._settle(link, piece)
        if not self._wanted[piece]:
            return
        if hash_leaf(content).hex() != frame.text("hash"):
            return self._note_damage(link, piece)
        self._end_writing(piece)
        try:
            place = self._store.apply_delta(piece, *self._held.pieces.span(piece), bytes(content))
        except DeltaError as error:
            raise Malformed(f"the delta of piece {piece}: {error}") from error
        with place:
            if self._held.pieces.hash_leaves(piece, place) != digests:
                raise Malformed(f"the delta of piece {piece} does not make what it should")
        self._note_piece(piece, digests)

    def _note_piece(self, piece: int, digests: bytes) -> None:
        self._wanted[piece] = 0
        self.missing -= 1
        self._held.mark_piece(piece, digests)
        self._finish_if_whole()

    def _note_damage(self, link: HolderLink, piece: int) -> None:
        """Fetch a damaged piece again; refuse a holder that sends the same piece damaged twice."""
        if piece in link.damaged:
            raise Malformed(f"piece {piece} arrived damaged twice: check the network")
        link.damaged.add(piece)
        self._choice.ask_again(link, piece)

    def _take_end(self, link: HolderLink, frame: Frame) -> None:
        """Take note of what everything hashes to: the first word counts, but for an origin's, which another holder can't contradict."""
        end = read_end(frame, self._held)
        if link.is_origin and not self._origin_spoke:
            self._origin_spoke = True
        elif self._root_hash not in (None, end.root_hash):
            raise Malformed(
                f"its content differs (root_hash {end.root_hash}, not {self._root_hash})"
            )
        self._root_hash, self._held.said = end.root_hash, end
        self._finish_if_whole()

    def _finish_if_whole(self) -> None:
        said = self._held.said
        if not self.missing and said is not None and self._held.end is None:
            self._held.finish(said)
            for link in self._choice.links:
                if not link.is_origin:
                    link.stream.interrupt()

    # What is asked for.

    async def _ask(self, link: HolderLink) -> None:
        try:
            await self._ask_for_missing(link)
        except TransferError:  # it takes no requests, even if it still sends pings
            link.stream.interrupt()

    async def _ask_for_missing(self, link: HolderLink) -> None:
        while self.missing:
            link.wakes.clear()
            chosen = self._choice.choose_pieces(link)
            if not chosen:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LATE_LOOK_SECONDS):
                        await link.wakes.wait()
                continue
            self._choice.note_request(link, chosen)
            if link.is_origin:
                self._held.claim_pieces(chosen)
            way = link.reading.request_pieces(chosen)
            await link.stream.send(Kind.GET, {"ranges": ranges_of(chosen), **way})
