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

MOST = 16
"""Most addresses that are offered: each wrong one costs its caller some seconds."""

_INET6 = Path("/proc/net/if_inet6")
_SIOCGIFCONF = 0x8912
_ENTRY = 40
"""Size of `struct ifreq` on 64-bit Linux; bytes 20 to 24 are the address."""
_ROOM = 1 << 16
_GLOBAL, _USELESS = 0x00, 0x40 | 0x20 | 0x08
"""Scope of an IPv6 address that others may use; flags of one that is tentative, deprecated or a duplicate."""
_SOMEWHERE = ((socket.AF_INET, "198.51.100.1"), (socket.AF_INET6, "2001:db8::1"))
"""Unused addresses: the kernel says from which of its addresses this host would reach them."""


def offered() -> list[str]:
    """Return the addresses of this host that others should try, in that order.

    `MASTER_ADDR` comes first if it is this host's (rank 0 of a group need not be the group's first
    host), then those of the default routes, then all others.
    """
    own = _own()
    first = [
        each for each in [*_resolved(os.environ.get("MASTER_ADDR")), *_outward()] if each in own
    ]
    return list(dict.fromkeys([*first, *own]))[:MOST]


def _own() -> list[str]:
    found = [*_ipv4(), *_ipv6()]
    return [
        each
        for each in found
        if not (address := ipaddress.ip_address(each)).is_loopback and not address.is_link_local
    ]


def _ipv4() -> list[str]:
    room = array.array("B", bytes(_ROOM))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        asked = struct.pack("iP", _ROOM, room.buffer_info()[0])
        size, _ = struct.unpack("iP", fcntl.ioctl(sock, _SIOCGIFCONF, asked))
    content = room.tobytes()
    return [
        socket.inet_ntoa(content[at + 20 : at + 24]) for at in range(0, size - _ENTRY + 1, _ENTRY)
    ]


def _ipv6() -> list[str]:
    try:
        lines = _INET6.read_text().splitlines()
    except OSError:  # a kernel without it
        return []
    found = []
    for address, _, _, scope, flags, _ in map(str.split, lines):
        if int(scope, 16) == _GLOBAL and not int(flags, 16) & _USELESS:
            found.append(str(ipaddress.IPv6Address(int(address, 16))))
    return found


def _resolved(host: str | None) -> list[str]:
    if not host:
        return []
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # an unknown name, or not a valid one
        return []
    return [str(each[4][0]) for each in found]


def _outward() -> list[str]:
    found = []
    for family, somewhere in _SOMEWHERE:
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect((somewhere, 9))  # sends nothing
            found.append(str(sock.getsockname()[0]))
    return found
