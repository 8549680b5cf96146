"""Chooses how each replica gets the bytes: shared memory on this machine, else TCP, also from other replicas. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pydantic import TypeAdapter

from rollout_client.errors import PublishFailed
from rollout_common.transfer.connections.frames import fetch_ticket, origin_ticket
from rollout_common.transfer.connections.node_identity import node_of
from rollout_common.wire import Transfer

Transport = Literal["auto", "shm", "tcp", "nixl"]
TRANSPORTS: tuple[Transport, ...] = ("auto", "shm", "tcp", "nixl")
RouteKind = Literal["shm", "tcp", "nixl"]

MAX_HOLDERS = 32
"""Most other replicas that one fetches from: in a larger group, the pieces of the others come through these."""


@dataclass(frozen=True, slots=True)
class Receiver:
    """A replica that waits for the bytes.

    Attributes:
        name: The name of the replica.
        host: The host of its ports.
        transfer: Its answer to the stage.
        based: Whether it serves the previous version, and takes deltas from it.
    """

    name: str
    host: str
    transfer: Transfer
    based: bool = False


@dataclass(frozen=True, slots=True)
class Route:
    """One connection of the trainer, and the other holders of its replica.

    Attributes:
        kind: Shared memory or TCP; `nixl` is TCP, but the replica reads the bytes itself.
        receiver: The replica.
        share: Not by shared memory: the number of its share of the trainer's pieces, and how many shares there are.
        holders: Not by shared memory: the other replicas that it fetches from, as `LAYOUT` names them.
        is_lead: Whether the sender has everything, or knows who has, and says how the publish goes; else it only serves
            the part of the version that its node has.
    """

    kind: RouteKind
    receiver: Receiver
    share: tuple[int, int] = (0, 1)
    holders: tuple[Mapping[str, object], ...] = ()
    is_lead: bool = True

    @property
    def based(self) -> bool:
        """Whether deltas from the previous version may be sent on this route."""
        return self.kind != "shm" and self.receiver.based

    @property
    def for_part(self) -> Route:
        """The route by which another node of the trainer serves the part that it has."""
        transfer = self.receiver.transfer
        ticket = origin_ticket(transfer.ticket)
        receiver = replace(self.receiver, transfer=transfer.model_copy(update={"ticket": ticket}))
        return Route(self.kind, receiver, is_lead=False)


ROUTES = TypeAdapter(list[Route])
"""The routes of another node, as rank 0 sends them."""


def routes_for(
    receivers: Sequence[Receiver],
    transport: Transport,
    sources: float = 1.0,
    *,
    node: Callable[[str], str | None] = node_of,
) -> tuple[Route, ...]:
    """Return a route for each replica, those of this machine first.

    Args:
        receivers: All replicas that wait for the bytes.
        transport: `auto`: shared memory where the replica's socket is on this machine, TCP to all others.
            `nixl`: TCP to all, and NIXL for the bytes.
        sources: How many nodes of the trainer serve, by their parts: half of it on one is two.
        node: Returns the id of a socket's path here, to compare with the replica's `Transfer.node`.

    Raises:
        PublishFailed: A replica can't be reached by this transport; names it and the fix.
    """
    local, remote = [], []
    for each in receivers:
        if transport in ("auto", "shm") and _is_here(each.transfer, node):
            local.append(each)
        elif transport == "shm":
            raise PublishFailed(_why_not_here(each.transfer), replica=each.name)
        elif each.transfer.port is None:
            raise PublishFailed(
                "it has no port for weights: start it with --weights-port, or with a "
                "--weights-socket that this process sees, too",
                replica=each.name,
            )
        else:
            remote.append(each)
    kind: RouteKind = "nixl" if transport == "nixl" else "tcp"
    # A replica without the base sends whole pieces only, so replicas with and without it are two groups.
    based, whole = ([each for each in remote if each.based is of] for of in (True, False))
    return (
        *(Route("shm", each) for each in local),
        *_share_among(based, sources, kind),
        *_share_among(whole, sources, kind),
    )


def count_shares(replicas: int, sources: float) -> int:
    """Return into how many shares the pieces are cut: a replica fetches one from the trainer, the rest from the others.

    So many that all links, the trainer's and the replicas', take about as long; from one node each piece leaves once. As
    many replicas have each share: where they can't, `bench weights` found it slower than a share for each.
    """
    wanted = min(replicas, max(1, round(1 + replicas / sources)))
    return next(count for count in range(wanted, replicas + 1) if not replicas % count)


def _share_among(group: Sequence[Receiver], sources: float, kind: RouteKind) -> Iterator[Route]:
    """Yield routes by which each of a group fetches a share from the trainer, and the rest from the others."""
    count = count_shares(len(group), sources) if group else 0
    for index, each in enumerate(group):
        holders = tuple(_holder(group[other]) for other in _neighbours(index, len(group)))
        yield Route(kind, each, (index % count, count), holders)


def _neighbours(index: int, count: int) -> list[int]:
    """Return the others that one fetches from: all, or in a large group those at doubling distances, both ways."""
    if count - 1 <= MAX_HOLDERS:
        return [other for other in range(count) if other != index]
    found: dict[int, None] = {}
    for power in range(count.bit_length()):
        for step in (1 << power, -(1 << power)):
            found.setdefault((index + step) % count)
    found.pop(index, None)
    return list(found)[:MAX_HOLDERS]


def _holder(receiver: Receiver) -> Mapping[str, object]:
    transfer = receiver.transfer
    return {
        "host": receiver.host,
        "port": transfer.port,
        "ticket": fetch_ticket(transfer.ticket),
        "name": receiver.name,
    }


def _is_here(transfer: Transfer, node: Callable[[str], str | None]) -> bool:
    return (
        transfer.socket is not None
        and transfer.node is not None
        and node(transfer.socket) == transfer.node
    )


def _why_not_here(transfer: Transfer) -> str:
    if transfer.socket is None:
        return (
            "it takes no shared memory: start it with --weights-socket, or publish with "
            "transport='auto'"
        )
    return (
        f"its socket {transfer.socket} is not seen from here: mount its folder at the same path in "
        "both containers of one machine, or publish with transport='auto'"
    )
