"""The sockets that a worker listens on."""

from __future__ import annotations

import asyncio
import socket

from rollout_worker.ports.port_connections import bind_port


async def test_small_pieces_are_sent_at_once() -> None:
    """Else every answer on a kept-alive connection takes 40 ms longer."""
    accepted: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def look(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sock = writer.get_extra_info("socket")
        accepted.set_result(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    sock = bind_port("127.0.0.1", 0, "--data-port")
    async with await asyncio.start_server(look, sock=sock):
        _, writer = await asyncio.open_connection(*sock.getsockname())
        assert await asyncio.wait_for(accepted, 5)
        writer.close()
