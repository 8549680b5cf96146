"""A gang of two whose workers and ranks are processes, with real locks, real ports and a judge; whole.

    python gang_process.py

forks them, for a start of Python with all that a worker imports takes seconds: each line of its standard input is
`ROLE FOLDER MEMBER`, where MEMBER is the address for a head, or `wait PID`. FOLDER has all that would
be two nodes'. A worker gets its orders and answers through pipes there.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from rollout_common.parent_death import die_with_parent
from rollout_common.turn import Turn
from rollout_worker.engine import EngineCrashed, MemberInfo
from rollout_worker.gang import gang_head as heads
from rollout_worker.gang import member_client, member_turn, multi_node_turn, silence_timer
from rollout_worker.gang import member_worker as members
from rollout_worker.gang.gang_addresses import EXIT_GANG_BROKEN
from rollout_worker.schemas import Progress
from tests.support.unit import gang_rank
from tests.support.unit.tiny_engine import LAYOUT, TinyEngine, write_weights
from tests.support.unit.tiny_gang import Node, TinyMember, head, member_settings
from tests.support.waiting import until

ROOT = Path(__file__).parents[3]


def device(rank: int) -> str:
    """The device of a node."""
    return f"gpu.example.com/node-{rank}/gpu-0"


def locks(folder: Path, rank: int) -> Path:
    """The lock directory of a node."""
    made = folder / f"locks-{rank}"
    made.mkdir(exist_ok=True)
    return made


class Nursery:
    """The process that forks workers, from outside."""

    def __init__(self) -> None:
        paths = [ROOT / "src", ROOT]
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": ":".join(map(str, paths))},
        )

    def ask(self, *words: str) -> int:
        """Give an order; returns the answer, which is a number."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(" ".join(words) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        """End it, and all that it forked with it."""
        self._process.kill()
        self._process.wait(30)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


class Started:
    """A worker, from outside."""

    def __init__(self, nursery: Nursery, role: str, folder: Path, member: str) -> None:
        for way in ("orders", "answers"):
            (folder / f"{role}.{way}").unlink(missing_ok=True)
            os.mkfifo(folder / f"{role}.{way}")
        self._nursery = nursery
        self._pid = nursery.ask(role, str(folder), member)
        self._orders = (folder / f"{role}.orders").open("w")
        self._answers = (folder / f"{role}.answers").open()

    def tell(self, order: str) -> None:
        """Give an order whose answer is read later."""
        self._orders.write(order + "\n")
        self._orders.flush()

    def answer(self) -> str:
        """Return the next answer; the test's own time limit ends a wait for ever."""
        return self._answers.readline().strip()

    def ask(self, order: str) -> str:
        """Give an order and return the answer."""
        self.tell(order)
        return self.answer()

    def signal(self, number: int) -> None:
        """Send a signal."""
        os.kill(self._pid, number)

    def wait(self) -> int:
        """Wait until it has ended; returns its status, or minus the signal that ended it."""
        return self._nursery.ask("wait", str(self._pid))

    def close(self) -> None:
        """End it, if it hasn't ended."""
        with suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        with suppress(BrokenPipeError):
            self._orders.close()
        self._answers.close()


class Pair:
    """A head, a member, and a trainer's turn on each node."""

    def __init__(self, nursery: Nursery, folder: Path, stack: contextlib.ExitStack) -> None:
        self.folder = folder
        self.trainers = [Turn(locks(folder, r), [device(r)], f"trainer-{r}") for r in (0, 1)]
        for trainer in self.trainers:
            stack.callback(trainer.give)
        self._nursery, self._stack = nursery, stack
        self.member = self._started("member", "-")
        self._port = self.member.answer()

    def start(self) -> None:
        """Start the head."""
        self.head = self._started("head", f"127.0.0.1:{self._port}")

    def _started(self, role: str, member: str) -> Started:
        started = Started(self._nursery, role, self.folder, member)
        self._stack.callback(started.close)
        return started

    def train(self, *ranks: int, seconds: float = 30.0) -> None:
        """Have devices for a moment, as the ranks of a trainer do.

        Raises:
            BlockingIOError: somebody has memory of one besides.
            TurnTimeout: not within these seconds.
        """
        for rank in ranks:
            self.trainers[rank].take(seconds)
        for rank in ranks:
            with gang_rank.memory(self.folder, rank):
                pass
        for rank in ranks:
            self.trainers[rank].give()


@contextmanager
def pair(nursery: Nursery, folder: Path) -> Iterator[Pair]:
    """Start a member; nothing of it is left, and there was no overlap."""
    with contextlib.ExitStack() as stack:
        yield Pair(nursery, folder, stack)
    overlaps = folder / "overlaps"
    assert not overlaps.exists(), overlaps.read_text()


# Inside.


class Rank:
    """The rank of one node, from its worker."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Start it; it has memory from then on."""
        script, rank = Path(gang_rank.__file__), str(self._rank)
        self._process = subprocess.Popen(
            [sys.executable, "-S", str(script), str(self._folder), rank, str(os.getpid())],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline().strip() != "loaded":
            raise EngineCrashed(f"rank {rank} did not load")

    @property
    def wrong(self) -> str | None:
        """Whether it has died."""
        gone = self._process is not None and self._process.poll() is not None
        return f"rank {self._rank} died" if gone else None

    def tell(self, word: str) -> None:
        """Have it do something, by the engine's own means."""
        with socket.socket(socket.AF_UNIX) as peer:
            peer.settimeout(20)
            try:
                peer.connect(str(self._folder / f"rank-{self._rank}.sock"))
                peer.sendall(word.encode())
                if peer.recv(16) != b"done":
                    raise EngineCrashed(f"rank {self._rank} is gone")
            except OSError as error:
                raise EngineCrashed(f"rank {self._rank} is gone: {error}") from error

    def stop(self) -> None:
        """End it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(30)


class RankedMember(TinyMember):
    """The part of the engine on the member's node: one process."""

    rank: Rank

    async def start(self, report: Callable[[Progress], None]) -> MemberInfo:
        await asyncio.to_thread(self.rank.start)
        return self.info

    def alive(self) -> str | None:
        return self.rank.wrong

    async def stop(self) -> None:
        await asyncio.to_thread(self.rank.stop)


def _hurry() -> None:
    """A second of a gang is less here, but more than a busy machine takes."""
    for module, name, seconds in (
        (heads, "MEMBER_POLL_SECONDS", 0.1),
        (heads, "MEMBER_SILENCE_SECONDS", 2.0),
        (members, "HEAD_SILENCE_SECONDS", 2.0),
        (member_turn, "SILENCE_SECONDS", 2.0),
        (members, "GANG_WATCH_SECONDS", 0.05),
        (silence_timer, "MAX_GAP_SECONDS", 1.0),
        (member_client, "MEMBER_ANSWER_SECONDS", 1.5),
        (member_turn, "WAIT_SECONDS", 0.3),
        (multi_node_turn, "PATIENCE_SECONDS", 0.5),
        (multi_node_turn, "PAUSE_SECONDS", 0.1),
    ):
        assert hasattr(module, name), name
        setattr(module, name, seconds)


def _flags(folder: Path, rank: int) -> tuple[str, ...]:
    turn = ("--turn-directory", str(locks(folder, rank)), "--turn-devices", device(rank))
    return (*turn, "--turn-holder", f"gang-{rank}")


async def _be_member(folder: Path, answers: IO[str]) -> None:
    model = write_weights(folder / "model", 100)
    alone = TinyEngine(model)
    root_hash = (await alone.start(lambda _: None)).root_hash
    await alone.stop()
    node = Node(member_settings(*_flags(folder, 1)), MemberInfo(str(model), root_hash, LAYOUT))
    node.member.__class__ = RankedMember
    node.member.rank = Rank(folder, 1)  # type: ignore[attr-defined]
    _say(answers, str(node.port))
    await asyncio.wait([node.running])
    await node.stop()


async def _be_head(folder: Path, member: str, orders: IO[str], answers: IO[str]) -> None:
    ranks = [Rank(folder, 0), Rank(folder, 1)]

    async def start() -> None:
        await asyncio.to_thread(ranks[0].start)

    async def stop() -> None:
        await asyncio.to_thread(ranks[0].stop)

    def telling(word: str) -> Callable[[], Any]:
        async def tell() -> None:
            for each in ranks:
                await asyncio.to_thread(each.tell, word)

        return tell

    async with head(folder, member, *_flags(folder, 0), wait=False) as gang:
        hooks = {"start": start, "stop": stop, "sleep": telling("free"), "wake": telling("have")}
        gang.before_start.update(hooks)
        obeying = asyncio.create_task(_obey(gang, orders, answers))
        await asyncio.wait([obeying, gang.running], return_when=asyncio.FIRST_COMPLETED)
        _say(answers, f"broken: {await gang.why()}")
        await gang.worker.supervisor.end_engine()
        os._exit(
            EXIT_GANG_BROKEN
        )  # as a worker does: the thread that reads orders is not waited for


async def _obey(gang: Any, orders: IO[str], answers: IO[str]) -> None:
    while order := (await asyncio.to_thread(orders.readline)).strip():
        match order:
            case "sleep":
                await gang.sleep()
            case "wake":
                await gang.wake()
            case "load":
                await until(lambda: gang.runtime.lifecycle.has_engine, 60, what="the engine")
            case "wait":
                await until(lambda: "held by" in _message(gang), 60, what="whom it waits for")
        turn = gang.worker.worker_state().turn
        _say(answers, f"{gang.state.value} {turn.state} {_message(gang)}".strip())


def _message(gang: Any) -> str:
    progress = gang.worker.worker_state().progress
    return "" if progress is None else str(progress.message)


def _say(answers: IO[str], line: str) -> None:
    answers.write(line + "\n")
    answers.flush()


def _work(role: str, folder: Path, member: str) -> None:
    """Be a worker, in a process of its own."""
    log = os.open(folder / f"{role}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    _hurry()
    with (
        (folder / f"{role}.orders").open() as orders,
        (folder / f"{role}.answers").open("w") as out,
    ):
        if role == "member":
            asyncio.run(_be_member(folder, out))
        else:
            asyncio.run(_be_head(folder, member, orders, out))


def _fork(role: str, folder: Path, member: str) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        die_with_parent(parent)
        _work(role, folder, member)
        code = EXIT_GANG_BROKEN
    finally:
        os._exit(code)


def _nurse() -> None:
    for order in sys.stdin:
        match order.split():
            case ["wait", pid]:
                _, status = os.waitpid(int(pid), 0)
                answer = os.waitstatus_to_exitcode(status)
            case [role, folder, member]:
                answer = _fork(role, Path(folder), member)
            case other:
                raise AssertionError(f"unknown order {other}")
        _say(sys.stdout, str(answer))


if __name__ == "__main__":
    _nurse()
