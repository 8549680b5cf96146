"""Connects the ranks of a trainer: they exchange addresses by their process group once, and use sockets afterwards.

A socket shows the death of a rank at once, independent of the group's time-out. Ranks of rank 0's node use
a Unix socket, which also carries its memory; those of other nodes use TCP.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollout_client.errors import PublishFailed
from rollout_common.transfer.frames import TransferError
from rollout_common.transfer.node import BOOT_ID

from .following import Following
from .leading import Leading
from .rank_door import ANYHOW, Door, Places, Reach, call

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


def meet(group: ProcessGroup, reach: Reach = ANYHOW) -> Leading | Following:
    """Return this rank's part in the group; a collective operation of all of its ranks.

    Args:
        group: The process group of the ranks.
        reach: How ranks of other nodes reach rank 0.

    Raises:
        ValueError: This process is not in the group.
        PublishFailed: A rank can't reach rank 0; all ranks raise the same.
        RuntimeError: Raised by the group, if one of the ranks is gone.
    """
    from torch import distributed

    rank, count = distributed.get_rank(group), distributed.get_world_size(group)
    if rank < 0:
        raise ValueError("ranks: this process is not in the group: only its ranks publish with it")
    facts: list[_Fact] = _gathered(group, _Fact(_node(), socket.gethostname()))
    far = {each for each in range(count) if facts[each].node != facts[0].node}
    if rank == 0:
        return _lead(group, facts, far, reach)
    return _follow(group, rank, facts, far, reach)


def _lead(
    group: ProcessGroup, facts: Sequence[_Fact], far: Collection[int], reach: Reach
) -> Leading:
    try:
        door = Door.open(len(facts), reach, afar=bool(far))
    except Exception as error:  # of any kind: the others wait for the group's next operation
        why = _said(error)
        _broadcast(group, why)
        raise PublishFailed(_unopened(facts[0], why)) from error
    try:
        _broadcast(group, door.places)
        _check(_gathered(group, None), facts, reach)
        return Leading(door.take(), far)
    except TransferError as error:
        raise PublishFailed(f"{error}: publish again") from error
    finally:
        door.close()


def _follow(
    group: ProcessGroup, rank: int, facts: Sequence[_Fact], far: Collection[int], reach: Reach
) -> Following:
    told: Places | str = _broadcast(group, None)
    if isinstance(told, str):
        raise PublishFailed(_unopened(facts[0], told))
    mine, why = None, None
    try:
        mine = call(told, rank, here=rank not in far)
    except TransferError as error:
        why = str(error)
    except Exception as error:  # noqa: BLE001  # of any kind: as above
        why = _said(error)
    try:
        _check(_gathered(group, why), facts, reach)
        assert mine is not None
        return Following(mine, rank)
    except BaseException:
        if mine is not None:
            mine.close()
        raise


def _check(unreached: Sequence[str | None], facts: Sequence[_Fact], reach: Reach) -> None:
    """Raise the same error on all ranks if one of them has not reached rank 0."""
    for rank, why in enumerate(unreached):
        if why is None:
            continue
        first, last = reach.ports or (None, None)
        ports = "on any port" if first is None else f"on the ports {first} to {last}"
        raise PublishFailed(
            f"rank {rank} on {facts[rank].host} can't reach rank 0 on {facts[0].host} ({why}): let the"
            f" trainer's nodes connect to each other by TCP {ports} (NetworkPolicy, firewall);"
            " ranks_ports bounds the ports, ranks_host says by which name rank 0 is reached"
        )


def _unopened(fact: _Fact, why: str) -> str:
    return f"rank 0 on {fact.host} can't be reached by the other ranks: {why}; see ranks_host and ranks_ports"


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"


def _gathered(group: ProcessGroup, mine: Any) -> list[Any]:
    from torch import distributed

    found: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(found, mine, group=group)
    return found


def _broadcast(group: ProcessGroup, value: Any) -> Any:
    from torch import distributed

    box = [value]
    distributed.broadcast_object_list(box, src=distributed.get_global_rank(group, 0), group=group)
    return box[0]


def _node() -> str:
    """Return an id that two processes share if they reach each other by a socket without a path."""
    return f"{BOOT_ID.read_text().strip()}/{os.stat('/proc/self/ns/net').st_ino}"
