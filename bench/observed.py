"""A real worker of one engine, seen from outside: its start, its streams, its memory.

The model's files are read from disk or from the page cache as the caller chooses.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
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

from engine_kinds import ROOT, EngineKind
from rollout_worker.observe.processes import descendants, end
from waiting import until_sync
from workers import PROMPT, Command, events

START_SECONDS = 400.0
CALL_SECONDS = 300.0
POLL_SECONDS = 0.02


@dataclass(slots=True)
class Streams:
    """Requests that are always under way: who has ended is asked anew at once.

    `arrivals`: of each request, in order of their start, when its deltas arrived. `lock` guards it.
    """

    arrivals: list[list[float]] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def open(self) -> list[float]:
        """Return the list of a new request's arrivals."""
        with self.lock:
            self.arrivals.append([])
            return self.arrivals[-1]

    def seen(self, since: float = 0.0) -> list[list[float]]:
        """Arrivals so far after `since`, by request; requests without any left out."""
        with self.lock:
            kept = [[at for at in each if at > since] for each in self.arrivals]
        return [each for each in kept if each]

    def usual(self, until: float) -> list[float]:
        """Seconds between two deltas of a request, before `until`."""
        each = [[at for at in some if at < until] for some in self.seen()]
        return [late - early for some in each for early, late in itertools.pairwise(some)]

    def await_running(self, count: int, since: float) -> None:
        """Wait until so many requests have got a token since then."""
        until_sync(
            lambda: len(self.seen(since)) >= count, CALL_SECONDS, what="all requests to run again"
        )

    def longest(self, since: float, until: float) -> float:
        """Longest time between `since` and `until` in which no delta arrived."""
        marks = [at for some in self.seen(since) for at in some if at < until]
        ordered = [since, *sorted(marks), until]
        return max(b - a for a, b in itertools.pairwise(ordered))


class Observed(Command):
    """`rollout-worker serve`, alone; calls wait long enough for models of gigabytes.

    `start`: seconds from the process until its ports serve, then by what `/v1/state` said of the
    progress, in order.
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
        """Resident MiB of the worker and all processes below it, shared pages counted once."""
        pids = (self.process.pid, *(process.pid for process in descendants(self.process.pid)))
        return sum(map(_proportional_mib, pids))

    def stage_seconds(self, version: int, path: Path) -> float:
        """Stage and wait for it; returns the seconds."""
        began = time.monotonic()
        body = {"epoch": 1, "version": version, "source": {"path": str(path)}}
        answer = self.post("weights/stage", **body)
        assert answer.status_code == 202, answer.text
        while True:
            slot = self.data.get("/v1/weights").json()["staged"]
            if slot["phase"] == "Staged":
                return time.monotonic() - began
            assert slot["phase"] == "Staging", slot
            assert time.monotonic() < began + CALL_SECONDS, slot
            time.sleep(POLL_SECONDS)

    def timed(self, verb: str, **body: Any) -> tuple[float, dict[str, Any]]:
        """Seconds that a verb of the control port takes, and its answer; it must succeed."""
        began = time.monotonic()
        answer = self.post(verb, **body)
        assert answer.status_code == 200, answer.text
        return time.monotonic() - began, answer.json()

    @contextmanager
    def streaming(self, count: int, length: int, spread: int = 0) -> Iterator[Streams]:
        """Keep `count` requests of `length` tokens under way, later ones `spread` longer each."""
        streams = Streams()
        threads = [
            self.in_background(partial(self._follow, streams, length + index * spread))
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
            self.post("abort", all=True)
            for thread in threads:
                thread.result(CALL_SECONDS)

    def _follow(self, streams: Streams, length: int) -> None:
        sampling = {"max_tokens": length, "ignore_eos": True}
        body = {"token_ids": PROMPT, "sampling": sampling, "stream": True}
        while not streams.ended.is_set():
            mine = streams.open()
            with self.data.stream("POST", "/v1/generate", json=body) as answer:
                assert answer.status_code == 200, answer.read()
                for name, _ in events(answer.iter_lines()):
                    if name == "delta":
                        mine.append(time.monotonic())

    def finish(self) -> None:
        """End it with all its processes."""
        family = descendants(self.process.pid)
        if self.process.poll() is None:
            self.terminate()
        try:
            self.process.wait(60)
        finally:
            self.process.kill()
            end(family, 10)
            if hasattr(self, "data"):
                self.close()


def _proportional_mib(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("Pss:"))


def forget(file: Path) -> None:
    """Drop a file from the page cache.

    Raises:
        RuntimeError: some of it stays, for somebody maps it.
    """
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    share = cached(file)
    if share > 0.01:
        raise RuntimeError(f"{share:.0%} of {file} stay in the page cache: somebody maps it")


def cached(file: Path) -> float:
    """Share of a file that is in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    size = file.stat().st_size
    pages = -(-size // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * pages)()
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), size, mmap.MAP_PRIVATE) as mapped:
        start = ctypes.c_char.from_buffer(mapped)
        failed = libc.mincore(ctypes.byref(start), ctypes.c_size_t(size), found)
        del start
    if failed:
        raise OSError(ctypes.get_errno(), "mincore")
    return sum(byte & 1 for byte in found) / pages
