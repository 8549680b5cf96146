"""How the bytes get to each replica: shared memory on this machine, else chains over TCP. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from rollout_client.errors import PublishFailed
from rollout_common.transfer.node import node_of
from rollout_common.wire import Transfer

Transport = Literal["auto", "shm", "tcp"]
TRANSPORTS: tuple[Transport, ...] = ("auto", "shm", "tcp")

CHAIN = 16
"""Most replicas of one chain: each hop adds a chunk's time, each chain takes a share of the link."""


@dataclass(frozen=True, slots=True)
class Receiver:
    """A replica that waits for the bytes.

    Attributes:
        name: Of the member.
        host: Of its ports.
        transfer: As it answered to the stage.
        based: Whether it serves the version before, and takes what differs from it.
    """

    name: str
    host: str
    transfer: Transfer
    based: bool = False


@dataclass(frozen=True, slots=True)
class Route:
    """One connection, and who gets the bytes through it.

    Attributes:
        kind: Shared memory or TCP.
        receivers: One, or over TCP a chain: each passes on to the next.
    """

    kind: Literal["shm", "tcp"]
    receivers: tuple[Receiver, ...]

    @property
    def based(self) -> bool:
        """Whether what differs from the version before may go this way."""
        return self.kind == "tcp" and all(each.based for each in self.receivers)


def routes_for(
    receivers: Sequence[Receiver],
    transport: Transport,
    *,
    node: Callable[[str], str | None] = node_of,
) -> tuple[Route, ...]:
    """Return all connections to make, those of this machine first.

    Args:
        receivers: In the order in which chains are to go.
        transport: `auto`: shared memory where the replica's socket is here, TCP to all others.
        node: What a socket's path is here, as `Transfer.node` is there.

    Raises:
        PublishFailed: A replica can't be reached in this way; names it and the fix.
    """
    local, remote = [], []
    for each in receivers:
        if transport != "tcp" and _is_here(each.transfer, node):
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
    # A chain passes on what it gets, so all of one have the same base or none.
    based, whole = ([each for each in remote if each.based is of] for of in (True, False))
    return (
        *(Route("shm", (each,)) for each in local),
        *(Route("tcp", chain) for chain in (*_chains(based), *_chains(whole))),
    )


def _chains(remote: Sequence[Receiver]) -> Iterator[tuple[Receiver, ...]]:
    """Cut into as few chains as may be, as even as can be: the longest is what all wait for."""
    chains = math.ceil(len(remote) / CHAIN)
    for index in range(chains):
        yield tuple(remote[index * len(remote) // chains : (index + 1) * len(remote) // chains])


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
