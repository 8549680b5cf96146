"""A judge of turns on the local cluster's fake devices: who had memory of which device, each millisecond.

    with Judge(cluster.state) as judge: …
    report = judge.report(judge.asleep_mib())

It runs on the machine below the nodes and asks no pod; a separate program looks (`looks.py`). The
trainer has memory of a device while it holds a flock on the device's file, a worker while its own memory is well
above what it has asleep.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

PROGRAM = Path(__file__).with_name("looks.py")
MARGIN_MIB = 32
"""More than an idle worker's memory varies, and less than the weights of the judged models."""


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
        rate = self.looks / self.seconds if self.seconds else 0.0
        yield (
            f"looked {self.looks} times in {self.seconds:.1f} s, {rate:.0f} times a second (longest gap "
            f"{self.longest_gap * 1e3:.0f} ms)"
        )
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
        self._file = state / "judge.jsonl"
        self._forget()

    def _forget(self) -> None:
        self._lines: list[dict[str, Any]] = []
        self._read_bytes = 0
        self._verdicts: dict[float, _Verdict] = {}

    def __enter__(self) -> Self:
        self._forget()
        with self._file.open("w") as out:
            command = [sys.executable, "-I", str(PROGRAM), str(self._state)]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=30)

    def asleep_mib(self) -> float:
        """Return the least memory of a worker after it had most, thus asleep; 0: none slept."""
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
        return self._verdict(idle_mib).now()

    def report(self, idle_mib: float) -> Report:
        """Return what it saw since it began, up to now.

        Args:
            idle_mib: a worker's memory asleep.
        """
        verdict = self._verdict(idle_mib)
        last = verdict.last_end
        return Report(
            seconds=last["t"] - verdict.began,
            looks=last["looks"],
            longest_gap=last["gap"],
            overlap=dict(verdict.overlap),
            turns=dict(verdict.turns),
            pods=frozenset(verdict.pods),
        )

    def _verdict(self, idle_mib: float) -> _Verdict:
        """Add the lines written since the last call."""
        lines = self._read()
        verdict = self._verdicts.setdefault(idle_mib, _Verdict(idle_mib))
        for line in lines[verdict.seen :]:
            verdict.see(line)
        return verdict

    def _read(self) -> list[dict[str, Any]]:
        """Return all lines; reads only new ones, and leaves a line that is being written for the next call."""
        with self._file.open("rb") as file:
            file.seek(self._read_bytes)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._lines += [json.loads(line) for line in whole.splitlines()]
        self._read_bytes += len(whole) + len(newline)
        return self._lines


@dataclass
class _Verdict:
    """Adds up lines of the judge."""

    idle_mib: float
    overlap: dict[str, float] = field(default_factory=dict)
    turns: dict[str, int] = field(default_factory=dict)
    pods: set[str] = field(default_factory=set)
    seen: int = 0
    """Count of lines."""
    began: float = 0.0
    last_end: Mapping[str, Any] = field(default_factory=lambda: {"looks": 0, "gap": 0.0, "t": 0.0})
    """The last line with the number of looks."""
    _marks: set[tuple[str, str]] = field(default_factory=set)
    _memory: dict[tuple[str, str], float] = field(default_factory=dict)
    _last: dict[str, str] = field(default_factory=dict)
    _since: float = 0.0

    def see(self, line: Mapping[str, Any]) -> None:
        """Add one line; lines come in the order of time."""
        if not self.seen:
            self.began = line["t"]
        self.seen += 1
        if "looks" in line:
            self.last_end = line
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
