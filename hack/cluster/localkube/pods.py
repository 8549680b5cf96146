"""Processes in pods, as this machine sees them: a node here is a tree of its own processes."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from .home import ClusterError


def process_in(uid: str, word: str) -> int:
    """Return the pid of a pod's process.

    Args:
        uid: of the pod.
        word: that stands in the process' command line.

    Raises:
        ClusterError: There is none now.
    """
    wanted = uid.replace("-", "")
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(OSError):
            words = (entry / "cmdline").read_bytes()
            group = (entry / "cgroup").read_text().replace("-", "").replace("_", "")
            if word.encode() in words and wanted in group:
                return int(entry.name)
    raise ClusterError(f"no process {word!r} in the pod {uid}")
