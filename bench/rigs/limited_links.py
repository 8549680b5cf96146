"""Network namespaces of this machine whose links have a limited rate: nodes of a cluster, as far as the network goes.

Each namespace has one link into a bridge, which is in a namespace of its own. The kernel's token buckets limit what a
link carries in each direction. Needs root and the kernel's `veth`, `bridge` and `sch_tbf`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from typing import NamedTuple

PROGRAMS = ("ip", "tc")
BURST_BYTES = 256 << 10
"""What a link may carry at once: four of the largest packets that the kernel hands over."""
QUEUE_SECONDS = 0.05
"""What waits longer for a link than this is dropped, as a switch drops what its buffer does not hold."""


class LinkedNode(NamedTuple):
    """One namespace and the address of its link."""

    namespace: str
    address: str

    def command_inside(self, *command: str) -> list[str]:
        return ["ip", "netns", "exec", self.namespace, *command]


def explain_missing() -> str:
    """Return why there can be no such networks here; empty: there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    return f"{' and '.join(missing)} of iproute2 is missing" if missing else ""


@contextlib.contextmanager
def limited_links(count: int, rate: float) -> Iterator[list[LinkedNode]]:
    """Make so many nodes, whose links carry so many bytes a second in each direction, for the block."""
    prefix = f"rollout-bench-{os.getpid()}"
    switch = f"{prefix}-switch"
    nodes = [LinkedNode(f"{prefix}-{n}", f"10.77.{n // 250}.{n % 250 + 1}") for n in range(count)]
    with contextlib.ExitStack() as stack:
        for name in (switch, *(node.namespace for node in nodes)):
            _run("ip", "netns", "add", name)
            stack.callback(_run, "ip", "netns", "delete", name)
        _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge", "up")
        for number, node in enumerate(nodes):
            _add_link(node, switch, f"port{number}", rate)
        yield nodes


def _add_link(node: LinkedNode, switch: str, port: str, rate: float) -> None:
    inside = ("ip", "-n", node.namespace)
    _run(*inside, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", switch)
    _run("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
    _run(*inside, "address", "add", f"{node.address}/16", "dev", "eth0")
    for link in ("lo", "eth0"):
        _run(*inside, "link", "set", link, "up")
    for namespace, link in ((node.namespace, "eth0"), (switch, port)):
        limits = (
            *("rate", f"{rate:.0f}bps", "burst", str(BURST_BYTES)),
            *("latency", f"{QUEUE_SECONDS * 1000:.0f}ms"),
        )
        _run("tc", "-n", namespace, "qdisc", "add", "dev", link, "root", "tbf", *limits)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=30)
