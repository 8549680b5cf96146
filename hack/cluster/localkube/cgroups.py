"""A node's own cgroups: one in every cgroup v1 hierarchy, or one in the unified hierarchy of cgroup v2.

Of v1 they lie below those of the process that starts the node. Of v2 the node's lies at the top of
what this machine, or the container that this runs in, sees: a group of v2 passes controllers on only
if it has no process itself, and the caller's has one. A machine with both counts as v1.
"""

from __future__ import annotations

import errno
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .home import ClusterError

CONTROLLERS = ("cpu", "cpuset", "memory", "pids")
"""What the kubelet needs of cgroup v2."""

LEAF = "init"
"""Where processes stay whose group passes its controllers on."""

END_SECONDS = 10
_ROOT = "/sys/fs/cgroup"
_WAY_OUT = "use `--nodes 0` (control plane only), or kind or k3d (README.md, On kind or k3d)"


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """One mounted cgroup v1 hierarchy, e.g. `memory` or `cpu,cpuacct`, or the unified one of v2."""

    mount_point: Path
    controllers: str = ""
    unified: bool = False

    @property
    def mount_options(self) -> str:
        """What `mount -t cgroup -o` takes; a named hierarchy has no controller."""
        named = self.controllers.startswith("name=")
        return f"none,{self.controllers}" if named else self.controllers


def hierarchies(mountinfo: str | None = None) -> list[Hierarchy]:
    """Return the hierarchies that nodes are made in: those of v1, or else the one of v2.

    Args:
        mountinfo: The text of `/proc/self/mountinfo`; None: of this process.
    """
    first, second = [], []
    for line in (mountinfo or Path("/proc/self/mountinfo").read_text()).splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ")[:3]
        mount_point = Path(before.split(" ")[4])
        if kind == "cgroup":
            words = [word for word in options.split(",") if word not in ("rw", "ro", "xattr")]
            named = [word for word in words if word.startswith("name=")]
            first.append(Hierarchy(mount_point, ",".join(named or words)))
        elif kind == "cgroup2":
            second.append(Hierarchy(mount_point, unified=True))
    has_memory = any("memory" in each.controllers.split(",") for each in first)
    return first if has_memory else second[:1]


def check() -> None:
    """Raise if nodes can't have what they need of this machine's cgroups."""
    found = hierarchies()
    if not found:
        raise ClusterError(
            f"no cgroup hierarchy that limits memory is mounted, neither v1 nor v2: {_WAY_OUT}"
        )
    for each in found:
        if each.unified:
            _check_unified(each.mount_point)


def _check_unified(top: Path) -> None:
    there = (top / "cgroup.controllers").read_text().split()
    if missing := [name for name in CONTROLLERS if name not in there]:
        raise ClusterError(
            f"cgroup v2 at {top} lacks the controllers {', '.join(missing)}, which nodes need: the "
            "kernel was started without them, some are mounted as v1, or this is a container that "
            f"was not given them. Otherwise {_WAY_OUT}"
        )
    if not os.access(top, os.W_OK):
        raise ClusterError(
            f"cgroup v2 at {top} is read-only, so no node can have a cgroup: run it outside this "
            f"container, or make the container privileged. Otherwise {_WAY_OUT}"
        )


def make(name: str) -> dict[str, Any]:
    """Make a cgroup of this name in every hierarchy, and return what node_init.py needs of them.

    `folders` are joined first; the root of the node's cgroup namespace is there. `leaf`, if any, is
    joined next; then `folders` pass their controllers on. `mounts` are arguments of `mount`.
    """
    found = hierarchies()
    if found and found[0].unified:
        return _make_unified(found[0].mount_point, name)
    return _make_separate(found, name)


def _make_separate(found: list[Hierarchy], name: str) -> dict[str, Any]:
    own = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        own[controllers] = path
    folders, mounts = [], [["-t", "tmpfs", "-o", "mode=755", "tmpfs", _ROOT]]
    for hierarchy in found:
        parent = hierarchy.mount_point / own.get(hierarchy.controllers, "/").lstrip("/")
        folder = parent / name
        folder.mkdir(exist_ok=True)
        if "cpuset" in hierarchy.controllers.split(","):
            # A new cpuset is empty and takes no process before it has processors and memory.
            for file in ("cpuset.cpus", "cpuset.mems"):
                (folder / file).write_text((parent / file).read_text())
        folders.append(str(folder))
        options = hierarchy.mount_options
        mounts.append(["-t", "cgroup", "-o", options, "cgroup", str(hierarchy.mount_point)])
    return {"folders": folders, "leaf": None, "mounts": mounts}


def _make_unified(top: Path, name: str) -> dict[str, Any]:
    try:
        _pass_on(top)
    except OSError as error:
        raise ClusterError(
            f"cgroup v2 at {top} does not pass its controllers on to nodes: {error}"
        ) from error
    group = top / name
    # One that an earlier node left passes its controllers on already: nobody may join it.
    remove([str(group)])
    leaf = group / LEAF
    leaf.mkdir(parents=True)
    return {
        "folders": [str(group)],
        "leaf": str(leaf),
        "mounts": [["-t", "cgroup2", "cgroup2", _ROOT]],
    }


def _pass_on(top: Path) -> None:
    """Let the groups below have all controllers. This stays when the nodes go: others may use it."""
    file = top / "cgroup.subtree_control"
    there = (top / "cgroup.controllers").read_text().split()
    missing = sorted(set(there) - set(file.read_text().split()))
    request = " ".join(f"+{name}" for name in missing)
    try:
        file.write_text(request)
    except OSError as error:
        # Only the machine's own root may have processes. A container's is a group like any other.
        if error.errno != errno.EBUSY or not (top / "cgroup.type").exists():
            raise
        _empty(top)
        file.write_text(request)


def _empty(group: Path) -> None:
    leaf = group / LEAF
    leaf.mkdir(exist_ok=True)
    for pid in (group / "cgroup.procs").read_text().split():
        with suppress(ProcessLookupError):
            (leaf / "cgroup.procs").write_text(pid)


def named(pattern: str) -> list[str]:
    """Return the outermost cgroups of all hierarchies whose name matches."""
    # Of v2 they lie at the top.
    globs = [
        each.mount_point.glob if each.unified else each.mount_point.rglob for each in hierarchies()
    ]
    return [str(path) for glob in globs for path in glob(pattern)]


def remove(folders: list[str]) -> None:
    """Remove these cgroups and those below them, once their processes have ended."""
    deadline = time.monotonic() + END_SECONDS
    for folder in map(Path, folders):
        # Only groups of v2 have the file; it kills what is left in the group and below.
        with suppress(FileNotFoundError), (folder / "cgroup.kill").open("r+") as file:
            file.write("1")
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
