"""The host's side of the nodes' network: a bridge per cluster, routes to pods and services.

The bridge's alias is the cluster's state folder, so the link itself names its owner.
"""

from __future__ import annotations

import ipaddress
import json
import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

from .home import ClusterError
from .settings import Network

# Marks our unreachable routes, so that no others are removed (rt_protos leaves this number free).
_PROTOCOL = "177"
_METRIC = "4096"

# iproute2 6.1 sometimes prints garbage while another process changes links.
_TRIES = 5


def reserve(state: Path) -> Network:
    """Make a bridge for the cluster of this state, with the first unused network."""
    taken = _addresses()
    for slot in Network.SLOTS:
        network = Network(slot)
        ours = ipaddress.ip_network(network.cidr), ipaddress.ip_network(network.services)
        if any(address in cidr for address in taken for cidr in ours):
            continue
        # Fails if another cluster makes it at this moment; then the next slot is tried.
        if _ip("link", "add", network.bridge, "type", "bridge", check=False):
            _ip("link", "set", network.bridge, "alias", str(state))
            _ip("address", "add", f"{network.host}/24", "dev", network.bridge)
            _ip("link", "set", network.bridge, "up")
            keep_inside(network)
            return network
    raise ClusterError(
        f"all {len(Network.SLOTS)} networks for clusters with nodes (10.177.0.0/16 and up) are "
        "in use: stop another cluster, or use `--nodes 0` (control plane only)"
    )


def keep_inside(network: Network) -> None:
    """Keep cluster addresses off the machine's default route."""
    if os.geteuid() == 0:
        for cidr in (network.cidr, network.services):
            _ip("route", "add", *_unreachable(cidr), check=False)


def deliver_here(network: Network) -> None:
    """Let this machine answer at every address of kwok's pods, until `tidy` or `deliver_nowhere`."""
    _ip("route", "replace", *_local(network))


def deliver_nowhere(network: Network) -> None:
    """Undo `deliver_here`; nothing happens if it was not called."""
    _ip("route", "delete", *_local(network), check=False)


def add_routes(network: Network, index: int) -> None:
    """Route a node's pods to it; services go through the first living node."""
    via = ("via", network.node(index), "dev", network.bridge, "onlink")
    _ip("route", "replace", network.node_pods(index), *via)
    _ip("route", "replace", network.services, *via, "metric", str(index))


def remove_routes(network: Network, index: int) -> None:
    """Undo `add_routes`; nothing happens if they are gone."""
    _ip("route", "delete", network.node_pods(index), check=False)
    via = ("via", network.node(index), "dev", network.bridge, "metric", str(index))
    _ip("route", "delete", network.services, *via, check=False)


def owned_bridges(below: Path) -> dict[str, Path]:
    """Return bridge → state of the clusters whose state is `below` this folder or is it."""
    found = {}
    for link in _json("link", "show", "type", "bridge"):
        state = Path(link.get("ifalias", "/"))
        if link["ifname"].startswith("rollout") and state.is_relative_to(below):
            found[link["ifname"]] = state
    return found


def bridges() -> set[str]:
    """Return the bridges of all clusters of this machine, of other checkouts too."""
    names = (link["ifname"] for link in _json("link", "show", "type", "bridge"))
    return {name for name in names if name in {Network(slot).bridge for slot in Network.SLOTS}}


def release(below: Path) -> bool:
    owned = owned_bridges(below)
    for bridge in owned:
        _ip("link", "delete", bridge)
    return bool(owned)


def tidy() -> None:
    """Remove our unreachable routes of networks that no cluster uses."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return
    used = bridges()
    for slot in Network.SLOTS:
        network = Network(slot)
        if network.bridge not in used:
            deliver_nowhere(network)
            for cidr in (network.cidr, network.services):
                _ip("route", "delete", *_unreachable(cidr), check=False)


def connect(network: Network, index: int, pid: int) -> None:
    """Give the network namespace of process `pid` a link `eth0` into the bridge."""
    outside = f"{network.bridge}n{index}"
    # Connections that were open when a node ended keep its namespace, and this link of it, for a while.
    _ip("link", "delete", outside, check=False)
    _ip("link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", str(pid))
    _ip("link", "set", outside, "master", network.bridge, "up")


def _unreachable(cidr: str) -> tuple[str, ...]:
    return ("unreachable", cidr, "metric", _METRIC, "protocol", _PROTOCOL)


def _local(network: Network) -> tuple[str, ...]:
    fake = ipaddress.ip_network(network.fake_pods, strict=False)
    return ("local", str(fake), "dev", "lo", "protocol", _PROTOCOL)


def _addresses() -> list[ipaddress.IPv4Address]:
    found = [entry for link in _json("-4", "address", "show") for entry in link["addr_info"]]
    return [ipaddress.IPv4Address(entry["local"]) for entry in found]


def _json(*arguments: str) -> list[dict[str, Any]]:
    """Return what `ip -json` shows; nothing if it fails, or is not there: then no cluster has a network."""
    if shutil.which("ip") is None:
        return []
    for _ in range(_TRIES):
        done = _run("-json", *arguments)
        if done.returncode:
            return []
        with suppress(ValueError):
            # It shows nothing, or `{}`, for a link that is not meant.
            return [entry for entry in json.loads(done.stdout.strip() or "[]") if entry]
    raise ClusterError(f"ip {' '.join(arguments)} prints invalid JSON: {done.stdout!r}")


def _ip(*arguments: str, check: bool = True) -> bool:
    if shutil.which("ip") is None:
        raise ClusterError("ip is missing: apt-get install iproute2")
    done = _run(*arguments)
    if done.returncode and check:
        raise ClusterError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.returncode == 0


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["ip", *arguments],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=10,
        check=False,
    )
