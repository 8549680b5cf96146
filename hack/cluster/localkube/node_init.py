"""A node from the inside: joins its cgroups, enters namespaces of its own, runs its services.

A script, not imported: `node_init.py enter SPEC` becomes `unshare`, which runs
`node_init.py boot SPEC` as pid 1 of the node. Pid 1's death ends every process of the node.
With cgroup v2 there is a step between them, `node_init.py settle SPEC`.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

NAMESPACES = ("--mount", "--pid", "--net", "--uts", "--ipc")
DEADLINE_SECONDS = 60
RESTART_SECONDS = 1

# The kubelet wants these values and would set them for the whole machine: it is shown files that
# hold them already.
KERNEL_SETTINGS = {
    "vm/overcommit_memory": 1,
    "vm/panic_on_oom": 0,
    "kernel/panic": 10,
    "kernel/panic_on_oops": 1,
    "kernel/keys/root_maxkeys": 1000000,
    "kernel/keys/root_maxbytes": 25000000,
}


def enter(spec_file: str, spec: dict[str, Any]) -> None:
    """Join the node's cgroups, which become the roots of a cgroup namespace."""
    for folder in spec["cgroups"]["folders"]:
        Path(folder, "cgroup.procs").write_text(str(os.getpid()))
    become("unshare", "--cgroup", *script("settle", spec_file))


def settle(spec_file: str, spec: dict[str, Any]) -> None:
    """Leave the root of cgroup v2, so that it may pass its controllers on to pods."""
    if leaf := spec["cgroups"]["leaf"]:
        Path(leaf, "cgroup.procs").write_text(str(os.getpid()))
        root = Path(leaf).parent
        names = (root / "cgroup.controllers").read_text().split()
        (root / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in names))
    become("unshare", *NAMESPACES, "--fork", "--kill-child=KILL", *script("boot", spec_file))


def script(verb: str, spec_file: str) -> list[str]:
    return [sys.executable, "-I", __file__, verb, spec_file]


def become(*command: str) -> None:
    os.execvp(command[0], command)


def boot(spec: dict[str, Any]) -> None:
    os.environ["PATH"] = f"{spec['binaries']}:/usr/sbin:/sbin:{os.environ['PATH']}"
    mount_all(spec)
    join_network(spec)
    services = {name: start(spec, name) for name in ("containerd",)}
    import_images(spec)
    services |= {name: start(spec, name) for name in spec["services"] if name != "containerd"}
    Path("/run/started").touch()
    supervise(spec, services)


def mount_all(spec: dict[str, Any]) -> None:
    folder = Path(spec["folder"])
    run("mount", "--make-rprivate", "/")
    run("mount", "-t", "proc", "proc", "/proc")
    subprocess.run(["umount", "--lazy", "/sys"], check=False)
    run("mount", "-t", "sysfs", "sysfs", "/sys")
    for words in spec["cgroups"]["mounts"]:
        Path(words[-1]).mkdir(exist_ok=True)
        run("mount", *words)
    for source, point in spec["binds"].items():
        run("mount", "--bind", source, point)
    for name, value in KERNEL_SETTINGS.items():
        file = folder / "kernel" / name.replace("/", "_")
        file.write_text(f"{value}\n")
        run("mount", "--bind", str(file), f"/proc/sys/{name}")
    # Volumes that are mounted later must show up in containers that asked for that.
    run("mount", "--make-rshared", "/")


def join_network(spec: dict[str, Any]) -> None:
    socket.sethostname(spec["name"])
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1\n")
    # The host gives the link, once it knows the pid of this process.
    wait_for(Path("/sys/class/net/eth0"))
    lines = [
        "link set lo up",
        # The cluster's DNS runs on every node, for its own pods.
        f"address add {spec['dns']}/32 dev lo",
        f"address add {spec['address']}/24 dev eth0",
        "link set eth0 up",
        f"route add default via {spec['host']}",
        *(f"route add {pods} via {address}" for address, pods in spec["others"].items()),
    ]
    subprocess.run(["ip", "-batch", "-"], input="\n".join(lines), text=True, check=True)


def import_images(spec: dict[str, Any]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while subprocess.run(["ctr", "version"], capture_output=True, check=False).returncode:
        if time.monotonic() > deadline:
            sys.exit("containerd does not answer")
        time.sleep(0.05)
    for archive in spec["images"]:
        # A node that starts again has its images: the mark names the archive's very content.
        mark = Path("/run/imported", f"{Path(archive).name}-{os.stat(archive).st_mtime_ns}")
        if not mark.exists():
            run("ctr", "--namespace", "k8s.io", "images", "import", archive)
            mark.parent.mkdir(exist_ok=True)
            mark.touch()


def start(spec: dict[str, Any], name: str) -> int:
    log = os.open(spec["logs"][name], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    command = spec["services"][name]
    output = [(os.POSIX_SPAWN_DUP2, log, 1), (os.POSIX_SPAWN_DUP2, log, 2)]
    pid = os.posix_spawnp(command[0], command, os.environ, file_actions=output)
    os.close(log)
    return pid


def supervise(spec: dict[str, Any], services: dict[str, int]) -> None:
    """Reap the node's orphans and restart a service that ended, as an init system does."""
    while True:
        ended, status = os.wait()
        for name, pid in list(services.items()):
            if pid == ended:
                print(f"{name} ended with status {status}: restarted", flush=True)
                time.sleep(RESTART_SECONDS)
                services[name] = start(spec, name)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            sys.exit(f"no {path} after {DEADLINE_SECONDS} s")
        time.sleep(0.02)


def run(*command: str) -> None:
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)


if __name__ == "__main__":
    verb, spec_file = sys.argv[1:]
    read = json.loads(Path(spec_file).read_text())
    if verb == "enter":
        enter(spec_file, read)
    elif verb == "settle":
        settle(spec_file, read)
    else:
        boot(read)
