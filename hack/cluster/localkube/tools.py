"""kubectl and helm against one cluster."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from . import pki
from .home import ClusterError, binaries
from .settings import Settings

COMMAND_SECONDS = 120

SHORT_LIVED = {"GOGC": "off"}
"""For programs in Go that end at once: without garbage collection they take half the processor time."""


def environment(settings: Settings) -> dict[str, str]:
    """Return the variables with which tools reach this cluster."""
    # A machine's proxy must not be asked for the API server, a pod or a Service.
    inside = ("localhost", settings.address, settings.network.cidr, settings.network.services)
    no_proxy = ",".join(filter(None, [os.environ.get("NO_PROXY", ""), *inside]))
    return {
        "KUBECONFIG": str(settings.kubeconfig),
        "PATH": f"{binaries()}:{os.environ.get('PATH', os.defpath)}",
        "NO_PROXY": no_proxy,
        "no_proxy": no_proxy,
    }


def run(
    settings: Settings,
    command: Sequence[str | Path],
    text: str | None = None,
    check: bool = True,
    timeout: float = COMMAND_SECONDS,
) -> str:
    """Run one of the cache's binaries; see `Cluster.kubectl`."""
    program, *arguments = map(str, command)
    shown = f"{program} {' '.join(arguments[:4])}"
    try:
        done = subprocess.run(
            [str(binaries() / program), *arguments],
            input=text,
            stdin=subprocess.DEVNULL if text is None else None,
            env={**os.environ, **SHORT_LIVED, **environment(settings)},
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


def account_kubeconfig(settings: Settings, namespace: str, account: str, seconds: int) -> Path:
    """Write a kubeconfig with a token of an existing service account; return its path."""
    request = ["create", "token", account, "--namespace", namespace, f"--duration={seconds}s"]
    token = run(settings, ["kubectl", *request]).strip()
    path = settings.state / "accounts" / f"{namespace}.{account}.kubeconfig"
    path.parent.mkdir(exist_ok=True)
    text = pki.kubeconfig(settings.server, settings.pki / "ca.crt", {"token": token})
    return pki.write_private(path, text)
