"""Connects the ranks of a trainer: they exchange addresses by their process group once, and use sockets afterwards.

A socket shows the death of a rank at once, independent of the group's time-out. The lowest
rank of each node leads the others of it by a Unix socket, which also carries its memory; rank 0 leads these leads by TCP.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from rollout_client.errors import PublishFailed
from rollout_client.steering.pushing.options import ListenAddress
from rollout_common.transfer.connections.blocking_connection import Connection
from rollout_common.transfer.connections.frames import TransferError
from rollout_common.transfer.connections.node_identity import BOOT_ID

from .node_lead import NodeLead
from .rank_follower import RankFollower
from .rank_group import RankGroup
from .rank_listener import RankAddresses, RankListener, call_leader
from .rank_zero import RankZero

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, slots=True)
class _Fact:
    """What each rank reports to all others.

    Attributes:
        node: Equal for two processes that reach each other by a socket without a path.
        host: The name of its host, for errors.
    """

    node: str
    host: str


@dataclass(frozen=True, slots=True)
class _Team:
    """The place of one rank among all ranks: the lowest rank of each node leads it, and rank 0 leads all nodes.

    Attributes:
        rank: Its number.
        nodes: By lead: the ranks of its node, in ascending order.
    """

    rank: int
    nodes: Mapping[int, Sequence[int]]

    @classmethod
    def of(cls, rank: int, facts: Sequence[_Fact]) -> Self:
        """Return the place of a rank, by what all of them report."""
        by_node: dict[str, list[int]] = {}
        for each, fact in enumerate(facts):
            by_node.setdefault(fact.node, []).append(each)
        return cls(rank, {ranks[0]: ranks for ranks in by_node.values()})

    @property
    def lead(self) -> int:
        """The lead of its node."""
        return next(lead for lead, ranks in self.nodes.items() if self.rank in ranks)

    @property
    def leader(self) -> int:
        """The rank that leads this one; rank 0 has none."""
        return self.lead if self.lead != self.rank else 0

    @property
    def below(self) -> Sequence[int]:
        """The ranks that this one leads."""
        own = self.nodes.get(self.rank, ())[1:]
        return [*own, *(lead for lead in self.nodes if lead)] if self.rank == 0 else own


def meet(group: ProcessGroup, reach: ListenAddress) -> RankZero | RankFollower:
    """Return this rank's part in the group; a collective operation of all of its ranks.

    Raises:
        ValueError: This process is not in the group.
        PublishFailed: A rank can't reach the one that leads it; all ranks raise the same. Or one is gone, or did not
            come within the group's own time-out.
    """
    from torch import distributed

    rank = distributed.get_rank(group)
    if rank < 0:
        raise ValueError("ranks: this process is not in the group: only its ranks publish with it")
    facts: list[_Fact] = _all_gather(group, _Fact(_node_identity(), socket.gethostname()))
    return _join_team(group, _Team.of(rank, facts), facts, reach)


def _join_team(
    group: ProcessGroup, team: _Team, facts: Sequence[_Fact], reach: ListenAddress
) -> RankZero | RankFollower:
    """Connect this rank to the one that leads it and to those that it leads."""
    with contextlib.ExitStack() as undone:
        listener, failure = _open_listener(team, reach)
        if listener is not None:
            undone.callback(listener.close)
        gathered: list[RankAddresses | str | None] = _all_gather(
            group, listener.places if listener else failure
        )
        for each, place in enumerate(gathered):
            if isinstance(place, str):
                raise PublishFailed(
                    f"rank {each} on {facts[each].host} can't be reached by the other ranks: {place};"
                    " see ranks_host and ranks_ports"
                )
        up, why = _call_leader(team, gathered[team.leader]) if team.rank else (None, None)
        if up is not None:
            undone.callback(up.close)
        _check_reached(_all_gather(group, why), facts, reach)
        try:
            connections = {} if listener is None else listener.take_connections()
        except TransferError as error:
            raise PublishFailed(f"{error}: publish again") from error
        undone.pop_all()
    if up is None:
        return RankZero(RankGroup(0, connections, {k: v for k, v in team.nodes.items() if k}))
    if team.lead == team.rank:
        return NodeLead(up, team.rank, RankGroup(team.rank, connections))
    return RankFollower(up, team.rank, team.leader)


def _open_listener(team: _Team, reach: ListenAddress) -> tuple[RankListener | None, str | None]:
    """Return the listener for the ranks that this one leads, if there are any; or why there is none."""
    if not team.below:
        return None, None
    try:
        return RankListener.open(
            team.below, reach, afar=team.rank == 0 and len(team.nodes) > 1
        ), None
    except Exception as error:  # noqa: BLE001  # of any kind: the others wait for the group's next operation
        return None, _error_text(error)


def _call_leader(
    team: _Team, places: RankAddresses | str | None
) -> tuple[Connection | None, str | None]:
    """Return the connection to the rank that leads this one; or why there is none."""
    assert isinstance(places, RankAddresses), "it leads this rank, so it listens"
    try:
        return call_leader(places, team.rank, here=team.leader == team.lead), None
    except Exception as error:  # noqa: BLE001  # of any kind: as above
        return None, _error_text(error)


def _check_reached(
    unreached: Sequence[str | None], facts: Sequence[_Fact], reach: ListenAddress
) -> None:
    """Raise the same error on all ranks if one of them has not reached the rank that leads it."""
    for rank, why in enumerate(unreached):
        if why is None:
            continue
        leader = _Team.of(rank, facts).leader
        first, last = reach.ports or (None, None)
        ports = "on any port" if first is None else f"on the ports {first} to {last}"
        raise PublishFailed(
            f"rank {rank} on {facts[rank].host} can't reach rank {leader} on {facts[leader].host} ({why}): let the"
            f" trainer's nodes connect to each other by TCP {ports} (NetworkPolicy, firewall);"
            " ranks_ports bounds the ports, ranks_host says by which name rank 0 is reached"
        )


def _error_text(error: Exception) -> str:
    named = isinstance(error, OSError | TransferError)
    return str(error) if named else f"{type(error).__name__}: {error}"


def _all_gather(group: ProcessGroup, mine: Any) -> list[Any]:
    from torch import distributed

    found: list[Any] = [None] * distributed.get_world_size(group)
    try:
        distributed.all_gather_object(found, mine, group=group)
    except RuntimeError as error:
        raise PublishFailed(
            "the ranks of the group can't meet: one of them is gone, or did not call publish_weights within the group's"
            f" own time-out; a trainer that lost a rank must start again ({error})"
        ) from error
    return found


def _node_identity() -> str:
    """Return an id that two processes share if they reach each other by a socket without a path."""
    return f"{BOOT_ID.read_text().strip()}/{os.stat('/proc/self/ns/net').st_ino}"
