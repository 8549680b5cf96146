"""Checks of the surroundings: each failure is one sentence that says what to change."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from . import cgroups
from .home import ClusterError, binaries, cache

GO_RELEASE = "1.26"
"""Built with Go 1.27 the API server's /openapi/v2 is broken and every `kubectl apply` fails."""

PYTHON_RELEASE = (3, 11)
"""Of the images' Debian: its Python imports the environment that this machine's Python has made."""

BUILD_GIB = 12
RUN_GIB = 2
_KERNEL_FEATURES = {
    "namespaces (CAP_SYS_ADMIN)": "true",
    "bridge": "ip link add probe type bridge",
    "veth": "ip link add probe type veth peer name probe2",
    "nf_tables": "nft list tables",
}
CONTROL_PLANE_BINARIES = ("kube", "kubectl", "etcd", "kube-apiserver")


def control_plane() -> None:
    program("openssl")
    disk(RUN_GIB)
    missing = [name for name in CONTROL_PLANE_BINARIES if not (binaries() / name).exists()]
    if missing:
        raise ClusterError(
            f"not built yet ({', '.join(missing)} missing in {binaries()}): "
            "run `python3 hack/cluster/cluster.py build` first"
        )


def real_nodes() -> None:
    """Check what real nodes need of the kernel, by trying it in namespaces that end at once."""
    root("a cluster with nodes")
    cgroups.check()
    for name, command in _KERNEL_FEATURES.items():
        done = subprocess.run(
            ["unshare", "--mount", "--net", "--pid", "--cgroup", "--fork", *command.split()],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        if done.returncode:
            raise ClusterError(
                f"the kernel (or this sandbox) lacks {name}, which nodes need: "
                f"`{command}` says {done.stderr.strip()!r}. Use `--nodes 0` (control plane only)"
            )
    if not _has_overlay():
        # Most kernels have it as a module, which is loaded for the first that needs it.
        subprocess.run(["/sbin/modprobe", "overlay"], capture_output=True, timeout=30, check=False)
    if not _has_overlay():
        raise ClusterError("the kernel lacks overlay, which nodes need: try `modprobe overlay`")


def _has_overlay() -> bool:
    return "overlay" in Path("/proc/filesystems").read_text().split()


def go() -> None:
    """Check for the one release of Go that builds a working API server."""
    if shutil.which("go") is None:
        raise ClusterError(f"Go is missing: install Go {GO_RELEASE}.x and put it on PATH")
    done = subprocess.run(
        ["go", "env", "GOVERSION"],
        env={**os.environ, "GOTOOLCHAIN": "local"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    version = done.stdout.strip() or done.stderr.strip()
    if not re.fullmatch(rf"go{re.escape(GO_RELEASE)}(\.\d+.*)?", version):
        raise ClusterError(
            f"Go {GO_RELEASE}.x is needed, this is {version}: other releases build an API server "
            "whose OpenAPI document kubectl can't read"
        )


def python() -> None:
    """Check for the one release whose environment a worker's container can import."""
    if sys.version_info[:2] != PYTHON_RELEASE:
        needed, this = (".".join(map(str, each)) for each in (PYTHON_RELEASE, sys.version_info[:2]))
        raise ClusterError(
            f"Python {needed} is needed, this is {this}: workers in the local cluster import the environment of "
            f"this machine. Install it and set PYTHON3=python{needed}"
        )


def disk(gib: int) -> None:
    folder = cache()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free / 2**30
    if free < gib:
        raise ClusterError(
            f"only {free:.1f} GiB free at {folder}, {gib} GiB needed: "
            "free some, or set ROLLOUT_CACHE to a folder on a bigger disk"
        )


def program(name: str) -> None:
    path = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
    if shutil.which(name, path=path) is None:
        raise ClusterError(f"{name} is missing: apt-get install {name}")


def root(purpose: str) -> None:
    if os.geteuid() != 0:
        raise ClusterError(
            f"{purpose} needs root: run it with sudo, or use `--nodes 0` (control plane only)"
        )


def writable_cache() -> None:
    try:
        cache().mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ClusterError(
            f"can't make {cache()} ({error.strerror}): set ROLLOUT_CACHE to a folder of yours"
        ) from error
    if not os.access(cache(), os.W_OK):
        raise ClusterError(f"{cache()} is not writable: set ROLLOUT_CACHE to a folder of yours")
