"""The path of a worker's Unix socket: who has it, when two workers want it, and which mode it gets."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

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
