"""Fetches a version from other workers that have it or receive it: each is a holder, and one that fails is dropped."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rollout_common.transfer.connections.frame_stream import FrameStream
from rollout_common.transfer.connections.frames import (
    PROTOCOL,
    Frame,
    Kind,
    Malformed,
    TransferError,
)
from rollout_common.transfer.connections.transfer_loop import (
    TaskSet,
    running_tasks,
    transfer_loop,
    wait_for_first,
)
from rollout_common.transfer.held_version import HeldVersion
from rollout_common.transfer.layout import LayoutError, PushLayout
from rollout_common.transfer.piece_choice import HolderLink
from rollout_common.transfer.piece_fetcher import PieceFetcher
from rollout_common.wire import Peer
from rollout_worker.sources.settings import PEER_RETRY_SECONDS

from .incoming_version import IncomingVersion
from .peer_route import PeerRoute
from .pushed_memory import Refusal, TransferFailed

logger = logging.getLogger(__name__)

MAX_HOLDERS = 256
PEER_TRIES = 3
"""How often a worker dials a peer whose connection breaks."""


@dataclass(frozen=True, slots=True)
class HolderAddress:
    """Another worker that receives the same version, as the trainer names it in `LAYOUT`."""

    host: str
    port: int
    ticket: str
    name: str


def read_holders(given: object) -> list[HolderAddress]:
    """Return the holders that `LAYOUT` names.

    Raises:
        Malformed: They are not holders.
    """
    if not isinstance(given, list) or len(given) > MAX_HOLDERS:
        raise Malformed(f"LAYOUT.holders must be a list of at most {MAX_HOLDERS}")
    found = []
    for each in given:
        if not isinstance(each, dict):
            raise Malformed("a holder must be an object")
        frame = Frame(Kind.LAYOUT, each)
        host, port = frame.text("host", most=253), frame.integer("port", 1, 65535)
        found.append(
            HolderAddress(host, port, frame.text("ticket", most=64), frame.text("name", ""))
        )
    return found


def check_protocol(hello: Frame) -> None:
    """Refuse a trainer of another release.

    Raises:
        Malformed: It speaks another protocol.
    """
    if (spoken := hello.integer("protocol")) != PROTOCOL:
        raise Malformed(
            f"the sender speaks protocol {spoken}, this worker {PROTOCOL}: use the same release at"
            " both ends"
        )


class VersionFetching:
    """Fetches one version from all of its holders, on the transfer loop.

    Args:
        incoming: What is fetched.
        peer_route: Connects to other workers.
        root_hash: Of the wanted version; None: the first holder that knows it reports it.
    """

    def __init__(
        self, incoming: IncomingVersion, peer_route: PeerRoute, root_hash: str | None = None
    ) -> None:
        self.incoming, self._peer_route, self._root_hash = incoming, peer_route, root_hash
        self._fetcher: PieceFetcher | None = None
        self._has_news = asyncio.Event()
        """Set once there is a fetcher, and at the end."""
        self._over = asyncio.Event()
        self._beginning = asyncio.Lock()
        self._tasks = TaskSet()
        self._reasons: list[str] = []
        incoming.on_over.append(self._stop_soon)

    async def begin_pieces(
        self, layout: PushLayout, share: tuple[int, int] = (0, 1), peers: int = 0
    ) -> PieceFetcher:
        """Accept the layout and take memory, unless that is done already; return the fetcher of the pieces.

        Args:
            layout: As a holder sent it; all holders have the same.
            share: The number of this fetcher, and how many fetchers there are.
            peers: How many other holders there will be.

        Raises:
            Refusal: The layout is not the wanted one, or there is no room.
        """
        async with self._beginning:
            held: HeldVersion = self.incoming.begin(layout)
            # In a thread, since it takes seconds to allocate the pages of gigabytes.
            await asyncio.to_thread(self.incoming.take_room)
            if self._fetcher is None:
                self._fetcher = PieceFetcher(
                    held, self.incoming, share, self.incoming.unneeded, peers, self._root_hash
                )
                self._has_news.set()
            return self._fetcher

    def start_holders(self, holders: Sequence[HolderAddress]) -> None:
        """Fetch from these holders, too; log how each ends."""
        if not self._tasks:
            self.incoming.peer_count = len(holders)
            for holder in holders:
                self._tasks.start_task(self._fetch_from_holder(holder))

    async def fetch_from_origin(self, hello: Frame, stream: FrameStream) -> None:
        """Fetch from a rank of the trainer that holds a part of the version, until either end has done with it.

        Args:
            hello: The first frame of the rank.
            stream: The connection to it.

        Raises:
            TransferError: It is gone, or sends something wrong.
        """
        check_protocol(hello)
        stream.start_pinging()
        await self._has_news.wait()
        if self._fetcher is None or self.incoming.over:
            return
        await stream.send(Kind.READY)
        link = HolderLink(hello.text("name", "a node"), stream, is_origin=True, says_end=False)
        with self.incoming.hold_memory():
            async with running_tasks(self._fetcher.fetch_from(link), self._over.wait()) as tasks:
                await wait_for_first(tasks)

    async def fetch_from_peers(self, peers: Sequence[Peer]) -> None:
        """Fetch from these peers only; the version fails once the last of them has failed."""
        for peer in peers:
            address = HolderAddress(peer.host, peer.port, peer.ticket, f"{peer.host}:{peer.port}")
            self._tasks.start_task(self._fetch_from_holder(address))
        await self._tasks.wait_for_end()
        if self._fetcher is None or not self._fetcher.is_whole:
            reasons = "; ".join(self._reasons)
            self.incoming.fail(f"no peer could give the weights ({reasons}): stage again")

    def _stop_soon(self) -> None:
        transfer_loop().call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        self._tasks.cancel_tasks()
        self._over.set()
        self._has_news.set()

    async def _fetch_from_holder(self, holder: HolderAddress) -> None:
        why = ""
        try:
            for _ in range(PEER_TRIES):
                try:
                    await self._fetch_once(holder)
                    return
                except (Refusal, LayoutError, Malformed) as error:
                    # A ticket is good for one connection: what broke that one is the cause.
                    why = f"{why}; then {error}" if why else str(error)
                    break
                except TransferError as error:
                    why = str(error)
                await asyncio.sleep(PEER_RETRY_SECONDS)
        except TransferFailed as error:
            self.incoming.fail(str(error))
        except Exception as error:
            logger.exception("fetching weights from %s failed", holder.name)
            why = f"internal error: {error}"
        finally:
            self.incoming.peer_count = max(0, self.incoming.peer_count - 1)
            if self._fetcher is not None:
                self._fetcher.drop_peer()
        self._reasons.append(f"{holder.name}: {why}")
        logger.info("no more weights from %s: %s", holder.name, why)

    async def _fetch_once(self, holder: HolderAddress) -> None:
        stream = await self._peer_route.dial_worker(holder.host, holder.port)
        try:
            stream.start_pinging()
            await stream.send(Kind.FETCH, self._introduce(holder))
            told = await stream.expect(Kind.LAYOUT)
            fetcher = await self.begin_pieces(PushLayout.from_json(told.head.get("layout")))
            with self.incoming.hold_memory():
                await fetcher.fetch_from(HolderLink(holder.name, stream))
        finally:
            await stream.close()

    def _introduce(self, holder: HolderAddress) -> dict[str, Any]:
        base = self.incoming.deltas.base
        return {
            "protocol": PROTOCOL,
            "ticket": holder.ticket,
            "base": None if base is None else base.named.root_hash,
        }
