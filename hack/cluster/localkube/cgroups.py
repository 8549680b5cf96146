"""A node's own cgroup in every cgroup v1 hierarchy, below that of the process that starts the node."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from .home import ClusterError


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """One mounted cgroup v1 hierarchy, e.g. `memory` or `cpu,cpuacct`."""

    mount_point: Path
    controllers: str

    @property
    def mount_options(self) -> str:
        """What `mount -t cgroup -o` takes; a named hierarchy has no controller."""
        named = self.controllers.startswith("name=")
        return f"none,{self.controllers}" if named else self.controllers


def hierarchies() -> list[Hierarchy]:
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ")[:3]
        if kind == "cgroup":
            words = [word for word in options.split(",") if word not in ("rw", "ro", "xattr")]
            named = [word for word in words if word.startswith("name=")]
            found.append(Hierarchy(Path(before.split(" ")[4]), ",".join(named or words)))
    return found


def make(name: str) -> dict[str, list[str]]:
    """Make a cgroup of this name in every hierarchy.

    Returns its folders and, as `[mount point, options]` words, how to mount the hierarchies.
    """
    own = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        own[controllers] = path
    folders, mounts = [], []
    for hierarchy in hierarchies():
        parent = hierarchy.mount_point / own.get(hierarchy.controllers, "/").lstrip("/")
        folder = parent / name
        folder.mkdir(exist_ok=True)
        if "cpuset" in hierarchy.controllers.split(","):
            # A new cpuset is empty and takes no process before it has processors and memory.
            for file in ("cpuset.cpus", "cpuset.mems"):
                (folder / file).write_text((parent / file).read_text())
        folders.append(str(folder))
        mounts.append(f"{hierarchy.mount_point} {hierarchy.mount_options}")
    return {"folders": folders, "mounts": mounts}


def named(pattern: str) -> list[str]:
    """Return the outermost cgroups of all hierarchies whose name matches."""
    return [str(path) for each in hierarchies() for path in each.mount_point.rglob(pattern)]


def remove(folders: list[str], seconds: float = 10) -> None:
    """Remove these cgroups and those below them, once their processes have ended."""
    deadline = time.monotonic() + seconds
    for folder in map(Path, folders):
        while folder.exists() and not _remove_tree(folder):
            if time.monotonic() > deadline:
                raise ClusterError(f"cgroup {folder} still has processes")
            time.sleep(0.05)


def _remove_tree(folder: Path) -> bool:
    try:
        for path, _, _ in os.walk(folder, topdown=False):
            os.rmdir(path)
    except FileNotFoundError:
        pass
    except OSError:
        return False
    return not folder.exists()
