"""A gang of two nodes on one machine: a head and a member, each a worker of its own.

Both are at 127.0.0.1; what would be two nodes' networks is one loopback interface.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from localkube.settings import free_ports
from tests.support.engine.engine_kinds import ROOT, EngineKind
from tests.support.engine.workers import LOOPBACK, SERVE, Command, logged_lines
from tests.support.processes import Process, descendants
from tests.support.waiting import until_sync

FLAGS = ("--nodes", "2", "--leader-address", "127.0.0.1", "--auth", "none")
TP2 = {"ROLLOUT_TENSOR": "2"}
PP2 = {"ROLLOUT_PIPELINE": "2"}


def free_port_row(workers: int = 2) -> int:
    """The first port of so many local workers, each of which takes three in a row, ten after the one before.

    Below those that systems give to connections, where a neighbour is taken more often than not on a busy machine.
    """
    for _ in range(100):
        first = random.randrange(10_000, 19_000)
        with contextlib.ExitStack() as probes:
            try:
                for port in (
                    first + 10 * worker + n for worker in range(workers) for n in range(3)
                ):
                    probe = probes.enter_context(socket.socket())
                    probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return first
    raise AssertionError("no ports in a row are free")


class MemberCommand:
    """`rollout-worker serve` as rank 1."""

    def __init__(
        self,
        kind: EngineKind,
        model: Path,
        log: Path,
        flags: tuple[str, ...],
        env: Mapping[str, str],
    ) -> None:
        self._log = log
        ports = ("--rank", "1", "--control-port", "0")
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(
                [
                    str(kind.python),
                    *(*SERVE, "--engine", kind.name, "--model", str(model)),
                    *(*LOOPBACK, *ports, *FLAGS, *kind.flags, *flags),
                ],
                stderr=stderr,
                env={**os.environ, "OMP_NUM_THREADS": "1", **env},
            )
        until_sync(lambda: self.line("serving a member"), 120, what="the member's port")
        line = self.line("serving a member")
        assert line is not None
        self.port = int(line["control_port"])

    def line(self, message: str) -> dict[str, Any] | None:
        return next((line for line in self.logged() if line["message"].startswith(message)), None)

    def logged(self) -> list[dict[str, Any]]:
        return logged_lines(self._log)


class Gang:
    """Head and member; what was started is ended by `close`."""

    def __init__(
        self,
        kind: EngineKind,
        model: Path,
        home: Path,
        flags: tuple[str, ...],
        env: Mapping[str, str],
    ) -> None:
        env = {"PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1", **kind.env, **env}
        shared = ("--max-length", "512", "--gang-port", str(*free_ports(1)), *flags)
        self.member = MemberCommand(kind, model, home / "member.log", shared, env)
        self.head = Command(
            model,
            home / "head.log",
            (
                *("--engine", kind.name, *FLAGS, *kind.flags, *shared),
                *("--member-addresses", f"127.0.0.1:{self.member.port}", "--shutdown-grace", "0"),
                *("--weights-port", "0", "--weights-socket", str(home / "weights.sock")),
            ),
            env,
            python=kind.python,
        )

    def ranks(self) -> list[Process]:
        """The member's own ranks."""
        return [each for each in descendants(self.member.process.pid) if "VLLM::" in each.command]

    def close(self) -> None:
        for process in (self.head.process, self.member.process):
            process.send_signal(signal.SIGCONT)
            process.terminate()
        for process in (self.head.process, self.member.process):
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(30)
        self.head.close()


@contextmanager
def gang(
    kind: EngineKind, model: Path, home: Path, *flags: str, env: Mapping[str, str] = TP2
) -> Iterator[Gang]:
    both = Gang(kind, model, home, flags, env)
    try:
        both.head.wait_active(kind.start_seconds)
        yield both
    finally:
        both.close()
