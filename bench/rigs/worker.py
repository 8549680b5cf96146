"""Models with random weights, and a real worker of one engine, seen from outside: its start, its streams, its memory."""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from rollout_worker.observe.worker_telemetry import resident_bytes
from tests.support.engine import tinymodels
from tests.support.engine.engine_kinds import CACHE, ROOT, EngineKind
from tests.support.engine.workers import PROMPT, Client, Command, events
from tests.support.waiting import until_sync

START_SECONDS = 400.0
CALL_SECONDS = 300.0
POLL_SECONDS = 0.02


TINY = tinymodels.TinyModels(CACHE / "models")


def half_billion(seed: int, dtype: str) -> Path:
    """Return a complete model folder, which takes some tens of seconds to make the first time."""
    return tinymodels.half_billion(CACHE / "models", seed, dtype)


@dataclass(slots=True)
class Streams:
    """Requests that are always running: another one replaces a request that ends.

    `arrivals`: when the deltas of each request arrived, requests in the order in which they began;
    guarded by `lock`.
    """

    arrivals: list[list[float]] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def open(self) -> list[float]:
        with self.lock:
            self.arrivals.append([])
            return self.arrivals[-1]

    def seen(self, since: float = 0.0) -> list[list[float]]:
        """Return the arrivals after `since` by request, leaving out requests that had none."""
        with self.lock:
            kept = [[at for at in each if at > since] for each in self.arrivals]
        return [each for each in kept if each]

    def usual(self, until: float) -> list[float]:
        """Return the seconds between consecutive deltas of each request, before `until`."""
        each = [[at for at in some if at < until] for some in self.seen()]
        return [late - early for some in each for early, late in itertools.pairwise(some)]

    def await_running(self, count: int, since: float) -> None:
        """Wait until `count` requests have had a token since then."""
        until_sync(
            lambda: len(self.seen(since)) >= count, CALL_SECONDS, what="all requests to run again"
        )

    def longest(self, since: float, until: float) -> float:
        """Return the longest time between `since` and `until` in which no delta arrived."""
        marks = [at for some in self.seen(since) for at in some if at < until]
        ordered = [since, *sorted(marks), until]
        return max(b - a for a, b in itertools.pairwise(ordered))


class Observed(Command):
    """`rollout-worker serve` on its own; calls wait long enough for models of several gigabytes.

    `start`: seconds of each step of the start, in order: until the ports serve, then by the
    progress that `/v1/state` reported.
    """

    def __init__(self, kind: EngineKind, model: Path, log: Path, flags: Sequence[str]) -> None:
        began = time.monotonic()
        arguments = ["--engine", kind.name, "--shutdown-grace", "0", *kind.flags, *flags]
        env = {"PYTHONPATH": str(ROOT / "src"), **kind.env}
        super().__init__(model, log, arguments, env, python=kind.python)
        for client in (self.data, self.control):
            client.timeout = httpx.Timeout(CALL_SECONDS)
        self.start = {"until its ports serve": time.monotonic() - began}
        try:
            self._watch_start()
        except BaseException:
            self.finish()
            raise

    def _watch_start(self) -> None:
        until = time.monotonic() + START_SECONDS
        last = time.monotonic()
        while True:
            state = self.state()
            now = time.monotonic()
            if state["last_error"] or now > until:
                raise RuntimeError(f"{state}: {self._log.read_text()[-3000:]}")
            if state["lifecycle"] == "Active":
                return
            said = (state["progress"] or {}).get("message", state["lifecycle"])
            step = re.sub(r" *\d+ ?%.*", "", said)
            self.start[step] = self.start.get(step, 0.0) + now - last
            last = now
            time.sleep(POLL_SECONDS)

    def memory(self) -> float:
        """Return the resident MiB of the worker and its descendants, shared pages counted once."""
        return resident_bytes(self.process.pid) / 2**20

    def stage_seconds(self, version: int, path: Path) -> float:
        began = time.monotonic()
        slot = self.stage(1, version, path, seconds=CALL_SECONDS)
        assert slot["phase"] == "Staged", slot
        return time.monotonic() - began

    def timed(self, verb: str, **body: Any) -> tuple[float, dict[str, Any]]:
        """Return the seconds of a successful call of the control port, and its answer."""
        began = time.monotonic()
        answer = self.call_verb(verb, **body)
        return time.monotonic() - began, answer

    def finish(self) -> None:
        self.end_all(grace_seconds=60)


@contextmanager
def streaming(worker: Client, count: int, length: int, spread: int = 0) -> Iterator[Streams]:
    """Keep `count` requests under way, the first of `length` tokens, each next `spread` longer."""
    streams = Streams()
    threads = [
        worker.in_background(partial(_follow, worker, streams, length + index * spread))
        for index in range(count)
    ]
    try:
        until_sync(
            lambda: sum(len(some) > 3 for some in streams.seen()) >= count,
            CALL_SECONDS,
            what="every request to stream",
        )
        yield streams
    finally:
        streams.ended.set()
        worker.post("abort", all=True)
        for thread in threads:
            thread.result(CALL_SECONDS)


def _follow(worker: Client, streams: Streams, length: int) -> None:
    sampling = {"max_tokens": length, "ignore_eos": True}
    body = {"token_ids": PROMPT, "sampling": sampling, "stream": True}
    while not streams.ended.is_set():
        mine = streams.open()
        with worker.data.stream("POST", "/v1/generate", json=body) as answer:
            assert answer.status_code == 200, answer.read()
            for name, _ in events(answer.iter_lines()):
                if name == "delta":
                    mine.append(time.monotonic())
