"""Processes of this machine as /proc tells them, and what dead ones leave behind."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
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


def held(pid: int) -> dict[str, int]:
    """What a process holds by itself: descriptors, threads, MiB of memory that is no file's."""
    home = PROC / str(pid)
    status = dict(line.split(":", 1) for line in (home / "status").read_text().splitlines())
    return {
        "descriptors": len(list((home / "fd").iterdir())),
        "threads": int(status["Threads"]),
        "MiB": int(status["RssAnon"].split()[0]) >> 10,
    }


def traces(processes: Iterable[Process]) -> set[str]:
    """Names that these processes would leave behind: shared memory mapped, sockets bound."""
    found = set()
    for process in processes:
        folder = PROC / str(process.pid)
        try:
            maps = (folder / "maps").read_text()
            open_ = {os.readlink(entry) for entry in (folder / "fd").iterdir()}
        except (FileNotFoundError, ProcessLookupError):
            continue
        found |= {word for word in maps.split() if word.startswith("/dev/shm/")}
        found |= {name for name in open_ if name.startswith("/dev/shm/")}
        found |= {path for inode, path in _bound() if f"socket:[{inode}]" in open_}
    return {name for name in found if not name.endswith("(deleted)")}


def unnamed_files(pid: int, folder: Path) -> list[str]:
    """Files without a name, or with none any more, that a process has open below a folder."""
    found = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for entry in (PROC / str(pid) / "fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                found.append(os.readlink(entry))
    return [file for file in found if file.startswith(f"{folder}/") and file.endswith("(deleted)")]


def shared_descriptors(pid: int, others: Iterable[Process]) -> list[str]:
    """Sockets and unnamed memory that a process and any of the others have open, the same ones.

    All processes that share a turn have its keeper, a datagram socket.
    """
    mine, keepers = _open_files(pid), _datagram_sockets()
    return [
        f"{other.command} ({other.pid}): {mine[key]}"
        for other in others
        for key in _open_files(other.pid).keys() & mine.keys()
        if mine[key].startswith(("socket:", "/memfd:")) and mine[key] not in keepers
    ]


def _open_files(pid: int) -> dict[tuple[int, int], str]:
    """Device and inode of what a process has open, and what it is called."""
    found = {}
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for entry in (PROC / str(pid) / "fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                status = entry.stat()
                found[status.st_dev, status.st_ino] = os.readlink(entry)
    return found


def _datagram_sockets() -> set[str]:
    """Unix sockets for datagrams, as the links of descriptors call them."""
    rows = [line.split() for line in (PROC / "net" / "unix").read_text().splitlines()[1:]]
    return {f"socket:[{row[6]}]" for row in rows if row[4] == "0002"}


def _bound() -> list[tuple[str, str]]:
    """Inodes and paths of unix sockets in the file system."""
    rows = [line.split() for line in (PROC / "net" / "unix").read_text().splitlines()[1:]]
    return [(row[6], row[7]) for row in rows if len(row) > 7 and row[7].startswith("/")]


def shares_lock(pid: int, file: Path) -> bool:
    """Whether a process has a copy of the very open file that carries the lock on `file`."""
    home = PROC / str(pid)
    for link in (home / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if os.readlink(link) == str(file):
                told = (home / "fdinfo" / link.name).read_text()
                if any(line.startswith("lock:") for line in told.splitlines()):
                    return True
    return False
