#!/usr/bin/env python3
"""Run a command on a Debian of its own, booted by QEMU with cgroup v2 only: `make vm` checks local nodes there.

    sudo python3 hack/vm/machine.py python3 hack/vm/cgroups.py
    sudo python3 hack/vm/machine.py make demo
    sudo python3 hack/vm/machine.py --bare python3 hack/vm/readme.py

The machine sees the repository and the cache at their own paths, and what it writes there is gone when it ends.
Nothing is built in it: `make prepared` first. It has no network. A `--bare` one is as a newcomer's: it has a network,
and of ours nothing but a clone. Without hardware virtualization QEMU translates each instruction, and the machine's
clock counts them, a nanosecond each: it goes about five times slower than ours, so deadlines and times mean there what
they mean on a real machine.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cluster"))

from localkube import ClusterError, debian, preflight
from localkube.home import REPOSITORY, cache, exclusive, say, step

SUITE = "bookworm"
PACKAGES = {"qemu-system-x86": "/usr/bin/qemu-system-x86_64", "mmdebstrap": "/usr/bin/mmdebstrap"}
FILE_SERVERS = ("/usr/lib/qemu/virtiofsd", "/usr/libexec/virtiofsd")
INSIDE = ("systemd-sysv", "udev", "linux-image-cloud-amd64", "python3", "python3-venv", "git", "make",
          "procps", "ca-certificates", *debian.NODE_PACKAGES)  # fmt: skip
DISK = "16G"
GIB = 8
"""Memory."""
HIDDEN = ("clusters", "logs", "vm")
"""Folders of the cache that the machine has of its own."""

AUTHORITIES = Path("/etc/ssl/certs/ca-certificates.crt")
"""Whom this machine trusts: what it downloads from may be known to nobody else."""

# QEMU's own network: a router at .2 and names from .3.
BARE_BEGIN = f"""\
link=$(ls /sys/class/net | grep -v '^lo$' | head -1)
ip link set lo up
ip link set $link up
ip address add 10.0.2.15/24 dev $link
ip route add default via 10.0.2.2
echo nameserver 10.0.2.3 >/etc/resolv.conf
cp /job/authorities.crt {AUTHORITIES}
export PIP_CERT={AUTHORITIES}
mkdir /shared
mount -t virtiofs -o ro repository /shared
git config --global --add safe.directory '*'
git clone -q file:///shared $HOME/rollout
cd $HOME/rollout"""

# The first process of ours: a service, so systemd has put it into a cgroup as it does with all.
UNIT = """\
[Unit]
SuccessAction=poweroff
FailureAction=poweroff
[Service]
Type=oneshot
ExecStart=/bin/sh -c 'mkdir /job && mount -t virtiofs job /job && exec sh /job/run'
StandardOutput=tty
StandardError=tty
TTYPath=/dev/ttyS0
TimeoutStartSec=infinity
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--bare",
        action="store_true",
        help="with a network and a clone of the repository, without the cache",
    )
    parser.add_argument("--minutes", type=float, default=60, help="deadline (%(default)s)")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    if not arguments.command:
        parser.error("which command?")
    return run_with_disk(lambda folder: run_inside(folder, arguments))


def run_with_disk(act: Callable[[Path], int]) -> int:
    """Call `act` with the folder of the disk that machines start from; return its exit status, or 2 with an error."""
    # What was started ends with us, after SIGTERM too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        preflight.root("a virtual machine")
        debian.ensure(PACKAGES)
        return act(make_disk())
    except ClusterError as error:
        say(f"error: {error}")
        return 2


def make_disk() -> Path:
    """Return the folder with `disk`, `kernel` and `initrd`, made once for all commands."""
    folder = cache() / "vm"
    with exclusive("vm"):
        stamp, made_of = folder / "stamp", repr((SUITE, INSIDE, DISK, UNIT))
        if stamp.exists() and stamp.read_text() == made_of:
            return folder
        preflight.disk(preflight.RUN_GIB)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        with step(f"Debian {SUITE} with its cloud kernel"):
            _make_disk(folder)
        stamp.write_text(made_of)
    return folder


def _make_disk(folder: Path) -> None:
    root = folder / "root"
    packages = f"--include={','.join(INSIDE)}"
    with (folder / "mmdebstrap.log").open("w") as log:
        command = ["mmdebstrap", "--variant=minbase", packages, SUITE, str(root)]
        if subprocess.run(command, stdout=log, stderr=log, check=False).returncode:
            raise ClusterError(f"mmdebstrap failed, see {log.name}")
    units = root / "etc/systemd/system"
    (units / "job.service").write_text(UNIT)
    (units / "multi-user.target.wants/job.service").symlink_to("../job.service")
    # It would take the terminal away.
    (units / "serial-getty@.service").symlink_to("/dev/null")
    for name in ("vmlinuz", "initrd.img"):
        (found,) = (root / "boot").glob(f"{name}-*")
        shutil.copy(found, folder / name)
    subprocess.run(["mke2fs", "-q", "-t", "ext4", "-d", root, folder / "disk", DISK], check=True)
    shutil.rmtree(root)


def run_inside(folder: Path, arguments: argparse.Namespace) -> int:
    with step("by the clock of this machine"), ExitStack() as stack:
        job = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder)))
        network = ("-nic", "user,model=virtio-net-pci" if arguments.bare else "none")
        if arguments.bare:
            shutil.copy(AUTHORITIES, job / "authorities.crt")
            begin, shares = BARE_BEGIN, {"job": job, "repository": REPOSITORY}
        else:
            begin, shares = share_checkout(job)
        (job / "run").write_text(make_script(begin, arguments.command))
        machine = boot_machine(stack, folder, job, shares, network, gib=GIB)
        try:
            machine.wait(arguments.minutes * 60)
        except subprocess.TimeoutExpired:
            raise ClusterError(f"the command did not end in {arguments.minutes} minutes") from None
        return read_status(job)


def read_status(job: Path) -> int:
    status = job / "status"
    if not status.exists():
        raise ClusterError("the machine ended without the command's status")
    return int(status.read_text())


def share_checkout(job: Path) -> tuple[str, dict[str, Path]]:
    """Return the script's beginning and the shares of a machine that sees repository and cache at their own paths."""
    shares = {"job": job, "repository": REPOSITORY, "cache": cache(), **_interpreter()}
    return _share_folders(shares), shares


def boot_machine(
    stack: ExitStack,
    folder: Path,
    job: Path,
    shares: Mapping[str, Path],
    network: Sequence[str],
    *,
    gib: int,
    counts_instructions: bool = True,
    console: IO[bytes] | None = None,
) -> subprocess.Popen[bytes]:
    """Boot a machine that runs `job/run`, and return QEMU's process, which ends with `stack`.

    Args:
        stack: Ends the machine and the servers of its files.
        folder: With `disk`, `kernel` and `initrd`, see `make_disk`.
        job: Folder that the machine sees as /job.
        shares: Folders that the machine can mount, by tag.
        network: QEMU's flags of its network.
        gib: Memory.
        counts_instructions: Whether its clock counts them, where QEMU translates.
        console: Takes what it prints; None: our standard output.
    """
    devices: list[str] = []
    for name, path in shares.items():
        socket = job / f"{name}.socket"
        server = _serve(path, socket, job / f"{name}.log")
        stack.callback(server.wait)
        stack.callback(server.kill)
        devices += ["-chardev", f"socket,id={name},path={socket}"]
        devices += ["-device", f"vhost-user-fs-pci,chardev={name},tag={name}"]
    machine = subprocess.Popen(
        [*_qemu(folder, gib, counts_instructions), *network, *devices],
        stdin=subprocess.DEVNULL,
        stdout=console,
        env={**os.environ, "TMPDIR": str(job)},
    )
    stack.callback(machine.wait)
    stack.callback(machine.kill)
    return machine


def _interpreter() -> dict[str, Path]:
    """The Python of the environment, if it is not Debian's."""
    python = (cache() / "venv/bin/python").resolve()
    is_debians = python.is_relative_to("/usr/bin") or not python.exists()
    return {} if is_debians else {"python": python.parents[1]}


def _share_folders(shares: dict[str, Path]) -> str:
    """The beginning of a machine that sees folders of this one at their own paths."""
    lines = ["mkdir -p /own/clusters /own/logs /own/vm"]
    # The cache may lie in the repository.
    for name, path in shares.items():
        if name != "job":
            place = shlex.quote(str(path))
            lower, own = f"/shared/{name}", f"/own/{name}"
            lines += [
                f"mkdir -p {lower} {own}/upper {own}/work {place}",
                f"mount -t virtiofs -o ro {name} {lower}",
                f"mount -t overlay -o lowerdir={lower},upperdir={own}/upper,workdir={own}/work overlay {place}",
            ]
    for name in HIDDEN:
        place = shlex.quote(str(cache() / name))
        lines += [f"mkdir -p {place}", f"mount --bind /own/{name} {place}"]
    lines += [
        f"export ROLLOUT_CACHE={shlex.quote(str(cache()))} OMP_NUM_THREADS=1",
        f"cd {shlex.quote(str(REPOSITORY))}",
    ]
    return "\n".join(lines)


def make_script(begin: str, command: list[str]) -> str:
    """What the machine runs: /job/run."""
    lines = [
        "set -eu",
        "export HOME=/root",
        begin,
        "echo booted after $(cut -d' ' -f1 /proc/uptime) s",
        f"status=0; {shlex.join(command)} || status=$?",
        "echo $status >/job/status",
        # Clusters may still be up, and the disk is thrown away.
        "systemctl poweroff --force --force",
    ]
    return "\n".join(lines) + "\n"


def _serve(path: Path, socket: Path, log: Path) -> subprocess.Popen[bytes]:
    """Start the server of a folder's files, and wait until it listens."""
    servers = [name for name in FILE_SERVERS if Path(name).exists()]
    if not servers:
        raise ClusterError("virtiofsd is missing: apt-get install virtiofsd")
    with log.open("w") as file:
        command = [servers[0], f"--socket-path={socket}", "-o", f"source={path},cache=always"]
        process = subprocess.Popen(command, stdout=file, stderr=file)
    deadline = time.monotonic() + 10
    while not socket.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise ClusterError(f"virtiofsd does not serve {path}: {log.read_text().strip()}")
        time.sleep(0.05)
    return process


def _qemu(folder: Path, gib: int, counts_instructions: bool) -> list[str]:
    flags = Path("/proc/cpuinfo").read_text().split()
    # Some machines have /dev/kvm without these, and no ordinary kernel runs on it.
    if os.access("/dev/kvm", os.W_OK) and not {"vmx", "svm"}.isdisjoint(flags):
        processor, cpus = ["-accel", "kvm", "-cpu", "host"], os.cpu_count()
    else:
        # Two processors whose clock counts instructions wait for each other for minutes.
        processor, cpus = ["-accel", "tcg,tb-size=1024", "-cpu", "max"], 1
        processor += ["-icount", "shift=0"] if counts_instructions else []
    return [
        "qemu-system-x86_64", "-nographic", "-no-reboot", *processor,
        "-smp", str(cpus),
        "-object", f"memory-backend-memfd,id=memory,size={gib}G,share=on",
        "-m", f"{gib}G", "-numa", "node,memdev=memory",
        "-kernel", str(folder / "vmlinuz"), "-initrd", str(folder / "initrd.img"),
        "-append", "console=ttyS0 root=/dev/vda rw quiet systemd.show_status=0",
        "-drive", f"file={folder / 'disk'},format=raw,if=virtio,snapshot=on,cache=unsafe",
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
