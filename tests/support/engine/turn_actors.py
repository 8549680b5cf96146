"""The two programs that take turns on one device in `turn_node`: a worker, and a trainer.

    python turn_actors.py worker LOG MEMORY FLAGS…
    python turn_actors.py trainer LOG MEMORY DIRECTORY DEVICE

The worker is the real one with both ports; its engine is the tiny one, whose memory of the device is a child's. Each
notes in LOG when it had its turn and when it had freed the memory (`time.monotonic`, the same in all processes).
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Literal, cast

from rollout_client.turn import local_turn
from rollout_worker.engine import Engine, EngineCrashed, EngineInfo, WeightsRefill
from rollout_worker.ports.server import HttpServers, make_authorizer
from rollout_worker.schemas import MemoryTag, Progress
from rollout_worker.service import WorkerService
from rollout_worker.settings import add_flags, parse_settings
from tests.support.engine.turn_child import have, opened
from tests.support.unit.tiny_engine import TinyEngine

CHILD = Path(__file__).with_name("turn_child.py")
TRAINING_SECONDS = 0.005
ROLLOUT_SECONDS = 0.02
"""So long the trainer wants no turn."""


class Log:
    """Lines of one process; each is there at once."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def say(self, what: str, **more: object) -> None:
        """Note that something happens now."""
        line = {"t": time.monotonic(), "pid": os.getpid(), "what": what, **more}
        os.write(self._file, json.dumps(line).encode() + b"\n")


class ChildEngine(TinyEngine):
    """A tiny engine with a process that has the device's memory."""

    def __init__(self, model: Path, log: Log, memory: str) -> None:
        super().__init__(model)
        self._log = log
        self._memory = memory
        self._child: subprocess.Popen[str] | None = None

    async def start(self, report: Callable[[Progress], None]) -> EngineInfo:
        """The turn is had already."""
        self._log.say("had")
        # The interpreter's own folders too: -S leaves them out.
        path = os.pathsep.join(filter(None, sys.path))
        self._child = await asyncio.to_thread(
            subprocess.Popen,
            [sys.executable, "-S", str(CHILD), self._memory],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        self._log.say("child", child=self._child.pid)
        await asyncio.to_thread(self._answer, "joined")
        await self._ask("have", "has")
        return await super().start(report)

    async def sleep(
        self, level: Literal[1, 2], tags: Collection[MemoryTag], refill: WeightsRefill
    ) -> None:
        await super().sleep(level, tags, refill)
        if not any(self.resident.values()):
            await self._ask("free", "freed")
            self._log.say("freed")

    async def wake(self, tags: Collection[MemoryTag], refill: WeightsRefill | None) -> None:
        if not any(self.resident.values()):
            self._log.say("had")
            await self._ask("have", "has")
        await super().wake(tags, refill)

    async def stop(self) -> None:
        if self._child is not None:
            self._child.kill()
            await asyncio.to_thread(self._child.communicate)
            self._log.say("freed")
        await super().stop()

    def alive(self) -> str | None:
        ended = self._child is not None and self._child.poll() is not None
        return "the engine's process has ended" if ended else super().alive()

    async def _ask(self, order: str, wanted: str) -> None:
        assert self._child is not None
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(order + "\n")
            self._child.stdin.flush()
        except OSError as error:
            raise EngineCrashed("the engine's process has ended") from error
        await asyncio.to_thread(self._answer, wanted)

    def _answer(self, wanted: str) -> None:
        assert self._child is not None
        assert self._child.stdout is not None
        answer = self._child.stdout.readline().strip()
        if answer == "OVERLAP":
            self._log.say(answer)
        if answer != wanted:
            raise EngineCrashed(f"the engine's process answered {answer!r}")


async def work(log: Log, memory: str, flags: list[str]) -> None:
    """Serve until a signal."""
    parser = argparse.ArgumentParser()
    add_flags(parser)
    settings = parse_settings(parser.parse_args(flags), {})
    worker = WorkerService(
        settings, lambda: cast(Engine, ChildEngine(Path(settings.model), log, memory))
    )
    servers = HttpServers(worker, make_authorizer(settings))
    running = asyncio.create_task(worker.run_until_cancelled())
    try:
        await servers.serve_both_ports()
    finally:
        running.cancel()
        await asyncio.wait({running}, timeout=10)
        await worker.supervisor.end_engine()


def train(log: Log, memory: str, directory: str, device: str) -> None:
    """Take turns without end."""
    # Before the lock, as a trainer does that has used its device before its first turn.
    file = opened(memory)
    while True:
        waits = time.monotonic()
        with local_turn([device], directory):
            log.say("had", waits=waits)
            if have(file) == "OVERLAP":
                log.say("OVERLAP")
            time.sleep(TRAINING_SECONDS)
            fcntl.flock(file, fcntl.LOCK_UN)
            log.say("freed")
        time.sleep(ROLLOUT_SECONDS)


if __name__ == "__main__":
    role, path, *rest = sys.argv[1:]
    if role == "worker":
        asyncio.run(work(Log(path), rest[0], rest[1:]))
    else:
        train(Log(path), *rest)
