"""How much memory this process may still take, worker or trainer.

Bounds are those of the process's cgroups, as a container's limit is one, and of the machine. Cached
files don't count as taken, since the kernel gives their pages up first.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

MARGIN_BYTES = 64 << 20
"""What is left to everything else that the process does meanwhile."""

LIMIT = "the memory limit"
MACHINE = "the machine's memory"
_V1 = (
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_active_file", "total_inactive_file"),
)
_V2 = ("memory.max", "memory.current", ("active_file", "inactive_file"))


def memory_left(root: Path = Path("/")) -> tuple[int, str] | None:
    """Return how many bytes are left, and of what (`LIMIT` or `MACHINE`); None: it can't be told.

    Args:
        root: Where proc and sys are mounted.
    """
    return min([*_limits(root), *_machine(root)], default=None)


def _limits(root: Path) -> Iterator[tuple[int, str]]:
    """Yield what is left of each limit that holds for this process."""
    mounted = root / "sys" / "fs" / "cgroup"
    for line in _lines(root / "proc" / "self" / "cgroup"):
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            base, names = mounted / "memory", _V1
        elif number == "0":
            base, names = mounted, _V2
        else:
            continue
        # A container sees its own group in the place of the root; its path may not exist there.
        group = base / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(base) and (left := _left(folder, *names)) is not None:
                yield left, LIMIT


def _left(folder: Path, limit: str, used: str, cached: tuple[str, ...]) -> int | None:
    try:
        most = int((folder / limit).read_text())
        now = int((folder / used).read_text())
    except (OSError, ValueError):  # no such group, or no limit
        return None
    figures = dict(line.split(" ", 1) for line in _lines(folder / "memory.stat"))
    return most - now + sum(int(figures.get(name, 0)) for name in cached)


def _machine(root: Path) -> Iterator[tuple[int, str]]:
    for line in _lines(root / "proc" / "meminfo"):
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            yield int(value.split()[0]) * 1024, MACHINE


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
