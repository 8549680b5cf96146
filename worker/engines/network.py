"""The addresses of a gang's nodes: the head's, this node's own, and its interface.

Engines bind their collectives to the address that the host's name resolves to, which may be loopback, unless they
are given another. All functions block.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path

from rollout_worker.engine import EngineError
from rollout_worker.sources.source_reading import ReadCancelled

from .settings import RESOLVE_RETRY_SECONDS

SIOCGIFADDR = 0x8915
IF_INET6_FILE = Path("/proc/net/if_inet6")


def resolve_address(host: str, cancelled: Callable[[], bool]) -> str:
    """Return the address of a host, once its name resolves: DNS learns a pod's name after its start.

    Raises:
        ReadCancelled: `cancelled` returned true; there is not another deadline.
    """
    while True:
        try:
            found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            return str(found[0][4][0])
        except OSError:
            if cancelled():
                raise ReadCancelled from None
            time.sleep(RESOLVE_RETRY_SECONDS)


def own_address(other: str) -> str:
    """Return the address by which this node reaches another; nothing is sent."""
    family = socket.AF_INET6 if ":" in other else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((other, 9))
        except OSError as error:
            raise EngineError(f"no route to the gang's head at {other}: {error}") from error
        return str(probe.getsockname()[0])


def choose_interface(address: str) -> str:
    """Return the interface of a gang's collectives: the one that the environment names, or has this address."""
    return os.environ.get("GLOO_SOCKET_IFNAME") or find_interface(address)


def find_interface(address: str) -> str:
    """Return the name of the interface that has this address, or raise `EngineError`."""
    wanted = ipaddress.ip_address(address)
    if wanted.is_loopback:
        return "lo"
    for _, name in socket.if_nameindex():
        if wanted in _interface_addresses(name):
            return name
    raise EngineError(
        f"no network interface has the address {address}: name it in engine.env (GLOO_SOCKET_IFNAME)"
    )


def _interface_addresses(interface: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    found: list[ipaddress.IPv4Address | ipaddress.IPv6Address] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            asked = struct.pack("256s", interface.encode()[:15])
            found.append(ipaddress.IPv4Address(fcntl.ioctl(probe, SIOCGIFADDR, asked)[20:24]))
        except OSError:
            pass  # it has no IPv4 address
    lines = IF_INET6_FILE.read_text().splitlines() if IF_INET6_FILE.exists() else []
    for line in lines:
        digits, *_, name = line.split()
        if name == interface:
            found.append(ipaddress.IPv6Address(bytes.fromhex(digits)))
    return found
