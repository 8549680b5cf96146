"""What the judge of turns sees: each millisecond, which pods have memory of the local cluster's fake devices.

    python -I looks.py STATE

Writes one JSON line for each change, until its input ends. Standard library only. Pods with a device are those whose
processes see its file; of several workers on one claim each has its share.

A look reads /proc/locks and each worker's statm once, from files that stay open. The search for new processes
is done in pieces between the looks. The program takes precedence over other processes, if this user may:
otherwise a busy machine lets it look only 500 to 900 times a second.
"""

from __future__ import annotations

import gc
import json
import os
import re
import select
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SAMPLE_SECONDS = 0.001
SEARCH_SECONDS = 0.05
SEARCHED_AT_ONCE = 4
"""Processes that are examined after one look; each takes about 0.1 ms."""
WORKER = b"rollout-worker"
STEP_MIB = 4
"""A worker's memory is written down when it has changed by so much."""

PAGES_PER_MIB = (1 << 20) // os.sysconf("SC_PAGE_SIZE")
_POD = re.compile(r"pod([0-9a-f]{8}[-_][0-9a-f_-]{27})")


@dataclass
class _Seen:
    """A process that sees devices."""

    pod: str
    devices: tuple[str, ...]
    statm: int | None = None
    """Of a worker: open file that tells its memory."""


class _Looks:
    def __init__(self, state: Path) -> None:
        self._nodes = state / "nodes"
        self._locks = os.open("/proc/locks", os.O_RDONLY)
        self._told = b""
        self._known: dict[int, _Seen | None] = {}
        self._sought: list[int] = []
        self._inodes: dict[str, str] = {}
        self._marks: list[tuple[str, str]] = []
        self._said: dict[str, float] = {}
        self._devices: dict[str, tuple[str, ...]] = {}
        self._share = re.compile(rb"\0ROLLOUT_TURN_DEVICES=([^\0]*)")
        cluster = re.escape(state.name)
        self._mount = re.compile(rf"/{cluster}/nodes/(\S+)/run/devices/(\S+) /dev/")

    def list(self) -> None:
        """Forget processes that ended, and queue those to examine."""
        pids = {int(name) for name in os.listdir("/proc") if name.isdigit()}
        for pid in self._known.keys() - pids:
            self._forget(pid)
        # Again those that don't tell yet what they are: they may become a worker.
        self._sought = [pid for pid in pids if not self._is_settled(pid)]
        for file in self._nodes.glob("*/run/devices/*"):
            self._inodes[str(file.stat().st_ino)] = f"{file.parts[-4]}/{file.name}"

    def _is_settled(self, pid: int) -> bool:
        seen = self._known.get(pid)
        return pid in self._known and (seen is None or seen.statm is not None)

    def _forget(self, pid: int) -> None:
        seen = self._known.pop(pid)
        if seen is not None and seen.statm is not None:
            os.close(seen.statm)

    def examine(self) -> None:
        """Examine a few of the queued processes."""
        for pid in self._sought[:SEARCHED_AT_ONCE]:
            with suppress(OSError):
                self._known[pid] = self._process(pid)
                self._told = b""  # the marks may be a known pod's now
        del self._sought[:SEARCHED_AT_ONCE]

    def _process(self, pid: int) -> _Seen | None:
        folder = Path("/proc", str(pid))
        pod = _POD.search((folder / "cgroup").read_text())
        if pod is None:
            # A process joins its pod's cgroup a moment after its start.
            return _Seen("", ()) if self._is_young(folder) else None
        found = self._mount.findall((folder / "mountinfo").read_text())
        worker = WORKER in (folder / "cmdline").read_bytes()
        share = self._share.search((folder / "environ").read_bytes())
        devices = tuple(
            sorted(
                f"{node}/{device}"
                for node, device in set(found)
                if share is None or f"/{node}/{device}" in share[1].decode()
            )
        )
        statm = os.open(folder / "statm", os.O_RDONLY) if worker and devices else None
        return _Seen(pod[1].replace("_", "-"), devices, statm)

    def _is_young(self, folder: Path) -> bool:
        return time.time() - folder.stat().st_mtime < 5

    def lines(self) -> Iterator[dict[str, Any]]:
        """Look once, and yield what has changed."""
        told = _whole(self._locks)
        if told != self._told:
            self._told = told
            marks = sorted(set(self._marked(told.decode())))
            if marks != self._marks:
                self._marks = marks
                yield {"marks": marks}
        memory: dict[str, float] = dict.fromkeys(self._said, 0.0)
        for seen in self._known.values():
            if seen is not None and seen.statm is not None:
                memory[seen.pod] = memory.get(seen.pod, 0.0) + _mib(seen.statm)
                self._devices[seen.pod] = seen.devices
        for pod, mib in memory.items():
            if abs(mib - self._said.get(pod, 0.0)) >= STEP_MIB or (not mib and self._said.get(pod)):
                self._said[pod] = mib
                yield {"pod": pod, "devices": self._devices[pod], "mib": round(mib, 1)}

    def _marked(self, locks: str) -> Iterable[tuple[str, str]]:
        for line in locks.splitlines():
            words = line.split()
            device = self._inodes.get(words[-3].rpartition(":")[2])
            # "->" precedes a process that waits.
            if device is None or words[1] != "FLOCK":
                continue
            seen = self._known.get(int(words[4]))
            yield device, seen.pod if seen is not None and seen.pod else f"process {words[4]}"


def _whole(file: int) -> bytes:
    """Read a file of /proc, which returns a page at a time."""
    found = b""
    while piece := os.pread(file, 1 << 16, len(found)):
        found += piece
    return found


def _mib(statm: int) -> float:
    """Return the memory of a process that is not backed by files."""
    try:
        _, resident, shared, *_ = os.pread(statm, 200, 0).split()
    except (OSError, ValueError):  # it has ended
        return 0.0
    return (int(resident) - int(shared)) / PAGES_PER_MIB


def _go_first() -> None:
    """Take precedence over other processes, as far as this user may."""
    gc.disable()  # nothing here makes circles
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))


def _look(state: Path) -> None:
    looks = _Looks(state)
    _go_first()
    searched = told = last = 0.0
    count, gap, due = 0, 0.0, time.monotonic()
    while not select.select([sys.stdin], [], [], max(0.0, due - time.monotonic()))[0]:
        now = time.monotonic()
        due = max(due + SAMPLE_SECONDS, now)  # what is missed isn't made up for
        gap, last = max(gap, now - last if last else 0.0), now
        count += 1
        for line in looks.lines():
            print(json.dumps({"t": now, **line}), flush=True)
        if now - searched > SEARCH_SECONDS:
            looks.list()
            searched = now
        looks.examine()
        if now - told > 1:
            print(json.dumps({"t": now, "looks": count, "gap": gap}), flush=True)
            told = now
    print(json.dumps({"t": time.monotonic(), "looks": count, "gap": gap}), flush=True)


if __name__ == "__main__":
    _look(Path(sys.argv[1]))
