"""How the ranks of a trainer find each other: by their process group once, then over Unix sockets.

A rank that dies is noticed at once by its socket, whatever the group's time-out is. Ranks of other
nodes can't be met so: then all are `Apart`, and the group itself is what they speak through.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
from typing import TYPE_CHECKING, Any

from rollout_client.steering.protocol import Published
from rollout_client.steering.spool import drain_here
from rollout_worker.transfer.connection import Connection
from rollout_worker.transfer.frames import Kind, TransferError
from rollout_worker.transfer.node import BOOT_ID

from .following import Following
from .leading import Leading
from .outcome import of_json, to_json

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from rollout_client.steering.spool import Tensors

MEET_SECONDS = 30.0
_NAME = "rollout-ranks-"


class _Scattered:
    """A rank of those that are not all on one node: tensors are gathered.

    Args:
        group: The ranks'.
    """

    broken = False

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    def close(self) -> None:
        """Give up nothing: the group is the trainer's."""


class Apart(_Scattered):
    """Rank 0 of these ranks, which publishes."""

    def tell(self, outcome: Published | BaseException) -> None:
        """Tell the others how it went, who have gathered all tensors with this rank."""
        _broadcast(self._group, to_json(outcome))


class Gathering(_Scattered):
    """Another one of these ranks."""

    def take_part(self, version: int, tensors: Tensors, seconds: float) -> Published:
        """Gather with the others, and return what rank 0 has published.

        Raises:
            RolloutError: It has not.
        """
        drain_here(tensors)
        return of_json(_broadcast(self._group, None))


Leads = Leading | Apart
Follows = Following | Gathering


def meet(group: ProcessGroup) -> Leads | Follows:
    """Return this rank's part; a collective operation of all ranks of the group.

    Raises:
        ValueError: This process is not in the group.
        RuntimeError: The group's, if one of them is gone.
    """
    from torch import distributed

    rank, count = distributed.get_rank(group), distributed.get_world_size(group)
    if rank < 0:
        raise ValueError("ranks: this process is not in the group: only its ranks publish with it")
    listening = _listen(count) if rank == 0 else None
    try:
        address, node = _broadcast(group, listening and (listening.getsockname(), _node()))
        mine = _connect(address, rank) if rank and node == _node() else None
        met: list[Any] = [None] * count
        distributed.all_gather_object(met, rank == 0 or mine is not None, group=group)
        if not all(met):
            if mine is not None:
                mine.close()
            return Gathering(group) if rank else Apart(group)
        if listening is not None:
            return Leading(_accepted(listening, count))
        assert mine is not None
        return Following(mine, rank)
    finally:
        if listening is not None:
            listening.close()


def _broadcast(group: ProcessGroup, value: Any) -> Any:
    from torch import distributed

    box = [value]
    distributed.broadcast_object_list(box, src=distributed.get_global_rank(group, 0), group=group)
    return box[0]


def _node() -> str:
    """Name what two processes must share to reach each other by a socket without a path."""
    return f"{BOOT_ID.read_text().strip()}/{os.stat('/proc/self/ns/net').st_ino}"


def _listen(count: int) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind(f"\0{_NAME}{secrets.token_hex(16)}")
    sock.listen(count)
    sock.settimeout(MEET_SECONDS)
    return sock


def _connect(address: bytes | str, rank: int) -> Connection | None:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(address)
        connection = Connection(sock)
        connection.send(Kind.HELLO, {"rank": rank})
    except (OSError, TransferError):
        sock.close()
        return None
    return connection


def _accepted(listening: socket.socket, count: int) -> dict[int, Connection]:
    """Return the connections of all other ranks: they stand already."""
    found: dict[int, Connection] = {}
    try:
        while len(found) < count - 1:
            sock, _ = listening.accept()
            if _user(sock) != os.getuid():  # a socket without a path has no permissions
                sock.close()
                continue
            connection = Connection(sock)
            found[connection.expect(Kind.HELLO).integer("rank", 1, count - 1)] = connection
    except BaseException:
        for connection in found.values():
            connection.close()
        raise
    return found


def _user(sock: socket.socket) -> int:
    size = struct.calcsize("3i")
    _, user, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return int(user)
