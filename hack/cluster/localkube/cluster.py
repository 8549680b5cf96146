"""One cluster, as tests and the command line see it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from . import cgroups, controlplane, debian, fakedevices, kwok, network, pki, preflight, processes
from .home import DEFAULT_NAME, ClusterError, binaries, clusters, images, say, step
from .node import Node, nodes, now, remove_mount_point
from .settings import Settings, state_folder

COMMAND_SECONDS = 120


class Cluster:
    """A running cluster; made by `start` or `attach`."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.name = settings.name
        self.state = settings.state
        self.kubeconfig = settings.kubeconfig
        self.audit_log = settings.audit_log

    @classmethod
    def start(
        cls,
        name: str = DEFAULT_NAME,
        nodes: int = 0,
        gpus: int = 0,
        *,
        devices: int = 0,
    ) -> Cluster:
        """Start a cluster and wait until it is ready; a running one only gets the nodes it lacks.

        Args:
            name: names the state folder; clusters of different names run side by side.
            nodes: real nodes (root). 0: control plane only, on loopback.
            gpus: `nvidia.com/gpu`, and `example.org/gpu`, that every node claims to have.
            devices: fake devices of every node, for ResourceClaims (DeviceClass `gpu.example.com`).
        """
        preflight.control_plane()
        if nodes:
            debian.ensure(debian.NODE_PACKAGES)
            preflight.real_nodes()
        cluster = cls._running(name, nodes, devices) or cls._start(name, nodes, gpus, devices)
        missing = [i for i in range(1, nodes + 1) if Node(cluster.settings, i).init_pid() is None]
        cluster._launch(missing)
        return cluster

    @classmethod
    def attach(cls, name: str = DEFAULT_NAME) -> Cluster:
        settings = Settings.load(name)
        if settings is None or not controlplane.is_running(settings):
            raise ClusterError(
                f"cluster {name!r} is not running: start it with `cluster.py up --name {name}`"
            )
        return cls(settings)

    @classmethod
    def remove(cls, name: str = DEFAULT_NAME) -> bool:
        """Remove every trace of a cluster, even of a broken one; return whether there was any."""
        state = state_folder(name)
        settings = Settings.load(name)
        for node in nodes(settings) if settings else ():
            node.remove()
        found = processes.sweep(state) > 0
        for bridge in network.owned_bridges(state):
            cgroups.remove(cgroups.named(f"{bridge}-node-*"))
        found |= network.release(state)
        found |= state.exists()
        shutil.rmtree(state, ignore_errors=True)
        if not network.bridges():
            remove_mount_point()
        # Fake pods of another checkout's cluster are reached by a route, and have no bridge that would show it.
        if not cls.names() and next(processes.marked(Path("/")), None) is None:
            network.tidy()
        return found

    @staticmethod
    def names() -> list[str]:
        """Names of all clusters that left a state, a process or a link."""
        states = {path for path in clusters().glob("*") if path.is_dir()}
        states |= {state for _, state in processes.marked(clusters())}
        states |= set(network.owned_bridges(clusters()).values())
        return sorted({state.relative_to(clusters()).parts[0] for state in states})

    def stop(self) -> None:
        self.remove(self.name)

    def environment(self) -> dict[str, str]:
        settings = self.settings
        # A machine's proxy must not be asked for the API server, a pod or a Service.
        inside = ("localhost", settings.address, settings.network.cidr, settings.network.services)
        given = os.environ.get("NO_PROXY") or os.environ.get("no_proxy")
        no_proxy = ",".join(filter(None, [given, *inside]))
        return {
            "KUBECONFIG": str(settings.kubeconfig),
            "PATH": f"{binaries()}:{os.environ.get('PATH', os.defpath)}",
            "NO_PROXY": no_proxy,
            "no_proxy": no_proxy,
        }

    def kubectl(
        self,
        *arguments: str | Path,
        input: str | None = None,  # noqa: A002 - the name that subprocess gives it
        check: bool = True,
        timeout: float = COMMAND_SECONDS,
    ) -> str:
        """Run kubectl and return its stdout; without `check`, stdout and stderr of a failure too."""
        return self._run("kubectl", arguments, input, check, timeout)

    def helm(
        self, *arguments: str | Path, check: bool = True, timeout: float = COMMAND_SECONDS
    ) -> str:
        return self._run("helm", arguments, None, check, timeout)

    def _run(
        self,
        program: str,
        arguments: Sequence[str | Path],
        text: str | None,
        check: bool,
        timeout: float,
    ) -> str:
        words = [str(argument) for argument in arguments]
        shown = f"{program} {' '.join(words[:4])}"
        try:
            done = subprocess.run(
                [str(binaries() / program), *words],
                input=text,
                stdin=subprocess.DEVNULL if text is None else None,
                env={**os.environ, **processes.SHORT_LIVED, **self.environment()},
                capture_output=True,
                text=True,
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise ClusterError(f"{shown}: no end after {timeout:.0f} s") from error
        if done.returncode and check:
            raise ClusterError(f"{shown}: {done.stderr.strip()}")
        return done.stdout + done.stderr if done.returncode else done.stdout

    def service_account_kubeconfig(self, namespace: str, account: str) -> Path:
        """Write a kubeconfig with a token of this existing account, for a day; return its path."""
        request = ["create", "token", account, "--namespace", namespace, "--duration=24h"]
        token = self.kubectl(*request).strip()
        path = self.state / "accounts" / f"{namespace}.{account}.kubeconfig"
        path.parent.mkdir(exist_ok=True)
        authority = self.settings.pki / "ca.crt"
        text = pki.kubeconfig(self.settings.server, authority, {"token": token})
        return pki.write_private(path, text)

    @property
    def nodes(self) -> list[Node]:
        """Real nodes that were added and not removed, dead ones too."""
        return nodes(self.settings)

    def node_add(self, index: int) -> Node:
        """Add node `node-<index>`, or start it again after a crash; returns when it is ready."""
        preflight.real_nodes()
        self._launch([index])
        return Node(self.settings, index)

    def node_crash(self, index: int) -> None:
        """Kill every process of a node at once, without a word to the API server."""
        Node(self.settings, index).crash()

    def load_image(self, archive: Path) -> None:
        """Import an OCI archive into all living nodes."""
        if not archive.exists():
            raise ClusterError(f"{archive} does not exist: run `python3 hack/images.py` first")
        living = [node for node in self.nodes if node.init_pid() is not None]
        with ThreadPoolExecutor() as pool:
            for _ in pool.map(lambda node: node.load_image(archive), living):
                pass

    def start_kwok(self, nodes: int = 1, *, gpus: int = 0, local: bool = False) -> None:
        """Add fake nodes `fake-<i>`, whose pods need no process.

        Args:
            nodes: how many.
            gpus: `nvidia.com/gpu` of each.
            local: whether this machine answers at the pods' addresses (root): what listens here
                on a pod's port is every pod's process. Otherwise nobody answers.
        """
        kwok.start(self.settings, nodes, gpus, local=local)

    @classmethod
    def _running(cls, name: str, nodes: int, devices: int) -> Cluster | None:
        settings = Settings.load(name)
        if settings is None or not controlplane.is_running(settings):
            return None
        if nodes and settings.slot is None:
            raise ClusterError(
                f"cluster {name!r} runs as control plane only: "
                f"`cluster.py down --name {name}`, then start it with nodes"
            )
        if devices not in (0, settings.devices):
            raise ClusterError(
                f"cluster {name!r} runs with {settings.devices} devices a node: "
                f"`cluster.py down --name {name}`, then start it with {devices}"
            )
        say(f"  cluster {name} is running already")
        return cls(settings)

    @classmethod
    def _start(cls, name: str, nodes: int, gpus: int, devices: int) -> Cluster:
        cls.remove(name)
        slot = network.reserve(state_folder(name)).slot if nodes else None
        try:
            settings = Settings.new(name, slot=slot, gpus=gpus, devices=devices)
            with step("control plane ready"):
                controlplane.start(settings)
                fakedevices.declare(settings)
        except BaseException:
            # What is half up would hold ports and a network. The logs stay for a look.
            processes.sweep(state_folder(name))
            network.release(state_folder(name))
            raise
        return cls(settings)

    def _launch(self, indices: Sequence[int]) -> None:
        if not indices:
            return
        if self.settings.slot is None:
            raise ClusterError(f"cluster {self.name!r} has no network for nodes: start it with one")
        began = now()
        new = [Node(self.settings, index) for index in indices]
        with step(f"{', '.join(node.name for node in new)} ready"):
            for node in new:
                node.launch([images() / "pause.tar"])
            for node in new:
                node.await_ready(began)
