"""The sockets that a worker listens on: how soon they send, and a Unix socket's path, owner and mode."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from pathlib import Path

import pytest

from rollout_worker.ports.port_connections import bind_port
from rollout_worker.ports.unix_socket import (
    _allow_all_users,
    listen_at_path,
    remove_socket,
    socket_identity,
)
from rollout_worker.settings import InvalidSettings


def test_a_worker_that_ends_leaves_its_successors_socket(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "weights.sock"
    with listen_at_path(path, 1) as former:
        made = socket_identity(path)
        assert not caplog.records
        with listen_at_path(path, 1) as successor:
            assert "another process listens" in caplog.text
            remove_socket(path, made)
            former.close()
            with socket.socket(socket.AF_UNIX) as caller:
                caller.connect(str(path))
                successor.accept()[0].close()
            remove_socket(path, socket_identity(path))
    assert not path.exists()
    remove_socket(path, made)


def test_what_a_dead_worker_left_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "weights.sock"
    listen_at_path(path, 1).close()
    listen_at_path(path, 1).close()
    path.unlink()
    path.write_text("mine")
    with pytest.raises(InvalidSettings, match="can't be used: Address already in use"):
        listen_at_path(path, 1)
    assert path.read_text() == "mine"


def test_everybody_may_connect_whatever_the_umask(tmp_path: Path) -> None:
    former = os.umask(0o077)
    try:
        listen_at_path(tmp_path / "weights.sock", 1).close()
    finally:
        os.umask(former)
    assert stat.S_IMODE(os.lstat(tmp_path / "weights.sock").st_mode) == 0o666


def test_no_link_in_its_place_is_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.touch(0o600)
    link = tmp_path / "weights.sock"
    link.symlink_to(secret)
    with pytest.raises(FileExistsError, match="another file"):
        _allow_all_users(link)
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600


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
