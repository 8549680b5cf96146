"""How much memory this process, a worker or a trainer, may still take.

The limits are those of the process's cgroups, such as a container's limit, and of the machine. Cached
files don't count as taken, since the kernel frees their pages first.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

MARGIN_BYTES = 64 << 20
"""Bytes that stay free for everything else that the process does."""

LIMIT = "the memory limit"
MACHINE = "the machine's memory"
_V1 = (
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_active_file", "total_inactive_file"),
)
_V2 = ("memory.max", "memory.current", ("active_file", "inactive_file"))


def memory_left(root: Path = Path("/")) -> tuple[int, str] | None:
    """Return how many bytes are left, and of which limit (`LIMIT` or `MACHINE`); None: unknown.

    Args:
        root: Where proc and sys are mounted.
    """
    return min([*_group_limits(root), *_machine_memory(root)], default=None)


def _group_limits(root: Path) -> Iterator[tuple[int, str]]:
    """Yield the bytes left of each cgroup limit of this process."""
    mounted = root / "sys" / "fs" / "cgroup"
    for line in _read_lines(root / "proc" / "self" / "cgroup"):
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            base, names = mounted / "memory", _V1
        elif number == "0":
            base, names = mounted, _V2
        else:
            continue
        # In a container the root is the container's own group; the group's path may not exist there.
        group = base / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(base) and (left := _left_of(folder, *names)) is not None:
                yield left, LIMIT


def _left_of(folder: Path, limit: str, used: str, cached: tuple[str, ...]) -> int | None:
    try:
        most = int((folder / limit).read_text())
        now = int((folder / used).read_text())
    except (OSError, ValueError):  # no such group, or no limit
        return None
    figures = dict(line.split(" ", 1) for line in _read_lines(folder / "memory.stat"))
    return most - now + sum(int(figures.get(name, 0)) for name in cached)


def _machine_memory(root: Path) -> Iterator[tuple[int, str]]:
    for line in _read_lines(root / "proc" / "meminfo"):
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            yield int(value.split()[0]) * 1024, MACHINE


def _read_lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
