"""Two workers, a trainer that pushes to them, and requests beside: killed at random, started again, judged; one rig, one file.

What a kill leaves may fail an update, for as long as not all is back. An update that fails without one fails the
test, and so does what a process keeps more of than before.
"""

from __future__ import annotations

import json
import os
import random
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import httpx

from localkube.settings import free_ports
from rollout_client import GenerateResult, RolloutError, RolloutPool
from tests.support.engine.reference import Reference
from tests.support.engine.workers import LOOPBACK, PROMPT
from tests.support.processes import PROC, held, traces
from tests.support.processes import look as process
from tests.support.waiting import eventually

NURSERY = Path(__file__).with_name("push_nursery.py")
HEAL_SECONDS = 90.0
"""After a kill all is back, and all replicas serve an update, within this."""
ORDER_SECONDS = 120.0
SETTLE_SECONDS = 20.0
"""Idle connections of HTTP end within this, so that what is left is held for good."""
TOKENS = 12
CLOSE = 1e-3
Victim = Literal["trainer", "a", "b"]


class Nursery:
    """Starts processes, and knows which have ended."""

    def __init__(self, log: Path) -> None:
        path = os.pathsep.join(filter(None, sys.path))
        self._log = log.open("wb")
        self._process = subprocess.Popen(
            [sys.executable, str(NURSERY)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._log, env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self._news = threading.Condition()
        self._starting = threading.Lock()
        """Held from an order to its answer: answers don't say whose they are."""
        self._started: list[int] = []
        self._ended: set[int] = set()
        self._ready = self._over = False
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        with self._news:
            assert self._news.wait_for(lambda: self._ready or self._over, 120)
        assert self._ready, log.read_text()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            said = json.loads(line)
            with self._news:
                self._ready |= "ready" in said
                if "started" in said:
                    self._started.append(said["started"])
                if "ended" in said:
                    self._ended.add(said["ended"])
                self._news.notify_all()
        with self._news:
            self._over = True
            self._news.notify_all()

    def start(
        self, role: str, arguments: Sequence[str], out: Path, lease: float | None = None
    ) -> int:
        """Start a process, perhaps with shorter leases; returns its id."""
        order = {"role": role, "arguments": list(arguments), "out": str(out), "lease": lease}
        with self._starting, self._news:
            count = len(self._started)
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()
            assert self._news.wait_for(lambda: len(self._started) > count, 30)
            return self._started[count]

    def ended(self, pid: int, seconds: float = 0) -> bool:
        """Whether a process has ended, within these seconds."""
        with self._news:
            return self._news.wait_for(lambda: pid in self._ended, seconds)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._thread.join(30)
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._log.close()


@dataclass
class Held:
    """What a process keeps."""

    descriptors: int
    threads: int
    memfds: int
    """Bytes of memory without a name, open or mapped; its own and others'."""
    mib: int
    """Anonymous memory that is there."""


def look(pid: int) -> Held:
    own, sizes = held(pid), dict[int, int]()
    for link in (PROC / str(pid) / "fd").iterdir():
        with suppress(FileNotFoundError):
            if os.readlink(link).startswith("/memfd:"):
                found = link.stat()
                sizes[found.st_ino] = found.st_size
    for line in (PROC / str(pid) / "maps").read_text().splitlines():
        if mapped := re.match(r"(\w+)-(\w+) \S+ (\w+) \S+ (\d+) +/memfd:", line):
            begin, end, offset = (int(mapped[n], 16) for n in (1, 2, 3))
            inode = int(mapped[4])
            sizes[inode] = max(sizes.get(inode, 0), offset + end - begin)
    return Held(own["descriptors"], own["threads"], sum(sizes.values()), own["MiB"])


class Kept:
    """A worker that is started again whenever it has ended, at the same addresses."""

    def __init__(self, rig: Rig, name: str, model: Path) -> None:
        self.name, self._rig = name, rig
        self.data, self.control, port = free_ports(3)
        self._flags = [
            "--model", str(model), "--auth", "none", *LOOPBACK,
            "--data-port", str(self.data), "--control-port", str(self.control),
            "--weights-port", str(port), "--weights-socket", str(rig.folder / f"{name}.sock"),
        ]  # fmt: skip
        self.start()

    def start(self) -> None:
        out = self._rig.folder / f"{self.name}.out"
        self.pid = self._rig.nursery.start("worker", self._flags, out)

    def serves(self) -> bool:
        with suppress(httpx.TransportError):
            url = f"http://127.0.0.1:{self.data}/ready"
            return httpx.get(url, timeout=2, trust_env=False, verify=False).status_code == 200
        return False


@dataclass
class Figures:
    """What came of it."""

    updates: int = 0
    failed: list[str] = field(default_factory=list)
    """What kills made of an update, in the trainer's words."""
    kills: dict[str, int] = field(default_factory=lambda: {"trainer": 0, "a": 0, "b": 0})
    seconds: dict[str, list[float]] = field(default_factory=lambda: {"shm": [], "tcp": []})
    healed: list[float] = field(default_factory=list)
    answers: int = 0
    spans: int = 0
    versions: set[tuple[int, int]] = field(default_factory=set)
    """Weights that tokens were sampled with."""


class Rig:
    """See the module; made by `push_rig`."""

    def __init__(self, folder: Path, model: Path, versions: Sequence[Path]) -> None:
        self.folder, self._versions = folder, versions
        self.figures = Figures()
        self.nursery = Nursery(folder / "nursery.out")
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(folder / "orders"))
        self._listening.listen()
        self._listening.settimeout(60)
        self.workers = {name: Kept(self, name, model) for name in "ab"}
        self.trainer = 0
        self._orders: socket.socket | None = None
        self.contents = {(0, 0): model}
        """By identity: what was said to be in it, before anything was sent."""
        self.named: set[str] = set()
        """What the processes would leave behind: shared memory and sockets with names."""
        self._number = 0
        self._hurt_at: float | None = time.monotonic()
        self._ended = threading.Event()
        self._keeper = threading.Thread(target=self._keep)
        self._keeper.start()

    # Processes.

    def _keep(self) -> None:
        while not self._ended.wait(0.02):
            for worker in self.workers.values():
                if self.nursery.ended(worker.pid):
                    worker.start()

    def _has_trainer(self) -> None:
        """Make a trainer if there is none that listens."""
        until = time.monotonic() + HEAL_SECONDS
        while self._orders is None:
            assert time.monotonic() < until, "no trainer gets the pool"
            arguments = [
                str(self.folder / "orders"),
                ",".join(f"http://127.0.0.1:{w.data}" for w in self.workers.values()),
                ",".join(f"http://127.0.0.1:{w.control}" for w in self.workers.values()),
                *map(str, self._versions),
            ]
            self.trainer = self.nursery.start("trainer", arguments, self.folder / "trainer.out")
            orders, _ = self._listening.accept()
            orders.settimeout(ORDER_SECONDS)
            self._orders, self._pending, self._version = orders, b"", 0
            if (said := self._hear()) is not None:
                self._epoch = said["epoch"]

    def _hear(self) -> dict[str, Any] | None:
        """The trainer's next line; None: it has ended."""
        assert self._orders is not None
        while b"\n" not in self._pending:
            try:
                more = self._orders.recv(1 << 16)
            except ConnectionError:
                more = b""
            if not more:
                self._orders.close()
                self._orders = None
                return None
            self._pending += more
        line, _, self._pending = self._pending.partition(b"\n")
        said: dict[str, Any] = json.loads(line)
        return said

    def kill(self, victim: Victim) -> None:
        pid = self.trainer if victim == "trainer" else self.workers[victim].pid
        self.figures.kills[victim] += 1
        self._hurt_at = time.monotonic()
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        assert self.nursery.ended(pid, 30)

    # Updates.

    def update(self, victim: Victim | None = None, delay: float = 0.0) -> bool:
        """Publish the next version; kill a victim meanwhile, after so many seconds. Whether all serve it.

        Raises:
            AssertionError: It failed, and no kill explains why.
        """
        self._has_trainer()
        hurt = self._hurt_at is not None
        self._number += 1
        self._version += 1
        chosen = self._number % len(self._versions)
        transport = ("shm", "tcp")[self._number % 2]
        self.contents[self._epoch, self._version] = self._versions[chosen]
        order = {"version": self._version, "folder": chosen, "transport": transport}
        assert self._orders is not None
        with suppress(ConnectionError):
            self._orders.sendall(json.dumps(order).encode() + b"\n")
        if victim is not None:
            select.select([self._orders], [], [], delay)
            self.kill(victim)
        said = self._hear()
        self.figures.updates += 1
        return self._judge_update(said, transport, hurt or victim is not None)

    def _judge_update(self, said: dict[str, Any] | None, transport: str, hurt: bool) -> bool:
        whole = said is not None and said.get("replicas") == len(self.workers)
        if not whole:
            what = "the trainer has ended" if said is None else said.get("failed", str(said))
            assert hurt, f"update {self._number} by {transport}: {what}; nothing was killed"
            self.figures.failed.append(what)
        else:
            assert said is not None
            self.figures.seconds[transport].append(said["seconds"])
        return whole

    def heal(self) -> None:
        """Publish until all replicas serve it again."""
        hurt_at = self._hurt_at
        if hurt_at is None:
            return
        while not self.update():
            assert time.monotonic() < hurt_at + HEAL_SECONDS, self.figures.failed[-3:]
            for worker in self.workers.values():
                eventually(f"{worker.name} to serve", worker.serves, HEAL_SECONDS, 0.05)
        self._hurt_at = None
        self.figures.healed.append(time.monotonic() - hurt_at)

    # What is kept.

    def calm(self) -> dict[int, Held]:
        """What each process keeps after a few updates in a row, the last one by TCP."""
        self.heal()
        for _ in range(3):
            assert self.update()
        while self._number % 2 == 0:
            assert self.update()
        gone = [pid for pid in self.pids() if not (PROC / str(pid)).exists()]
        assert not gone, f"of trainer, a and b ({self.pids()}) ended, and nobody killed it: {gone}"
        self.named |= traces(filter(None, map(process, self.pids())))
        return {pid: look(pid) for pid in self.pids()}

    def pids(self) -> list[int]:
        return [self.trainer, *(worker.pid for worker in self.workers.values())]

    def close(self) -> None:
        self._ended.set()
        self._keeper.join(30)
        if self._orders is not None:
            self._orders.close()
        self._listening.close()
        self.nursery.close()


SLACK_MIB = 24
"""Allocators and caches of a process fill for a while; a version kept each time would be gigabytes."""
SLACK_THREADS = 2
"""A pool of threads grows to its bound at the first crowd; a thread kept by each kill would be dozens."""


def settled(before: dict[int, Held], connections: int) -> dict[int, Held]:
    """Fail unless who was there before keeps no more than then, once idle connections have ended.

    So many `connections` of the requests beside may have moved from a worker to another meanwhile.
    """
    now: dict[int, Held] = {}

    def no_more() -> bool:
        now.update({pid: look(pid) for pid in before if (PROC / str(pid)).exists()})
        return all(
            each.descriptors <= before[pid].descriptors + connections
            and each.threads <= before[pid].threads + SLACK_THREADS
            and each.memfds <= before[pid].memfds
            and each.mib <= before[pid].mib + SLACK_MIB
            for pid, each in now.items()
        )

    try:
        eventually("no process to keep more", no_more, SETTLE_SECONDS, seen=lambda: (before, now))
    finally:
        for pid, each in now.items():
            if each.threads > before[pid].threads:
                os.kill(pid, signal.SIGUSR1)
    return now


class Stream:
    """Requests without a break, through a pool that goes on with another worker if one is killed."""

    def __init__(self, rig: Rig, at_once: int, limit: int | None = None) -> None:
        self._rig, self._limit = rig, limit
        urls = [f"http://127.0.0.1:{worker.data}" for worker in rig.workers.values()]
        self._pool = RolloutPool.from_urls(urls)
        self.answers: list[tuple[list[int], GenerateResult]] = []
        self.broken: list[str] = []
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._number = 0
        self._threads = [threading.Thread(target=self._run) for _ in range(at_once)]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        while not self._ended.is_set():
            with self._lock:
                self._number += 1
                number = self._number
                if self._limit is not None and number > self._limit:
                    return
            prompt = [*PROMPT, 10 + number % 4000]
            try:
                answer = self._pool.generate(
                    prompt, sampling={"max_tokens": TOKENS, "ignore_eos": True}, logprobs="raw"
                )
            except RolloutError as error:
                self.broken.append(f"{type(error).__name__}: {error}")
                return
            self.answers.append((prompt, answer))

    @property
    def over(self) -> bool:
        """Whether all requests that were wanted have been answered."""
        return not any(thread.is_alive() for thread in self._threads)

    def close(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(120)
        self._pool.close()


def wrong_answers(rig: Rig, answers: Sequence[tuple[list[int], GenerateResult]]) -> Iterator[str]:
    """Say which tokens have another logprob than the weights that their span names give them."""
    judges = {folder: Reference(folder) for folder in set(rig.contents.values())}
    for prompt, answer in answers:
        output, end = answer.output, 0
        rig.figures.answers += 1
        assert output.logprobs is not None
        for span in output.weights:
            identity = (span.epoch, span.version)
            rig.figures.spans += 1
            rig.figures.versions.add(identity)
            if span.start != end or identity not in rig.contents or span.stale_kv:
                yield f"{answer.request_id}: span {span}"
                return
            end = span.end
            told = judges[rig.contents[identity]].raw_logprobs(prompt, list(output.token_ids))
            got = output.logprobs[span.start : span.end]
            far = max(abs(a - b) for a, b in zip(got, told[span.start : span.end], strict=True))
            if far > CLOSE:
                yield f"{answer.request_id}: {span} is off by {far:.3g}"
        if end != len(output.token_ids) or end != TOKENS:
            yield f"{answer.request_id}: spans end at {end} of {len(output.token_ids)} tokens"


def accidents(dice: random.Random, updates: int, victims: Sequence[Victim]) -> dict[int, Victim]:
    """By number of an update: who is killed in it."""
    chosen = sorted(dice.sample(range(updates), len(victims)))
    return dict(zip(chosen, victims, strict=True))


@contextmanager
def push_rig(folder: Path, model: Path, versions: Sequence[Path]) -> Iterator[Rig]:
    """Run it; at the end every process that it started is gone."""
    with ExitStack() as stack:
        rig = Rig(folder, model, versions)
        stack.callback(rig.close)
        yield rig
