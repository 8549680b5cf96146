"""Pushed bytes as a source of weights: tickets for senders and fetchers, and how the bytes get into a sink."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
import threading
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from rollout_common.transfer.connections.frame_stream import FrameStream
from rollout_common.transfer.connections.frames import (
    Frame,
    Kind,
    Malformed,
    fetch_ticket,
    origin_ticket,
)
from rollout_common.transfer.layout import PushLayout
from rollout_common.transfer.memory.mapped_memory import MappingCache
from rollout_common.wire import OfferResponse, Peer, PushedBytes, StageSource, Transfer
from rollout_worker.engine import MappedWeights, Sink
from rollout_worker.sources.settings import LEAVE_SECONDS, OFFER_SECONDS
from rollout_worker.sources.tensor_filling import SinkFilling

from .arrived_version import ArrivedVersion
from .incoming_version import IncomingVersion
from .kept_version import KeptVersion, give_version
from .peer_route import PeerRoute
from .pushed_memory import Memory, Refusal, TransferFailed
from .trainer_connection import TrainerConnection
from .version_fetching import VersionFetching

logger = logging.getLogger(__name__)

MAX_OFFERS = 1024
GIVEN_AT_ONCE = 64
"""How many peers fetch kept bytes at the same time; others wait, as when a pool grows by hundreds."""
MAX_FETCHING = 256
"""How many peers may fetch or wait; a further one is refused and tries again later."""


RankWork = Callable[[FrameStream], Coroutine[Any, Any, None]]
"""Serves a connection that showed a valid ticket."""


class PushedSource:
    """The tickets of one worker; the loop and the threads of connections use it."""

    def __init__(self) -> None:
        self.address = Transfer(ticket="", port=None)
        """Where this worker receives weights."""
        self.peer_route = PeerRoute()
        """How this worker reaches other workers."""
        self._lock = threading.Lock()
        self._expected: tuple[str, VersionFetching] | None = None
        """The ticket of the version that is staged by a push, and what fetches it: a worker has one slot."""
        self._offers: dict[str, tuple[float, KeptVersion | IncomingVersion]] = {}
        self._maps = MappingCache()
        self._fetching = 0
        self._turns = asyncio.Semaphore(GIVEN_AT_ONCE)

    def expect(self, incoming: IncomingVersion) -> Transfer:
        """Return how a sender brings a version; a former ticket for it is no longer valid."""
        ticket = secrets.token_hex(16)
        with self._lock:
            fetching = None if self._expected is None else self._expected[1]
            if fetching is None or fetching.incoming is not incoming:
                fetching = VersionFetching(incoming, self.peer_route)
            self._expected = ticket, fetching  # with the connections of a former ticket for it
        return self.address.model_copy(update={"ticket": ticket})

    def offer(self, kept: KeptVersion) -> OfferResponse:
        """Return what a peer needs to fetch the kept version: its ticket is valid once, for `OFFER_SECONDS`."""
        assert self.address.port is not None, "the caller has looked"
        return OfferResponse(
            ticket=self._offered(kept),
            port=self.address.port,
            layout_id=kept.layout.layout_id,
            bytes=kept.layout.nbytes,
            root_hash=kept.end.root_hash,
        )

    def for_member(self, source: KeptVersion | IncomingVersion, host: str) -> StageSource:
        """Return the source from which another node of the gang fetches these bytes, also while they arrive.

        Args:
            source: The bytes.
            host: The address of this worker for that node.
        """
        assert self.address.port is not None, "the settings of a gang say so"
        peer = Peer(host=host, port=self.address.port, ticket=self._offered(source))
        return StageSource(pushed=PushedBytes(peers=(peer,)))

    def _offered(self, source: KeptVersion | IncomingVersion) -> str:
        """Return a new ticket that admits a fetcher of this version."""
        ticket = secrets.token_hex(16)
        with self._lock:
            self._forget()
            self._offers = dict(list(self._offers.items())[-MAX_OFFERS + 1 :])
            self._offers[ticket] = (time.monotonic(), source)
        return ticket

    def withdraw(self) -> None:
        """Make the tickets of all offers invalid."""
        with self._lock:
            self._offers = {}

    @property
    def idle(self) -> bool:
        """Whether no ticket is valid, so that no caller can have one."""
        with self._lock:
            self._forget()
            return self._expected is None and not self._offers

    def _forget(self) -> None:
        """Drop tickets that are no longer valid; peers may fetch a staged version for a while."""
        since = time.monotonic() - OFFER_SECONDS
        if self._expected is not None:
            incoming = self._expected[1].incoming
            if incoming.failure is not None or incoming.staged_at <= since:
                self._expected = None
        self._offers = {t: (at, each) for t, (at, each) in self._offers.items() if at > since}

    def turned_away(self, why: str) -> None:
        """Note why a caller could not show a ticket: a version that waits for its sender reports it."""
        if (expected := self._expected) is not None:
            expected[1].incoming.turned_away(why)

    def work_for(self, first: Frame) -> RankWork:
        """Return what serves a connection, chosen by its first frame; it ends with the connection.

        Raises:
            Refusal: The ticket is not valid, or too many peers fetch from here.
            Malformed: The frame has no ticket.
        """
        ticket = first.text("ticket", "", most=64)
        if first.kind not in (Kind.HELLO, Kind.FETCH):
            raise Malformed(f"{first.kind.name} came where HELLO or FETCH was due")
        with self._lock:
            self._forget()
            known, fetching = self._expected or ("", None)
            if first.kind is Kind.FETCH:
                if self._fetching >= MAX_FETCHING:
                    why = f"{self._fetching} others fetch from this worker: stage again in a moment"
                    raise Refusal("busy", why)
                if ticket in self._offers:
                    return partial(self._give, first, self._offers.pop(ticket)[1])
                if fetching is not None and _is_same_ticket(fetch_ticket(known), ticket):
                    return partial(self._give, first, fetching.incoming)
            elif fetching is not None:
                if _is_same_ticket(known, ticket) and fetching.incoming.takes_trainer:
                    return partial(self._receive, first, fetching)
                if _is_same_ticket(origin_ticket(known), ticket):
                    return partial(fetching.fetch_from_origin, first)
        raise no_ticket()

    async def _give(
        self, first: Frame, source: KeptVersion | IncomingVersion, stream: FrameStream
    ) -> None:
        """Run `give_version` once it is this peer's turn; send the peer the reason of a failure."""
        self._fetching += 1
        try:
            stream.start_pinging()
            # One that arrives has few fetchers: the other replicas, or the nodes of a gang.
            turn = self._turns if isinstance(source, KeptVersion) else contextlib.nullcontext()
            async with turn:
                await give_version(stream, source, self.peer_route, first)
        except TransferFailed as error:
            await stream.send(Kind.ERROR, {"slug": "gone", "detail": str(error)})
            await stream.leave(LEAVE_SECONDS)
        finally:
            self._fetching -= 1

    async def _receive(self, first: Frame, fetching: VersionFetching, stream: FrameStream) -> None:
        await TrainerConnection(stream, first, fetching, self._maps).run()


def _is_same_ticket(ours: str, shown: str) -> bool:
    # As bytes: of texts only ASCII is compared, and JSON may contain anything, lone surrogates as well.
    return hmac.compare_digest(ours.encode(), shown.encode(errors="replace"))


def no_ticket() -> Refusal:
    """Return the refusal for a caller without a valid ticket."""
    detail = "the ticket is unknown, used or void: stage again for another one"
    return Refusal("bad-ticket", detail)


def mapped(layout: PushLayout, memory: Memory) -> MappedWeights:
    """Return the memory of a version in the form that engines take, held until it is released."""
    starts = {placed.name: placed.start for placed in layout.tensors}
    give_back, view = memory.add_hold(), memory.view_bytes(0, memory.size)

    def release() -> None:
        view.release()  # else the frames of an error could keep it
        give_back()

    return MappedWeights(memory.handle, memory.size, starts, release, view)


async def receive(filling: SinkFilling, incoming: IncomingVersion) -> Sink:
    """Return a sealed sink with a version that arrives; report the outcome to all that wait for it.

    Raises:
        WeightsRejected: It is not what was promised.
        EngineError: It did not arrive, or the engine has no room.
    """
    sink = await fill_from_memory(filling, await incoming.opened())
    incoming.succeed(filling.root_hash)
    return sink


async def fill_from_memory(filling: SinkFilling, source: ArrivedVersion | KeptVersion) -> Sink:
    """Return a sealed sink with a version in the memory of pushed bytes, which the sink holds as long as it uses it.

    Raises:
        WeightsRejected: It is not what was promised.
        EngineError: The engine has no room, or the version has failed.
    """
    given = mapped(source.layout, source.memory)
    try:
        return await filling.fill_from_source(source, given)
    except BaseException:
        given.release()
        raise
