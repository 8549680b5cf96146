"""Debian packages: installed when their programs are missing, or unpacked without installing."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from . import preflight
from .home import ClusterError, cache, exclusive, say, step

# Package → a file that shows it is there.
NODE_PACKAGES = {
    "runc": "/usr/sbin/runc",
    "containernetworking-plugins": "/usr/lib/cni/bridge",
    "iproute2": "/sbin/ip",
    "nftables": "/usr/sbin/nft",
    "conntrack": "/usr/sbin/conntrack",
    "util-linux": "/usr/bin/nsenter",
    "mount": "/usr/bin/mount",
    "kmod": "/sbin/modprobe",
    "openssl": "/usr/bin/openssl",
}
IMAGE_PACKAGES = {"debootstrap": "/usr/sbin/debootstrap", "buildah": "/usr/bin/buildah"}


def ensure(packages: dict[str, str]) -> None:
    """Install those of the packages whose file is missing."""
    missing = [name for name, file in packages.items() if not Path(file).exists()]
    if not missing:
        return
    command = f"apt-get install --no-install-recommends {' '.join(missing)}"
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise ClusterError(f"Debian packages are missing: as root, run `{command}`")
    preflight.writable_cache()
    # apt-get itself does not wait for another one.
    with exclusive("apt"), step(f"Debian packages ({len(missing)})"):
        say(f"  installing {', '.join(missing)}")
        _apt("update", "-qq")
        _apt("install", "-y", "-qq", "--no-install-recommends", *missing)


def unpack_prometheus() -> Path:
    """Return `prometheus/usr/bin` of the cache; the package is unpacked, since installing would start a daemon."""
    target = cache() / "prometheus"
    programs = target / "usr/bin"
    if (programs / "promtool").exists():
        return programs
    preflight.program("apt-get")
    with (
        exclusive("apt"),
        step("Prometheus"),
        tempfile.TemporaryDirectory(dir=cache()) as folder,
    ):
        try:
            _apt("download", "-qq", "prometheus", cwd=folder)
        except ClusterError:
            # A machine that never listed packages knows none.
            _apt("update", "-qq")
            _apt("download", "-qq", "prometheus", cwd=folder)
        (package,) = Path(folder).glob("*.deb")
        unpacked = Path(folder, "unpacked")
        subprocess.run(["dpkg", "-x", str(package), str(unpacked)], check=True)
        shutil.rmtree(target, ignore_errors=True)
        unpacked.rename(target)
    return programs


def _apt(*arguments: str, cwd: str | None = None) -> None:
    done = subprocess.run(
        # The download otherwise complains that its own user can't write here.
        ["apt-get", "-o", "APT::Sandbox::User=root", *arguments],
        cwd=cwd,
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:] or ["no reason given"]
        raise ClusterError(f"apt-get {arguments[0]} failed: {reason[0]}")
