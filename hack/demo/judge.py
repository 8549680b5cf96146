"""A judge of turns on the local cluster's fake devices: who had memory of which device, each millisecond.

    with Judge(cluster.state) as judge: …
    report = judge.report(judge.asleep_mib())

It runs on the machine below the nodes and asks nobody. Pods with a device are those whose processes see its
file; of several workers on one claim each has its share. The trainer has memory of a device while it holds a
flock on that file, a worker while its own memory is well above what it has asleep.

As a program (`judge.py STATE`) it writes one JSON line for each change, until its input ends.
"""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

SAMPLE_SECONDS = 0.001
SEARCH_SECONDS = 0.05
WORKER = b"rollout-worker"
STEP_MIB = 4
"""A worker's memory is written down when it has changed by so much."""

MARGIN_MIB = 32
"""More than an idle worker's memory varies, and less than the weights of the judged models."""

PAGES_PER_MIB = (1 << 20) // os.sysconf("SC_PAGE_SIZE")
_POD = re.compile(r"pod([0-9a-f]{8}[-_][0-9a-f_-]{27})")


@dataclass(frozen=True)
class Report:
    """What the judge saw.

    Attributes:
        seconds: how long it looked.
        looks: how often.
        longest_gap: between two looks, in seconds.
        overlap: seconds in which two pods had memory of a device, by device.
        turns: how often memory of a device changed hands, by device.
        pods: pods that had memory of a device.
    """

    seconds: float
    looks: int
    longest_gap: float
    overlap: Mapping[str, float]
    turns: Mapping[str, int]
    pods: frozenset[str]

    def lines(self) -> Iterator[str]:
        """Yield it for people."""
        yield f"looked {self.looks} times in {self.seconds:.1f} s (longest gap {self.longest_gap * 1e3:.0f} ms)"
        for device, seconds in sorted(self.overlap.items()):
            yield (
                f"{device}: memory changed hands {self.turns[device]} times; two pods had some for "
                f"{seconds:.3f} s"
            )


class Judge:
    """The judge as a process of its own, so that nothing of ours holds up its looks.

    Args:
        state: folder of the cluster; the files of its nodes' devices are below it.
    """

    def __init__(self, state: Path) -> None:
        self._state = state
        self._lines: list[dict[str, Any]] = []
        self._file = state / "judge.jsonl"

    def __enter__(self) -> Self:
        with self._file.open("w") as out:
            command = [sys.executable, "-I", __file__, str(self._state)]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=30)

    def asleep_mib(self) -> float:
        """Return a sleeping worker's memory: the least that one had after it had most; 0: none slept."""
        series: dict[str, list[float]] = {}
        for line in self._read():
            if line.get("mib"):
                series.setdefault(line["pod"], []).append(line["mib"])
        found = [0.0]
        for mib in series.values():
            most = max(mib)
            awake = next(i for i, each in enumerate(mib) if each > most - MARGIN_MIB)
            least = min(mib[awake:])
            found += [least] if least < most - MARGIN_MIB else []
        return max(found)

    def having(self, idle_mib: float) -> dict[str, set[str]]:
        """Return the pods that have memory of each device now."""
        verdict = _Verdict(idle_mib)
        for line in self._read():
            verdict.see(line)
        return verdict.now()

    def report(self, idle_mib: float) -> Report:
        """Return what it saw since it began, up to now.

        Args:
            idle_mib: a worker's memory asleep.
        """
        lines = self._read()
        verdict = _Verdict(idle_mib)
        for line in lines:
            verdict.see(line)
        ends = [line for line in lines if "looks" in line]
        last: dict[str, Any] = ends[-1] if ends else {"looks": 0, "gap": 0.0, "t": 0.0}
        began = lines[0]["t"] if lines else 0.0
        return Report(
            seconds=last["t"] - began,
            looks=last["looks"],
            longest_gap=last["gap"],
            overlap=verdict.overlap,
            turns=verdict.turns,
            pods=frozenset(verdict.pods),
        )

    def _read(self) -> list[dict[str, Any]]:
        return [
            json.loads(line) for line in self._file.read_text().splitlines() if line[-1:] == "}"
        ]


@dataclass
class _Verdict:
    """Adds up lines of the judge."""

    idle_mib: float
    overlap: dict[str, float] = field(default_factory=dict)
    turns: dict[str, int] = field(default_factory=dict)
    pods: set[str] = field(default_factory=set)
    _marks: set[tuple[str, str]] = field(default_factory=set)
    _memory: dict[tuple[str, str], float] = field(default_factory=dict)
    _last: dict[str, str] = field(default_factory=dict)
    _since: float = 0.0

    def see(self, line: Mapping[str, Any]) -> None:
        """Take one line in; they come in the order of time."""
        for device, pods in self.now().items():
            self.overlap.setdefault(device, 0.0)
            self.overlap[device] += line["t"] - self._since if len(pods) > 1 else 0.0
        self._since = line["t"]
        if "marks" in line:
            self._marks = {(device, pod) for device, pod in line["marks"]}
        if "mib" in line:
            for device in line["devices"]:
                self._memory[device, line["pod"]] = line["mib"]
        for device, pods in self.now().items():
            self.overlap.setdefault(device, 0.0)
            self.turns.setdefault(device, 0)
            self.pods |= pods
            for pod in pods - {self._last.get(device, "")}:
                self._last[device] = pod
                self.turns[device] += 1

    def now(self) -> dict[str, set[str]]:
        """Return the pods that have memory of each device."""
        found: dict[str, set[str]] = {}
        for device, pod in self._marks:
            found.setdefault(device, set()).add(pod)
        for (device, pod), mib in self._memory.items():
            found.setdefault(device, set())
            if mib > self.idle_mib + MARGIN_MIB:
                found[device].add(pod)
        return found


# ---------------------------------------------------------------- the program


@dataclass
class _Seen:
    """A process that sees devices."""

    pid: int
    pod: str
    devices: tuple[str, ...]
    worker: bool
    mib: float = 0.0


class _Looks:
    def __init__(self, state: Path) -> None:
        self._nodes = state / "nodes"
        self._known: dict[int, _Seen | None] = {}
        self._inodes: dict[str, str] = {}
        self._marks: list[tuple[str, str]] = []
        self._said: dict[str, float] = {}
        self._devices: dict[str, tuple[str, ...]] = {}
        self._share = re.compile(rb"\0ROLLOUT_TURN_DEVICES=([^\0]*)")
        cluster = re.escape(state.name)
        self._mount = re.compile(rf"/{cluster}/nodes/(\S+)/run/devices/(\S+) /dev/")

    def search(self) -> None:
        """Find new processes, and forget those that ended."""
        pids = {int(name) for name in os.listdir("/proc") if name.isdigit()}
        for pid in self._known.keys() - pids:
            del self._known[pid]
        for pid in pids:
            seen = self._known.get(pid)
            if pid not in self._known or (seen is not None and not seen.worker):
                with suppress(OSError):
                    self._known[pid] = self._process(pid)
        for file in self._nodes.glob("*/run/devices/*"):
            self._inodes[str(file.stat().st_ino)] = f"{file.parts[-4]}/{file.name}"

    def _process(self, pid: int) -> _Seen | None:
        folder = Path("/proc", str(pid))
        pod = _POD.search((folder / "cgroup").read_text())
        if pod is None:
            # A process joins its pod's cgroup a moment after its start.
            return _Seen(pid, "", (), False) if self._is_young(folder) else None
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
        return _Seen(pid, pod[1].replace("_", "-"), devices, worker and bool(devices))

    def _is_young(self, folder: Path) -> bool:
        return time.time() - folder.stat().st_mtime < 5

    def lines(self) -> Iterator[dict[str, Any]]:
        """Look once, and yield what has changed."""
        marks = sorted(set(self._marked()))
        if marks != self._marks:
            self._marks = marks
            yield {"marks": marks}
        memory: dict[str, float] = dict.fromkeys(self._said, 0.0)
        for seen in self._known.values():
            if seen is not None and seen.worker:
                memory[seen.pod] = memory.get(seen.pod, 0.0) + _mib(seen.pid)
                self._devices[seen.pod] = seen.devices
        for pod, mib in memory.items():
            if abs(mib - self._said.get(pod, 0.0)) >= STEP_MIB or (not mib and self._said.get(pod)):
                self._said[pod] = mib
                yield {"pod": pod, "devices": self._devices[pod], "mib": round(mib, 1)}

    def _marked(self) -> Iterable[tuple[str, str]]:
        for line in Path("/proc/locks").read_text().splitlines():
            words = line.split()
            device = self._inodes.get(words[-3].rpartition(":")[2])
            if device is None or words[1] != "FLOCK":
                continue
            seen = self._known.get(int(words[4]))
            yield device, seen.pod if seen is not None else f"process {words[4]}"


def _mib(pid: int) -> float:
    """Memory of a process that is no file's."""
    try:
        _, resident, shared, *_ = Path("/proc", str(pid), "statm").read_text().split()
    except OSError:
        return 0.0
    return (int(resident) - int(shared)) / PAGES_PER_MIB


def _look(state: Path) -> None:
    looks = _Looks(state)
    searched = told = last = 0.0
    count, gap = 0, 0.0
    while not select.select([sys.stdin], [], [], SAMPLE_SECONDS)[0]:
        now = time.monotonic()
        gap, last = max(gap, now - last if last else 0.0), now
        count += 1
        if now - searched > SEARCH_SECONDS:
            looks.search()
            searched = now
        for line in looks.lines():
            print(json.dumps({"t": now, **line}), flush=True)
        if now - told > 1:
            print(json.dumps({"t": now, "looks": count, "gap": gap}), flush=True)
            told = now
    print(json.dumps({"t": time.monotonic(), "looks": count, "gap": gap}), flush=True)


if __name__ == "__main__":
    _look(Path(sys.argv[1]))
