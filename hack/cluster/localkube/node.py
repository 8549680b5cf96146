"""A real node from the outside: made, watched, crashed and removed by the host (root)."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from . import cgroups, fakedevices, network, node_files, pki, processes
from .apiserver import ApiServer
from .home import ClusterError, binaries
from .settings import DNS_ADDRESS, Settings

READY_SECONDS = 90
_INIT = Path(__file__).with_name("node_init.py")
KUBELET_FOLDER = Path("/var/lib/kubelet")
"""The kubelet's device plugins live there whatever its flags say, so it must exist to be covered."""

_NAMESPACES = ("-m", "-p", "-n", "-u", "-i", "-C")


class Node:
    """Node `node-<index>` of a cluster with real nodes; the state folder is its only memory."""

    def __init__(self, settings: Settings, index: int) -> None:
        if not 1 <= index <= settings.network.MAX_NODES:
            raise ClusterError(f"node {index}: nodes are 1 to {settings.network.MAX_NODES}")
        self._settings = settings
        self.index = index
        self.name = f"node-{index}"
        self.folder = settings.state / "nodes" / self.name
        self._api = ApiServer(settings.address, settings.api_port, settings.pki)

    @property
    def exists(self) -> bool:
        """Whether it was started and not removed, even if it is dead."""
        return (self.folder / "spec.json").exists()

    def init_pid(self) -> int | None:
        """Return the pid of the node's pid 1 as the host sees it, None if it is dead."""
        outer = processes.recorded(self._settings.state, self.name)
        if outer is None:
            return None
        with suppress(FileNotFoundError):
            children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()
            return int(children[0]) if children else None
        return None

    def launch(self, images: list[Path]) -> None:
        """Start the node, or start it again with its disk after a crash; `await_ready` waits."""
        if self.init_pid() is not None:
            raise ClusterError(f"{self.name} is running already")
        self._clean_up()
        settings = self._settings
        spec = self._write(images)
        processes.spawn(settings.state, self.name, [sys.executable, "-I", _INIT, "enter", spec])
        network.connect(settings.network, self.index, self._await_init())
        network.add_routes(settings.network, self.index)

    def await_ready(self, began: datetime) -> None:
        """Wait until the API server calls it ready, by a heartbeat after `began`, with its devices."""
        self._await(lambda: self._is_ready(began), "is not Ready")
        if self._settings.gpus:
            self._claim_gpus()
        self._await(
            lambda: fakedevices.published(self._settings, self._api, self.name),
            "did not publish its devices",
        )

    def _await(self, ready: Callable[[], bool], problem: str) -> None:
        state = self._settings.state
        processes.await_true(state, [self.name], ready, f"{self.name} {problem}", READY_SECONDS)

    def crash(self) -> None:
        """Kill pid 1 and with it every process of the node, as a power cut would."""
        pid = self.init_pid()
        outer = processes.recorded(self._settings.state, self.name)
        if pid is None or outer is None:
            raise ClusterError(f"{self.name} is not running")
        os.kill(pid, signal.SIGKILL)
        processes.await_end([outer])
        network.remove_routes(self._settings.network, self.index)

    def remove(self) -> None:
        """End the node and remove every trace but its Node object, which goes with the cluster."""
        if self.init_pid() is not None:
            self.crash()
        self._clean_up()
        shutil.rmtree(self.folder, ignore_errors=True)

    def run(self, *command: str | Path, capture: bool = False) -> str:
        """Run a command in the node's namespaces; returns stdout if captured."""
        pid = self.init_pid()
        if pid is None:
            raise ClusterError(f"{self.name} is not running")
        done = subprocess.run(
            ["nsenter", "-t", str(pid), *_NAMESPACES, "--", *map(str, command)],
            env={**os.environ, "PATH": f"{binaries()}:/usr/sbin:/sbin:{os.environ['PATH']}"},
            stdout=subprocess.PIPE if capture else None,
            stderr=subprocess.PIPE if capture else None,
            text=True,
            check=False,
        )
        if done.returncode:
            detail = (done.stderr or "").strip() or f"status {done.returncode}"
            raise ClusterError(f"{command[0]} in {self.name}: {detail}")
        return done.stdout or ""

    def load_image(self, archive: Path) -> None:
        """Import an OCI archive, unless the node has the same bytes."""
        # The same mark that node_init.py makes.
        mark = self.folder / "run/imported" / f"{archive.name}-{archive.stat().st_mtime_ns}"
        if not mark.exists():
            self.run("ctr", "--namespace", "k8s.io", "images", "import", archive, capture=True)
            mark.parent.mkdir(exist_ok=True)
            mark.touch()

    def _write(self, images: list[Path]) -> Path:
        settings = self._settings
        for name in ("run", "log", "kubelet", "kernel", "run/node"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        (self.folder / "run/started").unlink(missing_ok=True)
        KUBELET_FOLDER.mkdir(exist_ok=True)
        etc = self.folder / "run/node"
        for name, text in node_files.files(settings, self.index).items():
            (etc / name).parent.mkdir(exist_ok=True)
            (etc / name).write_text(text)
        self._write_credentials(etc)
        path = self.folder / "spec.json"
        path.write_text(json.dumps(self._spec(images), indent=1))
        return path

    def _write_credentials(self, etc: Path) -> None:
        settings = self._settings
        keys = settings.pki
        authority = pki.Authority(keys, "ca")
        authority.issue(self.name, f"/O=system:nodes/CN=system:node:{self.name}")
        shutil.copy(authority.certificate, etc / "ca.crt")
        users = {"kubelet": self.name, "kube-proxy": "kube-proxy", "coredns": "coredns"}
        for program, user in users.items():
            authority.issue(user, f"/CN=system:{user}")
            entry = pki.certificate_user(keys, user)
            text = pki.kubeconfig(settings.server, authority.certificate, entry)
            pki.write_private(etc / f"{program}.kubeconfig", text)

    def _spec(self, images: list[Path]) -> dict[str, Any]:
        addresses = self._settings.network
        etc = node_files.ETC
        kubelet = {
            "config": f"{etc}/kubelet.yaml",
            "kubeconfig": f"{etc}/kubelet.kubeconfig",
            "hostname-override": self.name,
            "node-ip": addresses.node(self.index),
        }
        services = {
            "containerd": ["containerd", "--config", f"{etc}/containerd.toml"],
            "kubelet": ["kubelet", *(f"--{name}={value}" for name, value in kubelet.items())],
            "kube-proxy": ["kube-proxy", f"--config={etc}/kube-proxy.yaml"],
            "coredns": ["coredns", "-conf", f"{etc}/Corefile"],
            **fakedevices.service(self._settings, self.name),
        }
        log = processes.log_file
        others = [i for i in range(1, addresses.MAX_NODES + 1) if i != self.index]
        return {
            "name": self.name,
            "folder": str(self.folder),
            "binaries": str(binaries()),
            "address": addresses.node(self.index),
            "host": addresses.host,
            "dns": DNS_ADDRESS,
            "others": {addresses.node(i): addresses.node_pods(i) for i in others},
            "cgroups": cgroups.make(f"{addresses.bridge}-{self.name}"),
            "binds": {
                f"{self.folder}/kubelet": str(KUBELET_FOLDER),
                f"{self.folder}/log": "/var/log",
                # Last: the state may lie below /run.
                f"{self.folder}/run": "/run",
            },
            "services": services,
            "logs": {n: str(log(self._settings.state, f"{self.name}-{n}")) for n in services},
            "images": [str(image) for image in images],
        }

    def _await_init(self) -> int:
        self._await(lambda: self.init_pid() is not None, "has no namespaces")
        pid = self.init_pid()
        if pid is None:
            raise ClusterError(f"{self.name} ended while its namespaces came up")
        return pid

    def _is_ready(self, began: datetime) -> bool:
        # A node that starts again may still be called ready from before, so look at its lease.
        leases = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
        status, lease = self._api.request(f"{leases}/{self.name}")
        renewed = lease["spec"].get("renewTime") if status == 200 else None
        if renewed is None or datetime.fromisoformat(renewed) < began:
            return False
        return self._api.is_node_ready(self.name)

    def _claim_gpus(self) -> None:
        count = dict.fromkeys(("nvidia.com/gpu", "example.org/gpu"), str(self._settings.gpus))
        body = {"status": {"capacity": count, "allocatable": count}}
        status, answer = self._api.request(
            f"/api/v1/nodes/{self.name}/status", "PATCH", body,
            "application/strategic-merge-patch+json",
        )  # fmt: skip
        if status != 200:
            raise ClusterError(f"{self.name}: the API server refused GPUs: {answer}")

    def _clean_up(self) -> None:
        processes.stop(self._settings.state, self.name)
        network.remove_routes(self._settings.network, self.index)
        if self.exists:
            spec = json.loads((self.folder / "spec.json").read_text())
            cgroups.remove(spec["cgroups"]["folders"])


def nodes(settings: Settings) -> list[Node]:
    """Return the nodes that were started and not removed, dead ones too, by index."""
    folders = (settings.state / "nodes").glob("node-*")
    indices = sorted(int(folder.name.removeprefix("node-")) for folder in folders)
    return [node for node in (Node(settings, index) for index in indices) if node.exists]


def now() -> datetime:
    """Return the time with which `Node.await_ready` compares heartbeats."""
    return datetime.now(UTC)


def remove_mount_point() -> None:
    """Remove the kubelet's folder, if it is empty, unless a node of any cluster has a mount there.

    The kernel would take that mount away, and the node's pods would lose their volumes. Nodes of other
    checkouts are on no list of ours, so the mounts of all processes are read.
    """
    for mounts in Path("/proc").glob("[0-9]*/mountinfo"):
        with suppress(OSError):
            if f" {KUBELET_FOLDER} " in mounts.read_text():
                return
    with suppress(OSError):
        KUBELET_FOLDER.rmdir()
