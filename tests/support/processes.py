"""Processes of this machine as /proc tells them, and what dead ones leave behind."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Process:
    """One process; its start time tells it from a later one of the same number."""

    pid: int
    started: int
    parent: int
    state: str
    command: str

    @property
    def alive(self) -> bool:
        """Whether it is still there, zombies left out."""
        now = look(self.pid)
        return now is not None and now.started == self.started and now.state not in "ZX"


def look(pid: int) -> Process | None:
    """A process by its number."""
    try:
        name, _, rest = (PROC / str(pid) / "stat").read_text().rpartition(")")
        command = (PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = rest.split()
    title = command.strip() or name.partition("(")[2]
    return Process(pid, int(fields[19]), int(fields[1]), fields[0], title)


def descendants(pid: int) -> list[Process]:
    """Children, their children and so on, parents first; zombies left out."""
    found = (look(int(entry.name)) for entry in PROC.iterdir() if entry.name.isdigit())
    everyone = [process for process in found if process is not None and process.state not in "ZX"]
    family, order = {pid}, []
    grown = True
    while grown:
        new = [p for p in everyone if p.parent in family and p.pid not in family]
        grown = bool(new)
        family.update(p.pid for p in new)
        order += sorted(new, key=lambda p: p.started)
    return order


def open_files(pid: int) -> set[str]:
    """What a process has open; sockets and pipes bear their numbers."""
    found = set()
    for entry in (PROC / str(pid) / "fd").iterdir():
        try:
            found.add(os.readlink(entry))
        except FileNotFoundError:
            continue
    return found


def shared_memory() -> set[str]:
    """Names of the shared-memory segments and files below /dev/shm."""
    return {str(path) for path in Path("/dev/shm").rglob("*") if not path.is_dir()}


def unix_sockets() -> set[str]:
    """Paths that live unix sockets are bound to, abstract ones included."""
    lines = (PROC / "net" / "unix").read_text().splitlines()[1:]
    return {line.split()[7] for line in lines if len(line.split()) > 7}
