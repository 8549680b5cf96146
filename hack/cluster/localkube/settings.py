"""The fixed properties of one cluster: addresses, ports, sizes. Kept in its state."""

from __future__ import annotations

import json
import random
import re
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

from .home import ClusterError, clusters, exclusive

LOOPBACK = "127.0.0.1"

DNS_ADDRESS = "169.254.20.10"
"""Where pods find the cluster's DNS: on their own node, as with Kubernetes' NodeLocal DNSCache.

Not a ClusterIP: kube-proxy drops what a node itself sends to one without a Service."""

# Below the kernel's ephemeral range (32768 and up), where outgoing connections take ports.
_PORTS = range(20000, 32000)
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?")

NODE_GRACE_SECONDS = 10
FAKE_NODE_GRACE_SECONDS = 200
"""Without real nodes: kwok renews the leases of many nodes slowly."""


@dataclass(frozen=True, slots=True)
class Network:
    """Addresses of one cluster. Clusters with real nodes have a slot, so a network, each.

    Nodes are 10.x.0.11 and up, their pods 10.x.65.0/24 and up, kwok's pods 10.x.128.0/17.
    """

    slot: int

    SLOTS = range(8)
    MAX_NODES = 60

    @property
    def bridge(self) -> str:
        return f"rollout{self.slot}"

    @property
    def cidr(self) -> str:
        """Everything but the services."""
        return f"{self._prefix}.0.0/16"

    @property
    def host(self) -> str:
        """The host's address on the bridge; there the API server listens if there are nodes."""
        return f"{self._prefix}.0.1"

    @property
    def pods(self) -> str:
        """Range of all real nodes' pods."""
        return f"{self._prefix}.64.0/18"

    @property
    def fake_pods(self) -> str:
        """Range of kwok's pods, as the address of its first one."""
        return f"{self._prefix}.128.1/17"

    @property
    def services(self) -> str:
        return f"10.{96 + self.slot}.0.0/16"

    @property
    def service_api(self) -> str:
        """ClusterIP of the Service `kubernetes`."""
        return f"10.{96 + self.slot}.0.1"

    def node(self, index: int) -> str:
        return f"{self._prefix}.0.{10 + index}"

    def node_pods(self, index: int) -> str:
        return f"{self._prefix}.{64 + index}.0/24"

    @property
    def _prefix(self) -> str:
        return f"10.{177 + self.slot}"


@dataclass(frozen=True, slots=True)
class Settings:
    """One cluster.

    `slot` is that of its network; None: a control plane on loopback, no nodes. `gpus` are numbers
    that a node claims to have, `devices` what ResourceClaims allocate (fakedevices.py).
    """

    name: str
    slot: int | None
    gpus: int
    devices: int
    node_grace_seconds: int
    api_port: int
    etcd_port: int
    etcd_peer_port: int
    controller_manager_port: int
    scheduler_port: int

    @property
    def network(self) -> Network:
        """Its addresses, which no interface has without real nodes."""
        return Network(self.slot or 0)

    @property
    def state(self) -> Path:
        return state_folder(self.name)

    @property
    def pki(self) -> Path:
        return self.state / "pki"

    @property
    def kubeconfig(self) -> Path:
        return self.state / "admin.kubeconfig"

    @property
    def audit_log(self) -> Path:
        """One JSON event per line for each request of a service account."""
        return self.state / "audit.log"

    @property
    def address(self) -> str:
        return LOOPBACK if self.slot is None else self.network.host

    @property
    def server(self) -> str:
        return f"https://{self.address}:{self.api_port}"

    def save(self) -> None:
        self.state.mkdir(parents=True, exist_ok=True)
        (self.state / "cluster.json").write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, name: str) -> Settings | None:
        try:
            return cls(**json.loads((state_folder(name) / "cluster.json").read_text()))
        except FileNotFoundError:
            return None

    @classmethod
    def new(cls, name: str, *, slot: int | None, gpus: int, devices: int) -> Settings:
        """Choose ports and write everything to the state folder."""
        # Another cluster that starts at this moment does not listen on its ports yet.
        with exclusive("ports"):
            grace = FAKE_NODE_GRACE_SECONDS if slot is None else NODE_GRACE_SECONDS
            chosen = cls(name, slot, gpus, devices, grace, *free_ports(5))
            chosen.save()
        return chosen


def state_folder(name: str) -> Path:
    if not _NAME.fullmatch(name):
        raise ClusterError(
            f"cluster name {name!r}: use at most 40 small letters, digits and inner dashes"
        )
    return clusters() / name


def free_ports(count: int) -> list[int]:
    """Return distinct free ports that no cluster of this cache has chosen."""
    found: list[int] = []
    chosen = _chosen_ports()
    for port in random.sample(_PORTS, len(_PORTS)):
        if port not in chosen and _is_free(port):
            found.append(port)
        if len(found) == count:
            return found
    raise ClusterError(f"no {count} free ports between {_PORTS.start} and {_PORTS.stop}")


def _chosen_ports() -> set[int]:
    every = (Settings.load(folder.name) for folder in clusters().glob("*") if folder.is_dir())
    return {
        value
        for each in every
        if each
        for name, value in asdict(each).items()
        if name.endswith("_port")
    }


def _is_free(port: int) -> bool:
    with socket.socket() as listener:
        # As servers do: a connection in TIME_WAIT does not make a port taken.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
        except OSError:
            return False
    return True
