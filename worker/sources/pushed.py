"""Pushed bytes as a source of weights: tickets for who brings or fetches them, and the way into a sink."""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from rollout_common.transfer.connection import Connection
from rollout_common.transfer.frames import Frame, Kind, Malformed
from rollout_common.transfer.layout import PushLayout
from rollout_common.transfer.maps import Maps
from rollout_common.wire import OfferResponse, Peer, PushedBytes, StageSource, Transfer
from rollout_worker.engine import MappedWeights, Sink, WeightsLayout

from .giving import Gives, Kept, give
from .incoming import LOOK_SECONDS, Incoming, Refusal
from .outward import Outward
from .pushed_memory import Memory, TransferFailed
from .receiving import LEAVE_SECONDS, Receiving
from .source_reading import ReadableSource, Report
from .tensor_filling import Elsewhere, OpenSlot, fill_from_source

logger = logging.getLogger(__name__)

OFFER_SECONDS = 120.0
"""How long the ticket of an offer is good: the peer has yet to be told of it."""
MAX_OFFERS = 1024
GIVEN_AT_ONCE = 64
"""How many peers get what is kept at the same time; others wait, as when a pool grows by hundreds."""
MAX_FETCHING = 256
"""How many of both there may be; one more is told to come again."""


Work = Callable[[Connection], None]
"""What is done for a connection whose ticket was good."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where this worker takes weights: port over TCP, path and node of its Unix socket.

    `tls`: whether the port takes TLS alone.
    """

    port: int | None = None
    socket: str | None = None
    node: str | None = None
    tls: bool = False

    @property
    def anywhere(self) -> bool:
        """Whether a sender can reach it at all."""
        return self.port is not None or self.socket is not None


class Desk:
    """The tickets of one worker; asked by the loop and by the threads of connections."""

    def __init__(self) -> None:
        self.address = Address()
        self.outward = Outward()
        """How other workers are reached."""
        self._lock = threading.Lock()
        self._expected: dict[str, Incoming] = {}
        self._offers: dict[str, tuple[float, Gives]] = {}
        self._maps = Maps()
        self._fetching = 0
        self._turns = threading.BoundedSemaphore(GIVEN_AT_ONCE)

    def expect(self, incoming: Incoming) -> Transfer:
        """Return how to bring a version; a former ticket for it is void."""
        ticket = secrets.token_hex(16)
        with self._lock:
            self._expected = {ticket: incoming}  # there is one slot
        address = self.address
        return Transfer(
            ticket=ticket,
            port=address.port,
            tls=address.tls,
            socket=address.socket,
            node=address.node,
        )

    def offer(self, kept: Kept) -> OfferResponse:
        """Return what a peer has to know to fetch what is kept; good once, and for a while."""
        assert self.address.port is not None, "the caller has looked"
        return OfferResponse(
            ticket=self._offered(kept),
            port=self.address.port,
            layout_id=kept.layout.layout_id,
            bytes=kept.layout.nbytes,
            root_hash=kept.end.root_hash,
        )

    def for_member(self, source: Gives, host: str) -> StageSource:
        """Return where another node of the gang gets these bytes: from here, also while they arrive.

        Args:
            source: The bytes.
            host: Of this worker, as that node knows it.
        """
        assert self.address.port is not None, "the settings of a gang say so"
        peer = Peer(host=host, port=self.address.port, ticket=self._offered(source))
        return StageSource(pushed=PushedBytes(peers=(peer,)))

    def _offered(self, source: Gives) -> str:
        """Return a new ticket for whoever may fetch it."""
        ticket = secrets.token_hex(16)
        with self._lock:
            self._forget()
            self._offers = dict(list(self._offers.items())[-MAX_OFFERS + 1 :])
            self._offers[ticket] = (time.monotonic(), source)
        return ticket

    def withdraw(self) -> None:
        """Offer nothing that was offered any more."""
        with self._lock:
            self._offers = {}

    @property
    def idle(self) -> bool:
        """Whether no ticket is out, so that whoever connects can't have one."""
        with self._lock:
            self._forget()
            return not self._expected and not self._offers

    def _forget(self) -> None:
        """Drop tickets that are good for nothing any more."""
        self._expected = {t: each for t, each in self._expected.items() if not each.over}
        since = time.monotonic() - OFFER_SECONDS
        self._offers = {t: (at, each) for t, (at, each) in self._offers.items() if at > since}

    def turned_away(self, why: str) -> None:
        """Note why somebody could not even show a ticket: whoever waits for a sender says so."""
        with self._lock:
            expected = list(self._expected.values())
        for incoming in expected:
            incoming.turned_away(why)

    def work_for(self, first: Frame) -> Work:
        """Return what a connection has come for, by its first frame; that blocks until the connection ends.

        Raises:
            Refusal: The ticket is none, or too many fetch here.
            Malformed: It shows none.
        """
        ticket = first.text("ticket", "", most=64)
        if first.kind not in (Kind.HELLO, Kind.FETCH):
            raise Malformed(f"{first.kind.name} came where HELLO or FETCH was due")
        with self._lock:
            self._forget()
            if first.kind is Kind.HELLO:
                incoming = self._expected.get(ticket)
                if incoming is not None:
                    return partial(self._receive, first, incoming)
            elif self._fetching >= MAX_FETCHING:
                why = f"{self._fetching} others fetch from this worker: stage again in a moment"
                raise Refusal("busy", why)
            elif ticket in self._offers:
                return partial(self._give, self._offers.pop(ticket)[1])
        raise no_ticket()

    def _give(self, source: Gives, connection: Connection) -> None:
        """As `give`, once it is this peer's turn; it is told why there is nothing more."""
        with self._lock:
            self._fetching += 1
        try:
            with self._turn(source, connection):
                give(connection, source, self.outward)
        except TransferFailed as error:
            connection.send(Kind.ERROR, {"slug": "gone", "detail": str(error)})
            connection.leave(LEAVE_SECONDS)
        finally:
            with self._lock:
                self._fetching -= 1

    @contextlib.contextmanager
    def _turn(self, source: Gives, connection: Connection) -> Iterator[None]:
        """Wait for a turn; the other nodes of this gang, whose version still arrives, need none."""
        if not isinstance(source, Kept):
            yield
            return
        connection.keep_alive()
        while not self._turns.acquire(timeout=LOOK_SECONDS):
            if connection.poll(0) is not None:
                raise Malformed("a frame came before LAYOUT was sent")
        try:
            yield
        finally:
            self._turns.release()

    def _receive(self, first: Frame, incoming: Incoming, connection: Connection) -> None:
        receiving = Receiving(connection, first, incoming, self.outward, self._maps)
        # Over a Unix socket it lasts as long as the sender lives and its memory is read here.
        with self._maps.sender() if connection.unix else contextlib.nullcontext():
            receiving.run()


def no_ticket() -> Refusal:
    """Return what who has no good ticket is told."""
    detail = "the ticket is unknown, used or void: stage again for another one"
    return Refusal("bad-ticket", detail)


def mapped(layout: PushLayout, memory: Memory) -> MappedWeights:
    """Return the memory of a version as engines take it, held until it is released."""
    starts = {placed.name: placed.start for placed in layout.tensors}
    give_back, view = memory.hold(), memory.bytes(0, memory.size)

    def release() -> None:
        view.release()  # the frames of an error may keep it
        give_back()

    return MappedWeights(memory.handle, memory.size, starts, release, view)


async def receive(
    open_slot: OpenSlot,
    layout: WeightsLayout,
    incoming: Incoming,
    verify: Callable[[str], None],
    report: Report,
    elsewhere: Elsewhere | None = None,
    *,
    expected: str | None = None,
) -> Sink:
    """Return a sealed sink with what arrives; everybody who waits for it is told how it went.

    `elsewhere`, `expected`: as `fill_sink` takes them.

    Raises:
        WeightsRejected: It is not what was promised.
        EngineError: It did not arrive, or the engine has no room.
    """
    root: list[str] = []

    def verified(root_hash: str) -> None:
        verify(root_hash)
        root.append(root_hash)

    arrived = await incoming.opened()
    given = mapped(arrived.layout, arrived.memory)
    sink = await _pour(open_slot, layout, arrived, given, verified, report, elsewhere, expected)
    incoming.succeed(root[0])
    return sink


async def refill(
    open_slot: OpenSlot,
    layout: WeightsLayout,
    kept: Kept,
    verify: Callable[[str], None],
    elsewhere: Elsewhere | None = None,
) -> Sink:
    """Return a sealed sink with what is kept, whose root hash is computed in the scheme of its end.

    Raises:
        EngineError: The engine has no room.
    """
    given, expected = mapped(kept.layout, kept.memory), kept.end.root_hash
    return await _pour(
        open_slot, layout, kept, given, verify, lambda done, total: None, elsewhere, expected
    )


async def _pour(
    open_slot: OpenSlot,
    layout: WeightsLayout,
    source: ReadableSource,
    given: MappedWeights,
    verify: Callable[[str], None],
    report: Report,
    elsewhere: Elsewhere | None,
    expected: str | None,
) -> Sink:
    """As `fill_from_source`; the sink has `given` from then on, or nobody."""
    try:
        sink = await fill_from_source(
            open_slot, layout, source, verify, report, elsewhere, given=given, expected=expected
        )
    except BaseException:
        given.release()
        raise
    if not sink.took:
        given.release()
    return sink
