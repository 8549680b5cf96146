"""Finds the addresses by which other nodes may reach this one: all but loopback, the likeliest first."""

from __future__ import annotations

import array
import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
from pathlib import Path

MAX_ADDRESSES = 16
"""Most addresses that are offered: each wrong one costs its caller some seconds."""

_INET6 = Path("/proc/net/if_inet6")
_SIOCGIFCONF = 0x8912
_IFREQ_BYTES = 40
"""Size of `struct ifreq` on 64-bit Linux; bytes 20 to 24 are the address."""
_BUFFER_BYTES = 1 << 16
_GLOBAL, _UNUSABLE = 0x00, 0x40 | 0x20 | 0x08
"""Scope of an IPv6 address that others may use; flags of one that is tentative, deprecated or a duplicate."""
_REMOTE_ADDRESSES = ((socket.AF_INET, "198.51.100.1"), (socket.AF_INET6, "2001:db8::1"))
"""Unused addresses: the kernel says from which of its addresses this host would reach them."""


def offered_addresses() -> list[str]:
    """Return the addresses of this host that others should try, in that order.

    `MASTER_ADDR` comes first if it is this host's (rank 0 of a group need not be the group's first
    host), then those of the default routes, then all others.
    """
    own = _own_addresses()
    first = [
        each
        for each in [*_resolve_host(os.environ.get("MASTER_ADDR")), *_default_route_addresses()]
        if each in own
    ]
    return list(dict.fromkeys([*first, *own]))[:MAX_ADDRESSES]


def _own_addresses() -> list[str]:
    found = [*_ipv4_addresses(), *_ipv6_addresses()]
    return [
        each
        for each in found
        if not (address := ipaddress.ip_address(each)).is_loopback and not address.is_link_local
    ]


def _ipv4_addresses() -> list[str]:
    buffer = array.array("B", bytes(_BUFFER_BYTES))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        asked = struct.pack("iP", _BUFFER_BYTES, buffer.buffer_info()[0])
        size, _ = struct.unpack("iP", fcntl.ioctl(sock, _SIOCGIFCONF, asked))
    content = buffer.tobytes()
    return [
        socket.inet_ntoa(content[at + 20 : at + 24])
        for at in range(0, size - _IFREQ_BYTES + 1, _IFREQ_BYTES)
    ]


def _ipv6_addresses() -> list[str]:
    try:
        lines = _INET6.read_text().splitlines()
    except OSError:  # a kernel without it
        return []
    found = []
    for address, _, _, scope, flags, _ in map(str.split, lines):
        if int(scope, 16) == _GLOBAL and not int(flags, 16) & _UNUSABLE:
            found.append(str(ipaddress.IPv6Address(int(address, 16))))
    return found


def _resolve_host(host: str | None) -> list[str]:
    if not host:
        return []
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # an unknown name, or not a valid one
        return []
    return [str(each[4][0]) for each in found]


def _default_route_addresses() -> list[str]:
    found = []
    for family, remote in _REMOTE_ADDRESSES:
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect((remote, 9))  # sends nothing
            found.append(str(sock.getsockname()[0]))
    return found
