"""Background processes of a cluster, found again by a record or by a mark in their environment.

A record (`run/<component>.json`) holds the pid and its start time, so a pid that the kernel
has reused is never signalled. The mark `ROLLOUT_CLUSTER=<state>` finds processes that lost their
record, for example after the state folder was deleted by hand.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from .home import ClusterError, read_tail

MARK = "ROLLOUT_CLUSTER"

ROOMY = {"GOGC": "400", "GOMEMLIMIT": "1GiB"}
"""For programs in Go: they may hold more garbage, and spend less of the processor on collecting it."""

SHORT_LIVED = {"GOGC": "off"}
"""For programs in Go that end at once: without garbage collection they take half the processor time."""

END_SECONDS = 10


@dataclass(frozen=True, slots=True)
class Process:
    """A process that can't be mistaken for a later one with the same pid."""

    pid: int
    started: str

    @classmethod
    def of(cls, pid: int) -> Process | None:
        """Return the living process `pid`, or None (zombies are dead)."""
        # Our own children stay zombies until we wait for them.
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
        try:
            # The name, in parentheses, may hold blanks; what follows it does not.
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return None
        return None if fields[0] in "ZX" else cls(pid, fields[19])

    def alive(self) -> bool:
        return Process.of(self.pid) == self

    def kill(self) -> None:
        if self.alive():
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def await_end(processes: Iterable[Process]) -> None:
    """Wait until all have ended."""
    waiting = list(processes)
    deadline = time.monotonic() + END_SECONDS
    while waiting := [process for process in waiting if process.alive()]:
        if time.monotonic() > deadline:
            raise ClusterError(f"processes {[p.pid for p in waiting]} did not end on SIGKILL")
        time.sleep(0.02)


def spawn(
    state: Path, component: str, argv: Sequence[str | Path], env: Mapping[str, str] | None = None
) -> Process:
    """Start a marked background process in a session of its own, logging to `logs/`."""
    log = log_file(state, component)
    log.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    # Not Popen: its object would have to outlive the process to keep Python from warning.
    pid = os.posix_spawnp(
        os.fspath(argv[0]),
        [os.fspath(argument) for argument in argv],
        {**ROOMY, **os.environ, **(env or {}), MARK: str(state)},
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log), flags, 0o644),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
    )
    process = Process.of(pid) or Process(pid, "ended")
    record = record_file(state, component)
    record.parent.mkdir(parents=True, exist_ok=True)
    record.write_text(json.dumps(asdict(process)))
    return process


def log_file(state: Path, component: str) -> Path:
    return state / "logs" / f"{component}.log"


def record_file(state: Path, component: str) -> Path:
    return state / "run" / f"{component}.json"


def recorded(state: Path, component: str) -> Process | None:
    try:
        process = Process(**json.loads(record_file(state, component).read_text()))
    except FileNotFoundError:
        return None
    return process if process.alive() else None


def require_alive(state: Path, *components: str) -> None:
    """Raise with the end of the log if one of the components has ended."""
    for component in components:
        if recorded(state, component) is None:
            log = log_file(state, component)
            raise ClusterError(f"{component} ended; the last lines of {log}:\n{read_tail(log)}")


def await_true(
    state: Path, alive: Sequence[str], ready: Callable[[], bool], problem: str, seconds: float
) -> None:
    """Wait until `ready`, while these components live; `problem` is the start of the error after `seconds`."""
    deadline = time.monotonic() + seconds
    while not ready():
        require_alive(state, *alive)
        if time.monotonic() > deadline:
            raise ClusterError(f"{problem} after {seconds} s: see {state / 'logs'}")
        time.sleep(0.05)


def stop(state: Path, component: str) -> None:
    if process := recorded(state, component):
        process.kill()
        await_end([process])
    record_file(state, component).unlink(missing_ok=True)


def marked(below: Path) -> Iterator[tuple[Process, Path]]:
    """Yield every living process of a cluster whose state is `below` this folder or is it."""
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            environment = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        for entry in environment:
            name, _, value = entry.decode(errors="replace").partition("=")
            if name == MARK and Path(value).is_relative_to(below):
                if process := Process.of(int(folder.name)):
                    yield process, Path(value)
                break


def sweep(below: Path) -> int:
    """Kill every marked process below this folder; return how many there were."""
    found: set[Process] = set()
    # Repeated: a process may have started another between the look and the kill.
    while processes := {process for process, _ in marked(below)}:
        found |= processes
        for process in processes:
            process.kill()
        await_end(processes)
    return len(found)


def process_in(uid: str, word: str) -> int:
    """Return the pid of the process of a pod, by its uid, that has a word in its command line."""
    if pids := processes_in(uid, word):
        return pids[0]
    raise ClusterError(f"no process {word!r} in the pod {uid}")


def processes_in(uid: str, word: str) -> list[int]:
    """Return the pids of all of them."""
    wanted, found = uid.replace("-", ""), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                words = (entry / "cmdline").read_bytes()
                group = (entry / "cgroup").read_text().replace("-", "").replace("_", "")
                if word.encode() in words and wanted in group:
                    found.append(int(entry.name))
    return found
