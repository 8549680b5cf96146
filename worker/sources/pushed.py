"""Pushed bytes as a source of weights: tickets for who brings or fetches them, and the way into a sink."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from rollout_worker.engine import Layout, Mapped, Sink
from rollout_worker.schemas import OfferResponse, Transfer
from rollout_worker.transfer.frames import Connection, Frame, Kind, Malformed
from rollout_worker.transfer.layout import PushLayout

from .files import Report
from .filling import OpenSlot, pour
from .giving import Kept, give
from .incoming import Incoming, Memory
from .receiving import LEAVE_SECONDS, Receiving

logger = logging.getLogger(__name__)

OFFER_SECONDS = 120.0
"""How long the ticket of an offer is good: the peer has yet to be told of it."""
MAX_OFFERS = 256


@dataclass(frozen=True, slots=True)
class Address:
    """Where this worker takes weights: port over TCP, path and node of its Unix socket."""

    port: int | None = None
    socket: str | None = None
    node: str | None = None

    @property
    def anywhere(self) -> bool:
        """Whether a sender can reach it at all."""
        return self.port is not None or self.socket is not None


class Desk:
    """The tickets of one worker; asked by the loop and by the threads of connections."""

    def __init__(self) -> None:
        self.address = Address()
        self._lock = threading.Lock()
        self._expected: dict[str, Incoming] = {}
        self._offers: dict[str, tuple[float, Kept]] = {}

    def expect(self, incoming: Incoming) -> Transfer:
        """Return how to bring a version; a former ticket for it is void."""
        ticket = secrets.token_hex(16)
        with self._lock:
            self._expected = {ticket: incoming}  # there is one slot
        address = self.address
        return Transfer(ticket=ticket, port=address.port, socket=address.socket, node=address.node)

    def offer(self, kept: Kept) -> OfferResponse:
        """Return what a peer has to know to fetch what is kept; good once, and for a while."""
        assert self.address.port is not None, "the caller has looked"
        ticket, now = secrets.token_hex(16), time.monotonic()
        with self._lock:
            fresh = {t: (at, k) for t, (at, k) in self._offers.items() if now - at < OFFER_SECONDS}
            self._offers = dict(list(fresh.items())[-MAX_OFFERS + 1 :])
            self._offers[ticket] = (now, kept)
        return OfferResponse(
            ticket=ticket,
            port=self.address.port,
            layout_id=kept.layout.layout_id,
            bytes=kept.layout.nbytes,
            root_hash=kept.end.root_hash,
        )

    def withdraw(self) -> None:
        """Offer nothing that was offered any more."""
        with self._lock:
            self._offers = {}

    @property
    def idle(self) -> bool:
        """Whether no ticket is out, so that whoever connects can't have one."""
        with self._lock:
            return not self._expected and not self._offers

    def serve(self, connection: Connection, first: Frame) -> None:
        """Do what a connection has come for; `first` is its first frame. Blocks until it ends.

        Raises:
            TransferError: The connection has ended, or what came is no frame.
        """
        ticket = first.text("ticket", "", most=64)
        if first.kind is Kind.HELLO:
            with self._lock:
                incoming = self._expected.get(ticket)
            if incoming is not None:
                return Receiving(connection, first, incoming).run()
        elif first.kind is Kind.FETCH:
            with self._lock:
                at, kept = self._offers.pop(ticket, (0.0, None))
            if kept is not None and time.monotonic() - at < OFFER_SECONDS:
                return give(connection, kept)
        else:
            raise Malformed(f"{first.kind.name} came where HELLO or FETCH was due")
        detail = "the ticket is unknown, used or void: stage again for another one"
        connection.send(Kind.ERROR, {"slug": "bad-ticket", "detail": detail})
        connection.leave(LEAVE_SECONDS)


def mapped(layout: PushLayout, memory: Memory) -> Mapped:
    """Return the memory of a version as engines take it, held until it is released."""
    starts = {placed.name: placed.start for placed in layout.tensors}
    return Mapped(memory.handle, memory.size, starts, memory.hold())


async def receive(
    open_slot: OpenSlot,
    layout: Layout,
    incoming: Incoming,
    verify: Callable[[str], None],
    report: Report,
) -> Sink:
    """Return a sealed sink with what arrives; everybody who waits for it is told how it went.

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
    try:
        sink = await pour(open_slot, layout, arrived, verified, report, given=given)
    except BaseException:
        given.release()
        raise
    if not sink.took:
        given.release()
    incoming.succeed(root[0])
    return sink


async def refill(
    open_slot: OpenSlot, layout: Layout, kept: Kept, verify: Callable[[str], None]
) -> Sink:
    """Return a sealed sink with what is kept.

    Raises:
        EngineError: The engine has no room.
    """
    given = mapped(kept.layout, kept.memory)
    try:
        sink = await pour(open_slot, layout, kept, verify, given=given)
    except BaseException:
        given.release()
        raise
    if not sink.took:
        given.release()
    return sink
