"""Which pieces a fetcher requests from which holder.

Fetchers share the pieces that only the origin has (the trainer, or the head of a gang): of n fetchers, the one with
share i takes pieces i, i + n, i + 2n, ... So each piece leaves the origin once, and fetchers get the rest from each
other as soon as it arrives. Equal links are not equally quick: fetchers announce what they have requested from an origin
(`HAVE.claimed`), and one that has no more of its share to request takes over pieces that nobody has claimed. A piece that is
late, compared with the median of those that came, is requested a second time from another holder, and the first answer
counts.
"""

from __future__ import annotations

import asyncio
import math
import random
import statistics
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from .connections.frame_stream import FrameStream
from .nixl.holder_reading import HolderReading
from .piece_server import Ranges
from .settings import LEAST_LATE_SECONDS, QUICK_PIECE_SECONDS

FIRST_WINDOW, LAST_WINDOW = 2, 64
"""Pieces that one holder was asked for and has not sent. The window doubles whenever it runs empty, or a piece comes within
`QUICK_PIECE_SECONDS`: a fast link needs a larger one, while a piece that waits in the queue of a slow holder can't come from another one."""

LATE_MEDIANS = 4.0
"""After how many times the median seconds of a piece it is requested from another holder, too."""

_TIMED_PIECES = 64
"""How many of the last pieces the median is taken of."""


@dataclass(eq=False)
class HolderLink:
    """A connection to a holder, and what was requested on it.

    Attributes:
        name: For errors.
        stream: The connection to it.
        is_origin: Whether other fetchers fetch from it, too, each a share.
        says_end: Whether it may say what everything hashes to.
    """

    name: str
    stream: FrameStream
    is_origin: bool = False
    says_end: bool = True
    has: bytearray = field(default_factory=bytearray)
    """By piece: 1 if the holder has announced it."""
    claimed: bytearray = field(default_factory=bytearray)
    """By piece: 1 if the holder, a fetcher itself, has requested it from an origin."""
    share: int | None = None
    """The holder's own share of an origin's pieces, once it has claimed some."""
    news_at: float = -math.inf
    """When it last announced something."""
    announced: deque[range] = field(default_factory=deque)
    """Runs of pieces to request here, unless they have come by then."""
    others: deque[range] = field(default_factory=deque)
    """Of an origin: pieces in the shares of other fetchers."""
    requested: dict[int, float] = field(default_factory=dict)
    """By piece: when it was requested."""
    window: int = FIRST_WINDOW
    damaged: set[int] = field(default_factory=set)
    wakes: asyncio.Event = field(default_factory=asyncio.Event)
    reading: HolderReading = field(init=False)

    def __post_init__(self) -> None:
        self.reading = HolderReading(self.name, self.stream)


class PieceChoice:
    """The holders of one version, what they have, and what they were asked for.

    Args:
        wanted: By piece: 1 while it is missing; the fetcher changes it.
        share: The number of this fetcher, and how many fetchers there are.
        expected_peers: How many holders other than origins will be linked.
        clock: Returns seconds.
    """

    def __init__(
        self,
        wanted: bytearray,
        share: tuple[int, int],
        expected_peers: int,
        clock: Callable[[], float],
    ) -> None:
        self.expected_peers = expected_peers
        self.links: list[HolderLink] = []
        self._wanted, self._share, self._clock = wanted, share, clock
        self._in_flight: Counter[int] = Counter()
        self._peer_news_at = clock()
        """When another fetcher last announced a piece that is missing here."""
        self._seconds: deque[float] = deque(maxlen=_TIMED_PIECES)
        self._taken_over: dict[int, tuple[HolderLink, float]] = {}
        """Pieces of this fetcher's share: who of another share claimed it last, and when."""

    def add_link(self, link: HolderLink) -> None:
        """Note a holder, which has announced nothing yet."""
        link.has, link.claimed = bytearray(len(self._wanted)), bytearray(len(self._wanted))
        self.links.append(link)

    def remove_link(self, link: HolderLink) -> None:
        """Make other links request what this holder was asked for, or has claimed."""
        self.links.remove(link)
        self._in_flight.subtract(link.requested.keys())
        link.requested.clear()
        for other in self.links:
            other.wakes.set()

    def note_claims(self, link: HolderLink, runs: Ranges, share: int) -> None:
        """Note which pieces a holder with this share has requested from an origin."""
        mine, count = self._share
        link.share = share
        for begin, end in runs:
            link.claimed[begin:end] = b"\1" * (end - begin)
            # Of fetchers with the same share each fetches all of it.
            if share != mine:
                own = range(begin + (mine - begin) % count, end, count)
                self._taken_over |= dict.fromkeys(own, (link, self._clock()))

    def note_news(self, link: HolderLink, runs: Ranges) -> None:
        """Note which pieces a holder has by now."""
        mine, count = self._share
        while link.others and 1 not in self._wanted[link.others[0].start : link.others[0].stop]:
            link.others.popleft()
        link.news_at = self._clock()
        # Others are late with what they have had time for: where nothing was missing they had nothing to announce.
        news_is_due = not (link.is_origin and link.others)
        for begin, end in runs:
            if news_is_due:
                self._peer_news_at = link.news_at
            link.has[begin:end] = b"\1" * (end - begin)
            if link.is_origin:
                link.announced.append(range(begin + (mine - begin) % count, end, count))
                link.others.append(range(begin, end))
            else:
                link.announced.append(range(begin, end))
        link.wakes.set()

    def note_request(self, link: HolderLink, pieces: Iterable[int]) -> None:
        """Note that these pieces are requested from a holder now."""
        link.requested.update(dict.fromkeys(pieces, self._clock()))
        self._in_flight.update(pieces)

    def note_answer(self, link: HolderLink, piece: int) -> None:
        """Note that a piece was answered."""
        seconds = self._clock() - link.requested.pop(piece)
        self._seconds.append(seconds)
        self._in_flight[piece] -= 1
        if not link.requested or seconds < QUICK_PIECE_SECONDS:
            link.window = min(2 * link.window, LAST_WINDOW)
        if len(link.requested) <= link.window // 2:  # else no more is requested yet
            link.wakes.set()

    def choose_pieces(self, link: HolderLink) -> list[int]:
        """Return the pieces to request from this holder now."""
        if len(link.requested) > link.window // 2:  # a request for each piece would cost too much
            return []
        room = link.window - len(link.requested)
        chosen = self._choose_from(link.announced, room, even_taken_over=not link.is_origin)
        if not chosen and not link.requested:
            chosen = self._choose_late(link)
        if not chosen and (
            not self.expected_peers or (not link.requested and self._are_peers_late())
        ):
            chosen = self._choose_from(link.others, room, even_taken_over=True)
        if not chosen and not link.requested:
            chosen = self._choose_unclaimed(link)
        return chosen

    def ask_again(self, link: HolderLink, piece: int) -> None:
        """Have a piece that came damaged be requested from the same holder again."""
        self._taken_over.pop(piece, None)
        link.announced.append(range(piece, piece + 1))
        link.wakes.set()

    def _choose_from(
        self, runs: deque[range], room: int, *, even_taken_over: bool = False
    ) -> list[int]:
        """Take at most `room` pieces that are not on their way here or to who took them over.

        Those that are stay in `runs`, since they may not come.
        """
        chosen: list[int] = []
        on_their_way: list[range] = []
        while runs and len(chosen) < room:
            run = runs.popleft()
            for index, piece in enumerate(run):
                if not self._wanted[piece]:
                    continue
                taken_over = not even_taken_over and self._is_taken_over(piece)
                if self._in_flight[piece] or taken_over:
                    on_their_way.append(range(piece, piece + 1))
                    continue
                chosen.append(piece)
                if len(chosen) == room:
                    if rest := run[index + 1 :]:
                        runs.appendleft(rest)
                    break
        runs.extendleft(reversed(on_their_way))
        return chosen

    def _is_taken_over(self, piece: int) -> bool:
        """Whether another fetcher is linked that has claimed this piece of this one's share, and is not late with it."""
        if piece not in self._taken_over:
            return False
        taker, claimed_at = self._taken_over[piece]
        return taker in self.links and self._clock() < claimed_at + self._late_seconds()

    def _choose_late(self, link: HolderLink) -> list[int]:
        """Return one piece that this holder has and whose request to another holder is late."""
        latest = self._clock() - self._late_seconds()
        for other in self.links:
            for piece, asked_at in other.requested.items():
                if asked_at < latest and link.has[piece] and self._is_late(piece, latest):
                    return [piece]
        return []

    def _is_late(self, piece: int, latest: float) -> bool:
        """Whether a piece is missing, and was not requested after `latest`."""
        asked = (each.requested.get(piece, 0.0) for each in self.links)
        return bool(self._wanted[piece]) and max(asked) < latest

    def _choose_unclaimed(self, link: HolderLink) -> list[int]:
        """Return one piece of another fetcher's share that only this origin has, and that nobody has claimed.

        It is one of the last of its share, whose fetcher claims the first ones first.
        """
        if not link.is_origin:
            return []
        if self._clock() < link.news_at + max(LEAST_LATE_SECONDS, self._median_seconds()):
            return []  # their claims may be on the way
        peers = [each for each in self.links if not each.is_origin]
        left = int.from_bytes(link.has) & int.from_bytes(self._wanted)
        for peer in peers:
            left &= ~(int.from_bytes(peer.has) | int.from_bytes(peer.claimed))
        unclaimed, (mine, count) = left.to_bytes(len(self._wanted)), self._share
        # What a fetcher has claimed that is not linked here is unknown.
        shares_of_peers = {peer.share for peer in peers if peer.share is not None}
        known = {number for number in shares_of_peers if number != mine and number < count}
        shares = {number: unclaimed[number::count] for number in known}
        # Drawn, so that two seldom take the same piece at once; the cube: from a share with many.
        weights = [share.count(1) ** 3 for share in shares.values()]
        if not any(weights):
            return []
        [number] = random.choices(list(shares), weights)
        places = [place for place, is_left in enumerate(shares[number]) if is_left]
        piece = number + random.choice(places[len(places) // 2 :]) * count
        return [] if self._in_flight[piece] else [piece]

    def _are_peers_late(self) -> bool:
        """Whether other fetchers have announced nothing for so long that this one fetches their shares."""
        return self._clock() - self._peer_news_at > self._late_seconds()

    def _late_seconds(self) -> float:
        return max(LEAST_LATE_SECONDS, LATE_MEDIANS * self._median_seconds())

    def _median_seconds(self) -> float:
        """How long the last pieces took, from their request."""
        return statistics.median(self._seconds) if self._seconds else 0.0
