"""Listening sockets: on every address of either family, or on one."""

from __future__ import annotations

import errno
import socket

import pytest

from rollout_common.listening_sockets import EVERY_ADDRESS, open_listening_socket


@pytest.mark.parametrize("caller", ["127.0.0.1", "::1"])
def test_callers_of_both_families_reach_every_address(caller: str) -> None:
    with open_listening_socket(EVERY_ADDRESS, 0, 8) as server:
        socket.create_connection((caller, server.getsockname()[1]), timeout=5).close()


def test_a_machine_without_ipv6_is_reached_by_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.socket

    def without_ipv6(family: int, *args: int) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "not supported")
        return real(family, *args)

    monkeypatch.setattr(socket, "socket", without_ipv6)
    with open_listening_socket(EVERY_ADDRESS, 0, 8) as server:
        assert server.getsockname()[0] == "0.0.0.0"


@pytest.mark.parametrize("host", [EVERY_ADDRESS, "127.0.0.1"])
def test_a_port_that_is_taken_is_refused(host: str) -> None:
    with (
        open_listening_socket("127.0.0.1", 0, 8) as first,
        pytest.raises(OSError, match="already in use"),
    ):
        open_listening_socket(host, first.getsockname()[1], 8)
