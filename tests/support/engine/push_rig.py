"""Two workers, a trainer that pushes to them, and what both make of stops and kills.

What a kill leaves may fail an update, for as long as not all is back. An update that fails without one fails the
test, and so does what a process keeps more of than before.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TextIO

import httpx

from localkube.settings import free_ports
from rollout_common.wire import GenerateOutput
from tests.support.engine.reference import Reference
from tests.support.engine.workers import LOOPBACK
from tests.support.processes import PROC, held, traces
from tests.support.processes import look as process
from tests.support.waiting import eventually

NURSERY = Path(__file__).with_name("push_nursery.py")
HEAL_SECONDS = 90.0
"""After a kill all is back, and all replicas serve an update, within this."""
ORDER_SECONDS = 120.0
SETTLE_SECONDS = 20.0
"""Idle connections of HTTP end within this, so that what is left is held for good."""
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

    def start(self, role: str, arguments: Sequence[str], out: Path, lease: float | None) -> int:
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


class Kept:
    """A worker that is started again whenever it has ended, at the same addresses."""

    def __init__(self, rig: Rig, name: str, model: Path) -> None:
        self._rig, self._out = rig, rig.folder / f"{name}.out"
        data, control, port = free_ports(3)
        self.url, self.control_url = (f"http://127.0.0.1:{each}" for each in (data, control))
        self._flags = [
            "--model", str(model), "--auth", "none", *LOOPBACK,
            "--data-port", str(data), "--control-port", str(control),
            "--weights-port", str(port), "--weights-socket", str(rig.folder / f"{name}.sock"),
        ]  # fmt: skip
        self.start()

    def start(self) -> None:
        self.pid = self._rig.nursery.start("worker", self._flags, self._out, self._rig.lease)

    def serves(self) -> bool:
        with suppress(httpx.TransportError):
            ready = httpx.get(f"{self.url}/ready", timeout=2, trust_env=False, verify=False)
            return ready.status_code == 200
        return False


class Rig:
    """Two workers that are kept alive, and a trainer that does what it is told; made by `push_rig`."""

    def __init__(
        self, folder: Path, model: Path, versions: Sequence[Path], lease: float | None
    ) -> None:
        self.folder, self.lease, self._versions = folder, lease, versions
        self._judges = {each: Reference(each) for each in {model, *versions}}
        self.contents = {(0, 0): model}
        """By identity: what was said to be in it, before anything was sent."""
        self.failed: list[str] = []
        """What kills made of an update, in the trainer's words."""
        self.named: set[str] = set()
        """What the processes would leave behind: shared memory and sockets with names."""
        self.seconds = 0.0
        """That the last whole update took."""
        self.trainer = self._number = 0
        self._hurt_at: float | None = time.monotonic()
        self._orders: socket.socket | None = None
        self.nursery = Nursery(folder / "nursery.out")
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(folder / "orders"))
        self._listening.listen()
        self._listening.settimeout(60)
        self.workers = {name: Kept(self, name, model) for name in "ab"}
        self._ended = threading.Event()
        self._keeper = threading.Thread(target=self._keep)
        self._keeper.start()

    # Processes.

    def _keep(self) -> None:
        while not self._ended.wait(0.02):
            for worker in self.workers.values():
                if self.nursery.ended(worker.pid):
                    worker.start()

    def start_trainer(self) -> None:
        """End the trainer if there is one; wait until another one has the pool."""
        self._drop_trainer()
        until = time.monotonic() + HEAL_SECONDS
        while self._orders is None:
            assert time.monotonic() < until, "no trainer gets the pool"
            workers = self.workers.values()
            arguments = [
                str(self.folder / "orders"),
                ",".join(each.url for each in workers),
                ",".join(each.control_url for each in workers),
                *map(str, self._versions),
            ]
            out = self.folder / "trainer.out"
            self.trainer = self.nursery.start("trainer", arguments, out, self.lease)
            self._orders, _ = self._listening.accept()
            self._orders.settimeout(ORDER_SECONDS)
            self._lines: TextIO = self._orders.makefile("r")
            self._version = 0
            if (said := self.hear()) is not None:
                self._epoch = said["epoch"]

    def _drop_trainer(self) -> None:
        if self._orders is not None:
            self._lines.close()
            self._orders.close()
            self._orders = None

    def order(self, folder: int, transport: str, **how: Any) -> None:
        """Have the trainer publish the next version."""
        self._version += 1
        self.contents[self._epoch, self._version] = self._versions[folder]
        order = {"version": self._version, "folder": folder, "transport": transport, **how}
        assert self._orders is not None
        with suppress(ConnectionError):
            self._orders.sendall(json.dumps(order).encode() + b"\n")

    def hear(self) -> dict[str, Any] | None:
        """The trainer's next line; None: it has ended."""
        line = ""
        with suppress(ConnectionError):
            line = self._lines.readline()
        if not line:
            self._drop_trainer()
            return None
        said: dict[str, Any] = json.loads(line)
        return said

    def kill(self, victim: Victim) -> None:
        pid = self.trainer if victim == "trainer" else self.workers[victim].pid
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
        if self._orders is None:
            self.start_trainer()
        self._number += 1
        self.order(self._number % len(self._versions), ("shm", "tcp")[self._number % 2])
        if victim is not None:
            assert self._orders is not None
            select.select([self._orders], [], [], delay)
            self.kill(victim)
        said = self.hear()
        if said is not None and said.get("replicas") == len(self.workers):
            self.seconds = said["seconds"]
            return True
        what = "the trainer has ended" if said is None else said.get("failed", str(said))
        assert self._hurt_at is not None, f"update {self._number}: {what}; nothing was killed"
        self.failed.append(what)
        return False

    def heal(self) -> None:
        """Publish until all replicas serve it again."""
        if self._hurt_at is None:
            return
        while not self.update():
            assert time.monotonic() < self._hurt_at + HEAL_SECONDS, self.failed[-3:]
            for name, worker in self.workers.items():
                eventually(f"{name} to serve", worker.serves, HEAL_SECONDS, 0.05)
        self._hurt_at = None

    def wrong_spans(self, prompt: Sequence[int], output: GenerateOutput) -> Iterator[str]:
        """Say which tokens have another logprob than the weights that their span names give them."""
        end = 0
        assert output.logprobs is not None
        for span in output.weights:
            folder = self.contents.get((span.epoch, span.version))
            if span.start != end or folder is None or span.stale_kv:
                yield str(span)
                return
            end = span.end
            told = self._judges[folder].raw_logprobs(prompt, output.token_ids)[span.start : end]
            got = output.logprobs[span.start : end]
            far = max(abs(a - b) for a, b in zip(got, told, strict=True))
            if far > CLOSE:
                yield f"{span} is off by {far:.3g}"
        if end != len(output.token_ids):
            yield f"spans end at {end} of {len(output.token_ids)} tokens"

    # What is kept.

    def calm(self) -> dict[int, Held]:
        """What each process keeps after a few updates in a row, the last one by TCP."""
        self.heal()
        for _ in range(3):
            assert self.update()
        while self._number % 2 == 0:
            assert self.update()
        pids = [self.trainer, *(worker.pid for worker in self.workers.values())]
        gone = [pid for pid in pids if not (PROC / str(pid)).exists()]
        assert not gone, f"of trainer, a and b ({pids}) ended, and nobody killed it: {gone}"
        self.named |= traces(filter(None, map(process, pids)))
        return {pid: look(pid) for pid in pids}

    def close(self) -> None:
        self._ended.set()
        self._keeper.join(30)
        self._drop_trainer()
        self._listening.close()
        self.nursery.close()


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


SLACK_MIB = 24
"""Allocators and caches of a process fill for a while; a version kept each time would be gigabytes."""
SLACK_THREADS = 2
"""A pool of threads grows to its bound at the first crowd; a thread kept by each kill would be dozens."""


def settled(before: dict[int, Held], connections: int) -> None:
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

    eventually("no process to keep more", no_more, SETTLE_SECONDS, seen=lambda: (before, now))


@contextmanager
def push_rig(
    folder: Path, model: Path, versions: Sequence[Path], lease: float | None = None
) -> Iterator[Rig]:
    """Run it, perhaps with shorter leases; at the end every process that it started is gone."""
    rig = Rig(folder, model, versions, lease)
    try:
        yield rig
    except AssertionError as error:
        for log in sorted(folder.glob("*.out")):
            error.add_note(f"{log.name}: {log.read_text()[-2000:]}")
        raise
    finally:
        rig.close()
