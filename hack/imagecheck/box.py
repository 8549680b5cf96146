"""Run commands in an image as a pod would: as its own user, as PID 1, with a read-only root file system."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from buildah import Store

PROBES = Path(__file__).parent / "probes"
SHARED = "/tmp/check"
"""The folder inside the image with the probes, which exists as long as the checks run."""

# The command replaces the shell, which is PID 1 of its namespace. Nobody outside is reachable.
_ENTER = """
set -eu
root=$({mount})
mount --bind "$root" "$root"
mount -o remount,bind,ro "$root"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
mount --rbind /sys "$root/sys"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
mkdir "$root/tmp/check"
mount --bind {shared} "$root/tmp/check"
ip link set lo up
exec setpriv --no-new-privs chroot --userspec={user} --groups= "$root" \
  /usr/bin/env -i {variables} /bin/sh -c 'cd "$1"; shift; {alongside} exec "$@"' sh {folder} {command}
"""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended; a status of None: it exceeded its time and was killed."""

    status: int | None
    output: str

    def last(self) -> str:
        """Return the end of its output, for a message."""
        return " | ".join(self.output.strip().splitlines()[-6:])


@dataclass(frozen=True, slots=True)
class Box:
    """An image that commands run in; `config` is what the image says of itself."""

    store: Store
    container: str
    config: dict[str, Any]
    shared: Path

    def run(
        self,
        command: Sequence[str],
        *,
        seconds: float,
        variables: dict[str, str] | None = None,
        alongside: str = "",
    ) -> Ended:
        """Run a command as PID 1; `alongside` is another one that runs in the background."""
        script = _ENTER.format(
            mount=shlex.join(self.store.command("mount", self.container)),
            shared=shlex.quote(str(self.shared)),
            variables=shlex.join(self._environ(variables or {})),
            user=shlex.quote(self.config.get("User") or "0:0"),
            alongside=f"{alongside} &" if alongside else "",
            folder=shlex.quote(self.config.get("WorkingDir") or "/"),
            command=shlex.join(command),
        )
        apart = ["--mount", "--pid", "--net", "--ipc", "--uts", "--fork"]
        with tempfile.TemporaryFile("w+") as output:
            child = subprocess.Popen(
                ["unshare", *apart, "sh", "-c", script],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            try:
                status: int | None = child.wait(seconds)
            except subprocess.TimeoutExpired:
                _end_children(child.pid)
                child.wait()
                status = None
            output.seek(0)
            return Ended(status, output.read())

    def probe(self, name: str, *words: str, seconds: float, **variables: str) -> Ended:
        """Run one of our probes with the image's Python."""
        command = ["python3", f"{SHARED}/{name}.py", *words]
        return self.run(command, seconds=seconds, variables=variables)

    def _environ(self, more: dict[str, str]) -> list[str]:
        own = dict(line.partition("=")[::2] for line in self.config.get("Env") or [])
        return [f"{name}={value}" for name, value in {**own, **more}.items()]


@contextmanager
def opened(store: Store, reference: str) -> Iterator[Box]:
    """Yield the image as a box, and delete afterwards what its commands leave behind."""
    config = store.inspect(reference)
    container = store.ask("from", "--pull-never", reference).strip()
    shared = Path(tempfile.mkdtemp(prefix="rollout-check-"))
    try:
        for file in (*PROBES.glob("*.py"), PROBES.parents[1] / "tinymodel.py"):
            shutil.copy(file, shared)
        shared.chmod(0o777)
        yield Box(store, container, config, shared)
    finally:
        shutil.rmtree(shared, ignore_errors=True)
        store.do("rm", container)


def _end_children(pid: int) -> None:
    """Kill PID 1 of the namespace, and so all in it: with its changed user it does not die with us."""
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        os.kill(int(child), signal.SIGKILL)
