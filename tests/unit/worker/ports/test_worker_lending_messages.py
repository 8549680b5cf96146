"""How the worker waits for the messages of trainers that lend to it."""

from __future__ import annotations

import socket

import pytest

from rollout_common.transfer.connections.descriptor_messages import send_message
from rollout_common.transfer.connections.frames import Ended, Silent
from rollout_worker.ports.borrowed_version import next_message


def pair() -> tuple[socket.socket, socket.socket]:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    here.setblocking(False)
    return here, there


async def test_a_silent_socket_that_is_closed_leaves_its_number_usable() -> None:
    here, there = pair()
    with there, here:
        number = here.fileno()
        with pytest.raises(Silent, match=r"within 0\.01 s"):
            await next_message(here, 0.01)
    here, there = pair()
    with there, here:
        assert number in (here.fileno(), there.fileno())
        if there.fileno() == number:
            here, there = there, here
            here.setblocking(False)
            there.setblocking(True)
        send_message(there, {"x": 1})
        assert await next_message(here, 5) == ({"x": 1}, [])
        there.close()
        with pytest.raises(Ended):
            await next_message(here, None)
