"""Listening sockets of servers that other machines reach, by IPv4, IPv6 or both."""

from __future__ import annotations

import errno
import socket

EVERY_ADDRESS = "::"
"""Every address of the machine, of IPv6 and of IPv4: pods of a cluster may have either alone."""

_NO_IPV6 = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)


def open_listening_socket(host: str, port: int, backlog: int) -> socket.socket:
    """Listen on an address; on `EVERY_ADDRESS` by IPv4 alone where the machine has no IPv6.

    Raises:
        OSError: The port is taken, or the address is not ours.
    """
    try:
        return _listen_on(host, port, backlog)
    except OSError as error:
        if host != EVERY_ADDRESS or error.errno not in _NO_IPV6:
            raise
    return _listen_on("0.0.0.0", port, backlog)


def _listen_on(host: str, port: int, backlog: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sends small pieces at once (TCP_NODELAY) only where the protocol is named: without it a
    # body waits for the acknowledgement of its header, up to 40 ms with a connection kept alive.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if host == EVERY_ADDRESS:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind((host, port))
        # Only now it fails if another socket has the port on another address of ours.
        sock.listen(backlog)
    except OSError:
        sock.close()
        raise
    return sock
