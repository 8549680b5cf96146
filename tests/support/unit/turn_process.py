"""A process of its own that takes turns as it is told, and one that joins it."""

from __future__ import annotations

import fcntl
import functools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from rollout_common.turn import Turn, TurnError
from rollout_common.turn.sharing import Sharing, join

ROOT = Path(__file__).parents[3]
SLOW_BYTES = 64 << 20
"""So much memory without a name takes the kernel some milliseconds to let go of."""


class Puppet:
    """Such a process, from outside: it answers each order with one line."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.pid = process.pid

    def ask(self, order: str) -> str:
        """Give an order and return the answer."""
        self.tell(order)
        return self.answer()

    def tell(self, order: str) -> None:
        """Give an order whose answer is read later."""
        assert self.process.stdin is not None
        self.process.stdin.write(order + "\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        """Return the next answer; the test's own time limit ends a wait for ever."""
        return _line(self.process)

    def answer_time(self) -> float:
        """Return when it had the turn, or began to give it, which is the end of the next answer."""
        return float(self.answer().split()[-1])

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        self.process.kill()
        self.process.wait(30)

    def said(self) -> list[str]:
        """What a dead one had said; its last line may be cut."""
        assert self.process.stdout is not None
        lines = self.process.stdout.read().splitlines(keepends=True)
        return [line.strip() for line in lines if line.endswith("\n")]

    def signal(self, number: int) -> None:
        self.process.send_signal(number)


@contextmanager
def puppet(directory: Path, holder: str, *devices: str, uid: int | None = None) -> Iterator[Puppet]:
    """Start one, and end it and the children that it left."""
    command = [sys.executable, "-S", __file__, str(directory), holder, *devices]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": str(ROOT / "src"), "TURN_UID": str(uid or os.getuid())},
        start_new_session=True,
    )
    try:
        assert _line(process) == "ready"
        yield Puppet(process)
    finally:
        # Its children are in its session's process group, and may outlive it.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def _obey(turn: Turn, orders: IO[str]) -> None:
    sharing: Sharing | None = None
    for order in orders:
        match order.split():
            case ["take", *timeout]:
                _say(_take(turn, float(timeout[0]) if timeout else 60.0))
            case ["give"]:
                began = time.monotonic()
                turn.give()
                _say(f"given {began}")
            case ["leave"]:
                turn.leave()
                _say("left")
            case ["spin", judge]:
                _spin(turn, Path(judge))
            case ["flock", path, verb]:
                _say(_lock_barely(path, verb))
            case ["child", *memory]:
                sharing = sharing or Sharing(turn.fileno_list)
                _say(_child(["--join", *memory], env=dict(os.environ) | sharing.environment))
            case ["heir", memory]:
                _say(_child(["--have", memory], pass_fds=turn.fileno_list()))
            case ["have", memory]:
                _have(memory)
                _say("has")
            case other:
                turn = _share(turn, other)


def _share(turn: Turn, order: list[str]) -> Turn:
    """Lend the turn over a socket, or return one that was lent there."""
    verb, path, *devices = order
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(path)
        if verb == "lend":
            files = [file for pair in turn.lend_files().values() for file in pair]
            socket.send_fds(sock, [b"turn"], files)
        else:
            assert verb == "borrow", f"unknown order {order}"
            _, files, _, _ = socket.recv_fds(sock, 4, 2 * len(devices))
            pairs = zip(files[::2], files[1::2], strict=True)
            lent = dict(zip(devices, pairs, strict=True))
            turn = Turn.adopt(Path(sys.argv[1]), lent, "borrower")
    _say(f"{verb}ed")
    return turn


def _spin(turn: Turn, judge: Path) -> None:
    """Take turns without end; in each, leave a mark, and find it again a moment later."""
    mine = str(os.getpid())
    while True:
        turn.take()
        judge.write_text(mine)
        time.sleep(0.001)
        _say("turn" if judge.read_text() == mine else "OVERLAP")
        turn.give()


def _take(turn: Turn, timeout: float) -> str:
    try:
        turn.take(timeout)
    except TurnError as error:
        return f"{type(error).__name__}: {error}"
    return f"taken {time.monotonic()}"


@functools.cache
def _bare_file(path: str) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT, 0o666)


def _lock_barely(path: str, verb: str) -> str:
    """Take or give a lock of the kernel's and nothing else, with which benchmarks compare a turn."""
    began = time.monotonic()
    fcntl.flock(_bare_file(path), fcntl.LOCK_EX if verb == "take" else fcntl.LOCK_UN)
    return f"taken {time.monotonic()}" if verb == "take" else f"given {began}"


def _have(memory: str) -> None:
    """Have memory of a device: a flock on a file, which falls late if the kernel comes to this one last."""
    fcntl.flock(os.open(memory, os.O_RDONLY), fcntl.LOCK_SH)
    slow = os.memfd_create("slow")
    for at in range(0, SLOW_BYTES, 1 << 20):
        os.pwrite(slow, b"x" * (1 << 20), at)


def _child(arguments: list[str], **more: Any) -> str:
    child = subprocess.Popen(
        [sys.executable, "-S", __file__, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        **more,
    )
    assert _line(child) == "joined"
    return str(child.pid)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    if sys.argv[1] in ("--join", "--have"):
        for path in sys.argv[2:]:
            _have(path)
        if sys.argv[1] == "--join":
            join()
        _say("joined")
        signal.pause()
    # Here, not before: another user may not be able to read this interpreter's modules.
    os.setuid(int(os.environ["TURN_UID"]))
    # Children don't get this one, so what they open has lower numbers than the locks that they inherit.
    os.open("/dev/null", os.O_RDONLY)
    _say("ready")
    _obey(Turn(Path(sys.argv[1]), sys.argv[3:], sys.argv[2]), sys.stdin)
