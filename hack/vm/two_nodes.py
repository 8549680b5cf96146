#!/usr/bin/env python3
"""Two machines with a network between them: pushed weights cross it, and one machine loses its power in the middle of a push.

    sudo python3 hack/vm/two_nodes.py

Each is a Debian in QEMU with a worker of its own, the first one has the trainer too (node.py, which says what it
tries). They share a network segment and nothing else. A machine without power closes no connection.
"""

from __future__ import annotations

import argparse
import secrets
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from machine import boot_machine, make_script, read_status, run_with_disk, share_checkout

from localkube import ClusterError
from localkube.home import cache, say

ADDRESSES = {"trainer": "10.9.0.1", "worker": "10.9.0.2"}
GIB = 4
LOOK_SECONDS = 0.1


class Node:
    """One of the two machines; `cut_power` and `boot` may be called in turn.

    Args:
        folder: With the disk that all machines start from.
        scratch: Folder of this machine's own files.
        role: Of node.py.
        token: Of the control ports of both workers.
    """

    def __init__(self, folder: Path, scratch: Path, role: str, token: str) -> None:
        self._folder, self._scratch, self._role = folder, scratch, role
        self.job = scratch / role
        self.job.mkdir()
        (self.job / "token").write_text(token)
        self._stack = ExitStack()
        self.machine: subprocess.Popen[bytes] | None = None

    def boot(self) -> None:
        begin, shares = share_checkout(self.job)
        address = ADDRESSES[self._role]
        lines = (begin, "ip link set lo up", "link=$(ls /sys/class/net | grep -v '^lo$' | head -1)",
                 f"ip address add {address}/24 dev $link", "ip link set $link up")  # fmt: skip
        python = str(cache() / "venv/bin/python")
        command = [python, "hack/vm/node.py", self._role, *ADDRESSES.values()]
        (self.job / "run").write_text(make_script("\n".join(lines), command))
        console = None
        if self._role != "trainer":
            console = self._stack.enter_context((self._scratch / f"{self._role}.log").open("wb"))
        self.machine = boot_machine(
            self._stack, self._folder, self.job, shares, self._network(),
            gib=GIB, counts_instructions=False, console=console,
        )  # fmt: skip

    def _network(self) -> list[str]:
        """Datagrams: a machine without power is as one whose cable was pulled."""
        mine = self._scratch / f"{self._role}.link"
        (other,) = (self._scratch / f"{role}.link" for role in ADDRESSES if role != self._role)
        mine.unlink(missing_ok=True)
        ends = f"local.type=unix,local.path={mine},remote.type=unix,remote.path={other}"
        card = f"virtio-net-pci,netdev=link,mac=52:54:00:09:00:0{ADDRESSES[self._role][-1]}"
        return ["-netdev", f"dgram,id=link,{ends}", "-device", card]

    def cut_power(self) -> None:
        self._stack.close()


def run_machines(folder: Path, minutes: float) -> int:
    with tempfile.TemporaryDirectory(dir=folder) as scratch, ExitStack() as stack:
        token = secrets.token_urlsafe()
        first, second = (Node(folder, Path(scratch), role, token) for role in ADDRESSES)
        for node in (first, second):
            stack.callback(node.cut_power)
            node.boot()
        assert first.machine is not None
        deadline = time.monotonic() + minutes * 60
        wishes = {"cut": second.cut_power, "boot": second.boot}
        while first.machine.poll() is None:
            for name in [each for each in wishes if (first.job / each).exists()]:
                wishes.pop(name)()
                say(f"  the second machine: {name}")
            if time.monotonic() > deadline:
                log = (Path(scratch) / "worker.log").read_text(errors="replace")
                raise ClusterError(f"it did not end in {minutes} minutes; the second one:\n{log}")
            time.sleep(LOOK_SECONDS)
        return read_status(first.job)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60, help="deadline (%(default)s)")
    minutes = parser.parse_args().minutes
    return run_with_disk(lambda folder: run_machines(folder, minutes))


if __name__ == "__main__":
    sys.exit(main())
