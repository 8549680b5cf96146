"""How much memory this process may still take: the kernel ends who takes more, without a word.

Bounds are those of the process's cgroups, as a container's limit is one, and of the machine. Cached
files don't count as taken, since the kernel gives their pages up first. `torch` is not needed here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from rollout_worker.engine import EngineError

MARGIN_BYTES = 64 << 20
"""What is left to everything else that the process does meanwhile."""

_LIMIT = "the memory limit"
_MACHINE = "the machine's memory"
_FIXES = {
    _LIMIT: "raise spec.resources.limits.memory (or the limit of its cgroup)",
    _MACHINE: "use a machine with more, or run less on it",
}
_V1 = (
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_active_file", "total_inactive_file"),
)
_V2 = ("memory.max", "memory.current", ("active_file", "inactive_file"))


class Staging:
    """The memory that staged weights may take in this process: `spec.weights.stagingMemory`.

    Args:
        limit: Most bytes at once; None: what the bounds of `check_room` leave, which hold anyway.
        root: Where proc and sys are mounted.
    """

    def __init__(self, limit: int | None = None, root: Path = Path("/")) -> None:
        self._limit = limit
        self._root = root
        self._taken = 0
        self._lock = threading.Lock()

    def claim(self, nbytes: int) -> Callable[[], None]:
        """Charge memory that is taken next; returns what gives it back, once however often called.

        Raises:
            EngineError: names the bound, what is left of it, and the fix.
        """
        with self._lock:
            left = nbytes if self._limit is None else self._limit - self._taken
            if nbytes > left:
                raise EngineError(
                    f"there is no room for {nbytes} bytes of staged weights: {left} bytes are left "
                    f"of the {self._limit} that spec.weights.stagingMemory (--staging-memory) "
                    f"allows; raise it to {self._taken + nbytes} or more"
                )
            try:
                check_room(nbytes, self._root)
            except EngineError as error:
                raise EngineError(f"{error}: spec.weights.stagingMemory gives no more") from error
            self._taken += nbytes
        held = [nbytes]

        def give_back() -> None:
            with self._lock:
                while held:
                    self._taken -= held.pop()

        return give_back


def check_room(nbytes: int, root: Path = Path("/")) -> None:
    """Refuse to take so much memory for weights if that would be the end of the process.

    Args:
        nbytes: What is to be taken beside what is taken already.
        root: Where proc and sys are mounted.

    Raises:
        EngineError: names the bound, what is left of it, and the fix.
    """
    bounds = [*_limits(root), *_machine(root)]
    left, what = min(bounds, default=(nbytes + MARGIN_BYTES, _MACHINE))
    if nbytes + MARGIN_BYTES > left:
        raise EngineError(
            f"there is no room for {nbytes} bytes of weights in memory: {max(left, 0)} bytes are "
            f"left of {what}, and {MARGIN_BYTES} stay free; {_FIXES[what]}"
        )


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
                yield left, _LIMIT


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
            yield int(value.split()[0]) * 1024, _MACHINE


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
