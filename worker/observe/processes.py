"""Find this process's descendants, and kill them without leaving any behind."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .settings import EXIT_POLL_SECONDS, STANDSTILL_SECONDS

PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class ProcessHandle:
    """One process; its start time distinguishes it from a later one with the same pid."""

    pid: int
    started: int

    def is_alive(self) -> bool:
        """Whether it is still running (a zombie is not)."""
        seen = _read_stat(self.pid)
        return seen is not None and seen[1] == self.started and seen[2] != "Z"

    def is_stopped(self) -> bool:
        """Whether a signal or a debugger has stopped it."""
        seen = _read_stat(self.pid)
        return seen is not None and seen[1] == self.started and seen[2] in "Tt"

    def command_line(self) -> str:
        """Return its command line; empty once it is gone."""
        return command_line_of(self.pid)

    def kill_process(self) -> None:
        """Kill it, if it is still alive."""
        if self.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def find_process(pid: int) -> ProcessHandle | None:
    """Return the process that has this id now, None if none has."""
    seen = _read_stat(pid)
    return None if seen is None else ProcessHandle(pid, seen[1])


def command_line_of(pid: int) -> str:
    """Return the command line of a process, or the title that it set; empty once it is gone."""
    try:
        line = (PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return ""
    return line.replace(b"\0", b" ").decode(errors="replace")


class StandstillDetector:
    """Finds processes that stand still; one look proves nothing, so it compares several."""

    def __init__(self) -> None:
        self._since: dict[ProcessHandle, float] = {}

    def find_stopped(
        self, watched: Iterable[ProcessHandle], seconds: float = STANDSTILL_SECONDS
    ) -> ProcessHandle | None:
        """Look at the processes; returns one that was stopped in every look of the last `seconds`."""
        now = time.monotonic()
        self._since = {each: self._since.get(each, now) for each in watched if each.is_stopped()}
        return next((each for each, since in self._since.items() if now - since >= seconds), None)


def _read_stat(pid: int) -> tuple[int, int, str] | None:
    """Return (parent, start time, state) of a process."""
    try:
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[1]), int(fields[19]), fields[0]


def find_descendants(pid: int) -> set[ProcessHandle]:
    """Return all descendants of `pid`."""
    children: dict[int, list[ProcessHandle]] = {}
    for folder in PROC.iterdir():
        if folder.name.isdigit() and (seen := _read_stat(int(folder.name))) is not None:
            children.setdefault(seen[0], []).append(ProcessHandle(int(folder.name), seen[1]))
    found: set[ProcessHandle] = set()
    todo = [pid]
    while todo:
        for child in children.get(todo.pop(), ()):
            found.add(child)
            todo.append(child.pid)
    return found


def kill_processes(processes: set[ProcessHandle], seconds: float) -> set[ProcessHandle]:
    """Kill these and block until they are gone; returns those still alive after `seconds`."""
    for process in processes:
        process.kill_process()
    until = time.monotonic() + seconds
    while (left := {p for p in processes if p.is_alive()}) and time.monotonic() < until:
        time.sleep(EXIT_POLL_SECONDS)
    return left
