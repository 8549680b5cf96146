"""One node with one device, a worker and a trainer that take turns on it, and accidents that happen to them.

Whoever is killed is started again, as a kubelet would. A judge looks each millisecond who has memory; besides, each
process that takes memory finds it free or says OVERLAP.
"""

from __future__ import annotations

import bisect
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from demo.judge import Judge, Report
from localkube.settings import free_ports
from tests.support.engine.workers import LOOPBACK
from tests.support.waiting import until_sync

ROOT = Path(__file__).parents[3]
ACTORS = Path(__file__).with_name("turn_actors.py")
DEVICE = "gpu.example.com/node-1/gpu-0"
SERVING_SECONDS = 0.005
WAITED_SECONDS = 0.003
"""Who has wanted the turn for so long stands in the kernel and waits."""
PROGRESS_SECONDS = 120.0
"""After an accident both have had a turn within this; a worker's start takes long on a busy core."""


@dataclass(frozen=True, slots=True)
class Event:
    """A line of an actor's log."""

    t: float
    actor: str
    what: str
    pid: int
    waits: float | None = None


@dataclass(slots=True)
class Figures:
    """What came of it, in seconds."""

    turns: int = 0
    """How often the turn went from one to the other."""
    given: list[float] = field(default_factory=list)
    """From freed memory until the other one, who waits, may take some."""
    killed: list[float] = field(default_factory=list)
    """From the kill of a holder until the other one, who waits, may take some."""
    overlaps: int = 0
    passed_over: list[int] = field(default_factory=list)
    """For each turn of the worker: how often the trainer began another one while the worker waited."""


class Actor:
    """A process that is started again whenever it has ended, until `close`."""

    def __init__(self, name: str, folder: Path, *arguments: str) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self.log.touch()
        self.out = folder / f"{name}.out"
        self._out = self.out.open("ab")
        self._command = [sys.executable, str(ACTORS), name, str(self.log), *arguments]
        self._ended = threading.Event()
        self._process = self._start()
        self._thread = threading.Thread(target=self._keep, name=f"keep {name}")
        self._thread.start()

    def _start(self) -> subprocess.Popen[bytes]:
        path = os.pathsep.join(filter(None, sys.path))
        env = {**os.environ, "PYTHONPATH": path, "ROLLOUT_TURN_HOLDER": self.name}
        return subprocess.Popen(self._command, env=env, stdout=self._out, stderr=self._out)

    def _keep(self) -> None:
        while True:
            self._process.wait()
            if self._ended.is_set():
                return
            self._process = self._start()

    @property
    def pid(self) -> int:
        """Of the process that runs now, or ended a moment ago."""
        return self._process.pid

    def has_turn(self) -> bool:
        """Whether it had its turn when it last noted anything."""
        last = self.log.read_bytes()[-200:].rstrip().rpartition(b"\n")[2]
        return b'"had"' in last

    def close(self) -> None:
        """End it for good."""
        self._ended.set()
        self._process.kill()
        self._thread.join(30)
        self._out.close()


class Node:
    """See the module; made by `turn_node`."""

    def __init__(self, folder: Path, model: Path, judge: Judge, memory: Path) -> None:
        locks = folder / "turn"
        locks.mkdir()
        data, control = free_ports(2)
        self._control = f"http://127.0.0.1:{control}/v1/"
        flags = [
            "--model", str(model), "--auth", "none", "--restart-delays", "0", *LOOPBACK,
            "--data-port", str(data), "--control-port", str(control),
            "--turn-directory", str(locks), "--turn-devices", DEVICE, "--turn-holder", "worker",
        ]  # fmt: skip
        self.judge = judge
        self.kills: list[tuple[float, str]] = []
        self._wakes: list[float] = []
        self._ended = threading.Event()
        self.worker = Actor("worker", folder, str(memory), *flags)
        self.trainer = Actor("trainer", folder, str(memory), str(locks), DEVICE)
        self.late: list[float] = []
        """How much too late this process came back from sleep: what the machine's other work does to everybody."""
        self._threads = [threading.Thread(target=each) for each in (self._steer, self._oversleep)]
        for thread in self._threads:
            thread.start()

    def _oversleep(self) -> None:
        while not self._ended.is_set():
            began = time.monotonic()
            time.sleep(0.01)
            self.late.append(time.monotonic() - began - 0.01)

    def _steer(self) -> None:
        """Wake the worker and put it to sleep again, without end, as its trainer and operator would."""
        with httpx.Client(
            base_url=self._control, timeout=PROGRESS_SECONDS, trust_env=False
        ) as http:
            while not self._ended.is_set():
                self._wakes.append(time.monotonic())
                with suppress(httpx.TransportError):
                    if http.post("wake", json={}).is_success:
                        time.sleep(SERVING_SECONDS)
                        if http.post("sleep", json={"level": 1}).is_success:
                            continue
                time.sleep(0.02)

    def events(self) -> list[Event]:
        """What the actors noted, in the order of time."""
        found = []
        for actor in (self.worker, self.trainer):
            for line in actor.log.read_text().splitlines():
                with suppress(json.JSONDecodeError):  # a killed one's last line may be cut
                    said = json.loads(line)
                    pid = said.get("child", said["pid"])
                    found.append(Event(said["t"], actor.name, said["what"], pid, said.get("waits")))
        return sorted(found, key=lambda event: event.t)

    def turns(self) -> dict[str, int]:
        """How many turns each has had."""
        actors = (self.worker, self.trainer)
        return {actor.name: actor.log.read_bytes().count(b'"had"') for actor in actors}

    def await_turns(self, more: int) -> None:
        """Wait until each has had so many more turns."""
        before = self.turns()

        def moved() -> bool:
            return all(count >= before[name] + more for name, count in self.turns().items())

        until_sync(moved, PROGRESS_SECONDS, what=f"{more} more turns of each than {before}")

    def child(self) -> int:
        """Process of the engine that was started last."""
        return [event.pid for event in self.events() if event.what == "child"][-1]

    def kill(self, victim: str) -> None:
        """kill -9 of `worker`, `trainer` or `child`."""
        pid = self._pid(victim)
        self.kills.append((time.monotonic(), victim))
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def stop(self, victim: str, seconds: float) -> None:
        """SIGSTOP, and SIGCONT so much later."""
        pid = self._pid(victim)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(seconds)
            os.kill(pid, signal.SIGCONT)

    def _pid(self, victim: str) -> int:
        if victim == "child":
            return self.child()
        return (self.worker if victim == "worker" else self.trainer).pid

    def happen(self, dice: random.Random) -> None:
        """One accident, at any moment or while the victim has its turn; then both go on."""
        time.sleep(dice.uniform(0, 0.1))
        victim = dice.choice(["worker", "trainer", "trainer", "child"])
        kills = dice.random() < 0.6
        if victim != "child" and dice.random() < 0.7:
            self._catch(self.trainer if victim == "trainer" else self.worker)
        if kills:
            self.kill(victim)
        else:
            self.stop(victim, dice.uniform(0.02, 0.3))
        self.await_turns(2)

    def _catch(self, actor: Actor) -> None:
        """SIGSTOP an actor in its turn."""
        end = time.monotonic() + PROGRESS_SECONDS
        while time.monotonic() < end:
            if actor.has_turn():
                pid = actor.pid
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
                    if actor.has_turn():
                        return
                    os.kill(pid, signal.SIGCONT)
            time.sleep(0.0005)
        raise AssertionError(f"{actor.name} has no turn")

    def figures(self) -> Figures:
        """Return what came of it so far."""
        events = self.events()
        found = Figures(overlaps=sum(event.what == "OVERLAP" for event in events))
        told = [event for event in events if event.what in ("had", "freed")]
        found.passed_over = self._passed_over(told)
        for before, after in itertools.pairwise(told):
            if after.what != "had" or after.actor == before.actor:
                continue
            found.turns += 1
            if before.what == "freed" and self._waited(after, before.t):
                found.given.append(after.t - before.t)
            ends = [t for t, who in self.kills if who == before.actor and before.t < t < after.t]
            if before.what == "had" and len(ends) == 1 and self._waited(after, ends[0]):
                found.killed.append(after.t - ends[0])
        return found

    def _passed_over(self, told: list[Event]) -> list[int]:
        began = [event.t for event in told if event.actor == "trainer" and event.what == "had"]
        found = []
        for event in told:
            if event.actor == "worker" and event.what == "had":
                waits = self._wanted(event) + WAITED_SECONDS
                found.append(max(0, bisect.bisect(began, event.t) - bisect.bisect(began, waits)))
        return found

    def _wanted(self, event: Event) -> float:
        """When who had a turn began to want it."""
        if event.waits is not None:
            return event.waits
        before = bisect.bisect(self._wakes, event.t)
        return self._wakes[before - 1] if before else event.t

    def _waited(self, event: Event, since: float) -> bool:
        """Whether who had a turn wanted it already some time before."""
        return self._wanted(event) < since - WAITED_SECONDS

    def report(self) -> Report:
        """What the judge saw."""
        return self.judge.report(0.0)

    def last_words(self) -> str:
        """What happened last, for a test that fails."""
        events = "\n".join(map(str, self.events()[-12:]))
        said = self.worker.out.read_text()[-3000:]
        return f"kills: {self.kills[-3:]}\n{events}\nworker: {said}\ntrainer: {self.trainer.out.read_text()[-500:]}"

    def close(self) -> None:
        """End all."""
        self._ended.set()
        self.worker.close()
        self.trainer.close()
        for thread in self._threads:
            thread.join(30)


@contextmanager
def turn_node(folder: Path, model: Path) -> Iterator[Node]:
    """Start a node; its judge looks from before the first turn until after the last."""
    memory = folder / "state" / "nodes" / "node-1" / "run" / "devices" / "gpu-0"
    memory.parent.mkdir(parents=True)
    memory.touch()
    with Judge(folder / "state") as judge:
        node = Node(folder, model, judge, memory)
        try:
            yield node
        finally:
            node.close()
