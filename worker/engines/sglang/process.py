"""The child and all that it starts: started in a session of its own, watched, and killed to the last process.

The kernel's process file descriptors report the death of any of SGLang's processes at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rollout_worker.engine import EngineError
from rollout_worker.observe.processes import StandstillDetector, command_line_of, find_process
from rollout_worker.observe.settings import STANDSTILL_SECONDS

from .settings import KILL_TIMEOUT_SECONDS

logger = logging.getLogger("rollout_worker.sglang")

CHILD_MODULE = "rollout_worker.engines.sglang.child_process.child"
FOLDER_PREFIX = "rollout-sglang-"
PROCESS_TITLE = "sglang::"
"""Where the titles of SGLang's processes begin."""
KEPT_LINES = 40
"""How much of the child's last output is kept to say why it died."""
STARTUP_MILESTONES = {
    "Load weight begin": "loading weights",
    "Load weight end": "weights loaded",
    "KV Cache is allocated": "KV cache allocated",
    "CUDA graph begin": "capturing CUDA graphs",
}
"""What a line of SGLang's log with these words says of its start."""


class SglangProcess:
    """One child; `on_exit` is called once in the loop when it or a descendant ended by itself."""

    def __init__(self, on_exit: Callable[[str], None], on_line: Callable[[str], None]) -> None:
        self._on_exit = on_exit
        self._on_line = on_line
        self._popen: subprocess.Popen[bytes] | None = None
        self._folder: Path | None = None
        self._watched: dict[int, int] = {}  # descriptor of a process -> its id
        self._reader: asyncio.Task[None] | None = None
        self._standing = StandstillDetector()
        self._last: deque[str] = deque(maxlen=KEPT_LINES)

    def start(self, python: str, flags: Sequence[str], environ: Mapping[str, str]) -> socket.socket:
        """Start the child; return our end of its socket."""
        _remove_stale_folders()
        self._folder = Path(tempfile.mkdtemp(prefix=f"{FOLDER_PREFIX}{os.getpid()}-"))
        ours, theirs = socket.socketpair()
        with theirs:
            number = theirs.fileno()
            command = [python, "-m", CHILD_MODULE, str(number), str(os.getpid()), *flags]
            try:
                self._popen = subprocess.Popen(
                    command,
                    env=self._child_environment(environ),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    pass_fds=(number,),
                    start_new_session=True,
                )
            except OSError as error:
                ours.close()
                raise EngineError(
                    f"engine.args: --python {python!r} can't be started: {error.strerror}"
                ) from error
        ours.setblocking(False)
        self._reader = asyncio.create_task(self._read_lines())
        self._watch_process(self._popen.pid)
        return ours

    def _child_environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        own = str(Path(__file__).resolve().parents[3])
        package = next((p for p in sys.path if Path(p, "rollout_worker").is_dir()), own)
        path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH", ""))))
        return {
            **os.environ,
            # SGLang's sockets and files are here, and are deleted with the engine.
            "TMPDIR": str(self._folder),
            "PROMETHEUS_MULTIPROC_DIR": str(self._folder),
            "PYTHONPATH": path,
            "PYTHONUNBUFFERED": "1",
            **environ,
        }

    async def _read_lines(self) -> None:
        assert self._popen is not None
        assert self._popen.stdout is not None
        reader = asyncio.StreamReader(limit=1 << 20)
        protocol = asyncio.StreamReaderProtocol(reader)
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(lambda: protocol, self._popen.stdout)
        try:
            while True:
                try:
                    raw = await reader.readline()
                except ValueError:  # a line beyond the limit, which the reader has dropped
                    continue
                if not raw:
                    return
                line = raw.decode(errors="replace").rstrip()
                self._last.append(line[:500])
                logger.debug("%s", line)
                self._on_line(line)
        finally:
            transport.close()

    def watch_schedulers(self) -> None:
        """Watch SGLang's own processes: they must not end.

        Others may: torch's compile workers do after a minute without work.
        """
        for pid in self.session_pids():
            if command_line_of(pid).startswith(PROCESS_TITLE):
                self._watch_process(pid)

    def session_pids(self) -> list[int]:
        """Return the processes of the child's session that are alive, itself included."""
        return [] if self._popen is None else session_processes(self._popen.pid)

    def _watch_process(self, pid: int) -> None:
        if pid in self._watched.values():
            return
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        self._watched[descriptor] = pid
        asyncio.get_running_loop().add_reader(descriptor, self._on_process_end, descriptor)

    def _on_process_end(self, descriptor: int) -> None:
        pid = self._watched[descriptor]
        self._unwatch_all()
        self._on_exit(f"{self._describe_process(pid)} ended")

    def find_stopped(self, seconds: float = STANDSTILL_SECONDS) -> str | None:
        """Describe a watched process that has been stopped (SIGSTOP) for this long; None: none has."""
        there = (find_process(pid) for pid in self._watched.values())
        still = self._standing.find_stopped((each for each in there if each is not None), seconds)
        return None if still is None else f"{self._describe_process(still.pid)} is stopped"

    def _describe_process(self, pid: int) -> str:
        main = self._popen is not None and pid == self._popen.pid
        what = "SGLang's process" if main else "a process of SGLang"
        return f"{what} (pid {pid})"

    def last_errors(self) -> str:
        """Return the child's last lines about errors, or its last lines at all."""
        errors = [line for line in self._last if "Error" in line or "error:" in line]
        lines = errors[-3:] or list(self._last)[-3:]
        return " | ".join(line.strip() for line in lines)

    def _unwatch_all(self) -> None:
        loop = asyncio.get_running_loop()
        while self._watched:
            descriptor, _ = self._watched.popitem()
            loop.remove_reader(descriptor)
            os.close(descriptor)

    async def stop(self) -> None:
        """Kill the child and all that it started; return when none is left."""
        self._unwatch_all()
        if self._popen is not None:
            await asyncio.to_thread(self._kill_session, self._popen)
        if self._reader is not None:
            with contextlib.suppress(TimeoutError, asyncio.CancelledError):
                await asyncio.wait_for(self._reader, 5)
            self._reader = None
        if self._folder is not None:
            await asyncio.to_thread(shutil.rmtree, self._folder, True)
            self._folder = None
        self._popen = None

    @staticmethod
    def _kill_session(popen: subprocess.Popen[bytes]) -> None:
        until = time.monotonic() + KILL_TIMEOUT_SECONDS
        while (left := session_processes(popen.pid)) or popen.poll() is None:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            # Its children became ours if we are process 1 of a pod: collect them, too.
            popen.poll()
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-popen.pid, os.WNOHANG)[0]:
                    pass
            if time.monotonic() > until:
                logger.error("processes %s of SGLang could not be killed", left)
                return
            time.sleep(0.02)


def session_processes(leader: int) -> list[int]:
    """Return the processes of a session, without zombies that another process has to collect."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            stat = Path("/proc", entry, "stat").read_text()
        except OSError:
            continue
        state, parent, _, number = stat.rpartition(")")[2].split()[:4]
        ended = state in "ZX" and int(parent) != os.getpid()
        if int(number) == leader and not ended:
            found.append(int(entry))
    return found


def _remove_stale_folders() -> None:
    """Remove the folders of workers that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"):
        owner = folder.name.removeprefix(FOLDER_PREFIX).partition("-")[0]
        if owner.isdigit() and int(owner) != os.getpid() and not Path("/proc", owner).exists():
            shutil.rmtree(folder, ignore_errors=True)
