"""One cluster, as tests and the command line see it."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

from . import controlplane, pki, preflight, processes
from .home import DEFAULT_NAME, ClusterError, binaries, clusters, say, step
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
        port: int | None = None,
        node_grace_seconds: int | None = None,
    ) -> Cluster:
        """Start a cluster and wait until it is ready; a running one only gets what it lacks.

        Args:
            name: names the state folder; clusters of different names run side by side.
            nodes: real nodes (root; one cluster at a time). 0: control plane only, on loopback.
            gpus: `nvidia.com/gpu` that every node claims to have.
            port: of the API server; None: a free one.
            node_grace_seconds: silence after which a node is declared not ready.

        Raises:
            ClusterError: the surroundings don't allow it; the text says what to change.
        """
        preflight.control_plane()
        settings = Settings.load(name)
        if settings is not None and controlplane.is_running(settings):
            if nodes and not settings.real_nodes:
                raise ClusterError(f"cluster {name!r} runs without nodes: stop it first")
            say(f"cluster {name} is running already")
            return cls(settings)
        cls.remove(name)
        settings = Settings.new(
            name, real_nodes=nodes > 0, gpus=gpus, node_grace=node_grace_seconds, port=port
        )
        settings.save()
        with step("control plane ready"):
            controlplane.start(settings)
        return cls(settings)

    @classmethod
    def attach(cls, name: str = DEFAULT_NAME) -> Cluster:
        """Return a running cluster.

        Raises:
            ClusterError: there is none of this name.
        """
        settings = Settings.load(name)
        if settings is None or not controlplane.is_running(settings):
            raise ClusterError(
                f"cluster {name!r} is not running: start it with `cluster.py up --name {name}`"
            )
        return cls(settings)

    @classmethod
    def remove(cls, name: str = DEFAULT_NAME) -> bool:
        """Remove every trace of a cluster, also of one that is broken; False: nothing was there."""
        state = state_folder(name)
        found = processes.sweep(state) > 0 or state.exists()
        shutil.rmtree(state, ignore_errors=True)
        return found

    @staticmethod
    def names() -> list[str]:
        """Names of all clusters that left a state or a process."""
        found = {path.name for path in clusters().glob("*") if path.is_dir()}
        for _, state in processes.marked(clusters()):
            found.add(state.relative_to(clusters()).parts[0])
        return sorted(found)

    def stop(self) -> None:
        """Remove the cluster and every trace of it."""
        self.remove(self.name)

    def environment(self) -> dict[str, str]:
        """Variables with which tools reach this cluster."""
        # The API server's address may be one that a proxy of the machine's would be asked for.
        ignored = os.environ.get("NO_PROXY", "")
        no_proxy = ",".join(filter(None, [ignored, self.settings.address, "10.0.0.0/8"]))
        return {
            "KUBECONFIG": str(self.kubeconfig),
            "PATH": f"{binaries()}:{os.environ.get('PATH', os.defpath)}",
            "NO_PROXY": no_proxy,
        }

    def kubectl(
        self,
        *arguments: str | Path,
        input: str | None = None,  # noqa: A002 - the name that subprocess gives it
        check: bool = True,
        timeout: float = COMMAND_SECONDS,
    ) -> str:
        """Run kubectl and return its stdout; without `check`, stdout and stderr of a failure too.

        Raises:
            ClusterError: it failed (with `check`) or took too long; the text is its stderr.
        """
        return self._run("kubectl", arguments, input, check, timeout)

    def helm(
        self, *arguments: str | Path, check: bool = True, timeout: float = COMMAND_SECONDS
    ) -> str:
        """Run helm, like `kubectl`."""
        return self._run("helm", arguments, None, check, timeout)

    def service_account_kubeconfig(
        self, namespace: str, account: str, *, seconds: int = 86400
    ) -> Path:
        """Write a kubeconfig with a token of this existing account; return its path."""
        token = self.kubectl(
            "create", "token", account, "--namespace", namespace, f"--duration={seconds}s"
        )
        path = self.state / "accounts" / f"{namespace}.{account}.kubeconfig"
        path.parent.mkdir(exist_ok=True)
        text = pki.kubeconfig(
            self.settings.server, self.settings.pki / "ca.crt", {"token": token.strip()}
        )
        return pki.write_private(path, text)

    def _run(
        self,
        program: str,
        arguments: tuple[str | Path, ...],
        text: str | None,
        check: bool,
        timeout: float,
    ) -> str:
        command = [str(binaries() / program), *map(str, arguments)]
        began = time.monotonic()
        try:
            done = subprocess.run(
                command,
                input=text,
                stdin=subprocess.DEVNULL if text is None else None,
                env={**os.environ, **self.environment()},
                capture_output=True,
                text=True,
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            took = time.monotonic() - began
            raise ClusterError(f"{' '.join(command[:4])} … took over {took:.0f} s") from error
        if done.returncode and check:
            raise ClusterError(f"{program} {' '.join(command[1:4])} …: {done.stderr.strip()}")
        return done.stdout + done.stderr if done.returncode else done.stdout
