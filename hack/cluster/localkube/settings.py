"""What is fixed about one cluster for its life: addresses, ports, sizes. Kept in its state."""

from __future__ import annotations

import json
import random
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

from .home import ClusterError, clusters

LOOPBACK = "127.0.0.1"
BRIDGE_ADDRESS = "10.177.0.1"
"""Address of the host on the nodes' bridge; there the API server listens if there are nodes."""

SERVICE_CIDR = "10.96.0.0/16"
SERVICE_API_ADDRESS = "10.96.0.1"
DNS_ADDRESS = "10.96.0.10"
CLUSTER_NETWORK = "10.177.0.0/16"
"""Nodes (10.177.0.x), their pods (10.177.65.x and up) and kwok's (10.177.128.0/17)."""

POD_CIDR = "10.177.64.0/18"
KWOK_CIDR = "10.177.128.1/17"

# Below the kernel's ephemeral range (32768 and up), where outgoing connections take ports.
_PORTS = range(20000, 32000)

NODE_GRACE_SECONDS = 10
FAKE_NODE_GRACE_SECONDS = 200
"""Without real nodes: kwok renews its leases slowly when there are many."""


@dataclass(frozen=True, slots=True)
class Settings:
    """One cluster. `real_nodes`: its API server is reachable from nodes on the bridge."""

    name: str
    real_nodes: bool
    gpus: int
    node_grace_seconds: int
    api_port: int
    etcd_port: int
    etcd_peer_port: int
    controller_manager_port: int
    scheduler_port: int

    @property
    def state(self) -> Path:
        """Folder of everything this cluster writes."""
        return state_folder(self.name)

    @property
    def pki(self) -> Path:
        """Folder of keys and certificates."""
        return self.state / "pki"

    @property
    def kubeconfig(self) -> Path:
        """The cluster-admin's kubeconfig."""
        return self.state / "admin.kubeconfig"

    @property
    def audit_log(self) -> Path:
        """One JSON event a line: every request of a service account."""
        return self.state / "audit.log"

    @property
    def address(self) -> str:
        """Where the API server listens."""
        return BRIDGE_ADDRESS if self.real_nodes else LOOPBACK

    @property
    def server(self) -> str:
        """URL of the API server."""
        return f"https://{self.address}:{self.api_port}"

    def save(self) -> None:
        """Write them to the state folder, which is made."""
        self.state.mkdir(parents=True, exist_ok=True)
        (self.state / "cluster.json").write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, name: str) -> Settings | None:
        """Return the settings of an existing cluster."""
        try:
            return cls(**json.loads((state_folder(name) / "cluster.json").read_text()))
        except FileNotFoundError:
            return None

    @classmethod
    def new(
        cls, name: str, *, real_nodes: bool, gpus: int, node_grace: int | None, port: int | None
    ) -> Settings:
        """Choose ports; nothing is written yet.

        Raises:
            ClusterError: the name or the wanted port can't be used.
        """
        if not (name.replace("-", "a").isalnum() and name.islower() and len(name) <= 40):
            raise ClusterError(
                f"cluster name {name!r}: use at most 40 small letters, digits and dashes"
            )
        ports = free_ports(5)
        if port is not None:
            if not _is_free(port):
                raise ClusterError(f"port {port} is taken: leave --port out to get a free one")
            ports[0] = port
        default_grace = NODE_GRACE_SECONDS if real_nodes else FAKE_NODE_GRACE_SECONDS
        return cls(name, real_nodes, gpus, node_grace or default_grace, *ports)


def state_folder(name: str) -> Path:
    return clusters() / name


def free_ports(count: int) -> list[int]:
    """Return distinct ports that nobody listens on now, in random order."""
    found: list[int] = []
    for port in random.sample(_PORTS, len(_PORTS)):
        if _is_free(port):
            found.append(port)
        if len(found) == count:
            return found
    raise ClusterError(f"no {count} free ports between {_PORTS.start} and {_PORTS.stop}")


def _is_free(port: int) -> bool:
    with socket.socket() as listener:
        # As servers do: a connection in TIME_WAIT does not make a port taken.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
        except OSError:
            return False
    return True
