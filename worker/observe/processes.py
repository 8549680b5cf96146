"""Find this process's descendants, and kill them without leaving any behind."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
POLL_SECONDS = 0.02
STOPPED_SECONDS = 3.0
"""How long a process must have been stopped to be missed: a debugger stops it for a moment, too."""


@dataclass(frozen=True, slots=True)
class Process:
    """One process; its start time tells it apart from a later one with the same pid."""

    pid: int
    started: int

    def alive(self) -> bool:
        """Whether it is still running (a zombie is not)."""
        seen = _stat(self.pid)
        return seen is not None and seen[1] == self.started and seen[2] != "Z"

    def stopped(self) -> bool:
        """Whether a signal or a debugger has stopped it."""
        seen = _stat(self.pid)
        return seen is not None and seen[1] == self.started and seen[2] in "Tt"

    def title(self) -> str:
        """Return its command line; empty once it is gone."""
        return title_of(self.pid)

    def kill(self) -> None:
        """Kill it, if it is still alive."""
        if self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def find(pid: int) -> Process | None:
    """Return the process that has this id now, None if none has."""
    seen = _stat(pid)
    return None if seen is None else Process(pid, seen[1])


def title_of(pid: int) -> str:
    """Return the command line of a process, which may be a title of its own; empty once it is gone."""
    try:
        line = (PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return ""
    return line.replace(b"\0", b" ").decode(errors="replace")


class Standing:
    """Tells which of some processes stand still: look by look, since one look proves nothing."""

    def __init__(self) -> None:
        self._since: dict[Process, float] = {}

    def still(self, watched: Iterable[Process], seconds: float = STOPPED_SECONDS) -> Process | None:
        """Look at them; returns one that has been stopped in every look for so long."""
        now = time.monotonic()
        self._since = {each: self._since.get(each, now) for each in watched if each.stopped()}
        return next((each for each, since in self._since.items() if now - since >= seconds), None)


def _stat(pid: int) -> tuple[int, int, str] | None:
    """Return (parent, start time, state) of a process."""
    try:
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[1]), int(fields[19]), fields[0]


def descendants(pid: int) -> set[Process]:
    """Return all descendants of `pid`."""
    children: dict[int, list[Process]] = {}
    for folder in PROC.iterdir():
        if folder.name.isdigit() and (seen := _stat(int(folder.name))) is not None:
            children.setdefault(seen[0], []).append(Process(int(folder.name), seen[1]))
    found: set[Process] = set()
    todo = [pid]
    while todo:
        for child in children.get(todo.pop(), ()):
            found.add(child)
            todo.append(child.pid)
    return found


def end(processes: set[Process], seconds: float) -> set[Process]:
    """Kill these and wait until they are gone; return those still alive after `seconds`.

    Blocks.
    """
    for process in processes:
        process.kill()
    until = time.monotonic() + seconds
    while (left := {p for p in processes if p.alive()}) and time.monotonic() < until:
        time.sleep(POLL_SECONDS)
    return left
