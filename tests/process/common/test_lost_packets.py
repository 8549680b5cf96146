"""A network that loses large packets, as one whose MTU is smaller than the pods believe: what the error says."""

from __future__ import annotations

import asyncio
import ctypes
import socket
import struct
import time

import pytest

from rollout_common.transfer.connections.frame_sockets import LARGE_PACKETS_LOST
from rollout_common.transfer.connections.frame_stream import FrameStream
from rollout_common.transfer.connections.frames import Kind, TransferError, encode_frame

SO_ATTACH_FILTER = 26
LARGE = 600
PINGS, PING_SECONDS = 20, 0.2


def lose_packets(sock: socket.socket, above: int) -> None:
    """Have the kernel drop packets of more bytes before TCP sees them."""
    codes = [(0x80, 0, 0, 0), (0x25, 0, 1, above), (0x06, 0, 0, 0), (0x06, 0, 0, 0xFFFFFFFF)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in codes))
    packed = struct.pack("HxxxxxxQ", len(codes), ctypes.addressof(program))
    sock.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, packed)


async def ping_and_leave(sock: socket.socket) -> None:
    """Do what a receiver does that gets nothing: ping for a while, then close the connection."""
    for _ in range(PINGS):
        sock.send(encode_frame(Kind.PING, {}, 0))
        await asyncio.sleep(PING_SECONDS)
    sock.send(encode_frame(Kind.PING, {}, 0))  # on a busy machine the last one may be long ago
    sock.close()


@pytest.mark.parametrize(
    ("above", "said"), [(LARGE, LARGE_PACKETS_LOST), (0, ""), (2**30, "")],
    ids=["large ones", "all of them", "none"],
)  # fmt: skip
async def test_lost_large_packets_are_told_from_a_lost_peer(above: int, said: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        sock = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    stream = FrameStream(sock, silence=PINGS * PING_SECONDS)
    await stream.send(Kind.HELLO, {"ticket": "t"})
    assert other.recv(1000)  # unread bytes would end the connection in another way
    lose_packets(other, above)
    leaving = asyncio.create_task(ping_and_leave(other))
    began = time.monotonic()
    await stream.send(Kind.LAYOUT, {"names": "x" * 10_000})
    try:
        with pytest.raises(TransferError) as error:
            await stream.receive()
    finally:
        leaving.cancel()
        await stream.close()
        other.close()
    assert time.monotonic() - began < 20
    _, found, text = str(error.value).partition(";")
    assert found + text == said
