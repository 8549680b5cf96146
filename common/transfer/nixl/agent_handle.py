"""Starts and kills processes that run NIXL (`agent_process`), and talks to them, on the transfer loop."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import itertools
import os
import socket
import subprocess
import sys
from typing import Any

from rollout_common.transfer.connections.descriptor_messages import receive_message, send_message
from rollout_common.transfer.connections.frames import Silent, TransferError
from rollout_common.transfer.settings import HOP_SECONDS, NIXL_START_SECONDS

LIBRARIES = ("nixl_cu12", "nixl_cu13")
NIXL_FIX = "for its environment or image run pip install '.[nixl]' in a checkout of Rollout, or publish with transport='tcp'"


class NixlFailed(TransferError):
    """NIXL can't do what it was asked to."""


class NixlEnded(NixlFailed):
    """The process with NIXL ended before it was over."""


def find_nixl() -> str | None:
    """Return the name of NIXL's package; None: it is not installed."""
    return next((each for each in LIBRARIES if importlib.util.find_spec(each)), None)


class NixlProcess:
    """A process that runs NIXL, once `start` has returned. Of the transfer loop."""

    def __init__(self) -> None:
        self.ended: str | None = None
        """Why it has ended; None: it runs."""
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._numbers = itertools.count()
        self._loop = asyncio.get_running_loop()

    async def start(self) -> None:
        """Start it.

        Raises:
            NixlFailed: NIXL is not installed, or does not start.
        """
        library = find_nixl()
        if library is None:
            raise NixlFailed(f"NIXL is not installed: {NIXL_FIX}")
        self._sock, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock.setblocking(False)
        with far:
            self._process = _start_program(far, library)
        self._loop.add_reader(self._sock, self._take_answer)
        try:
            await self._await_answer(self._expect_answer()[1], "start", NIXL_START_SECONDS)
        except asyncio.CancelledError:
            self.end("it is not needed any more")
            raise

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    async def call(self, what: str, handle: int | None = None, **given: Any) -> dict[str, Any]:
        """Have it do something that takes no time, and return its answer; one that does not answer is killed.

        Raises:
            NixlFailed: It can't, or has ended.
        """
        return await self._await_answer(self.post(what, handle, **given), what, HOP_SECONDS)

    def post(
        self, what: str, handle: int | None = None, **given: Any
    ) -> asyncio.Future[dict[str, Any]]:
        """Ask it to do something, by a request and a descriptor; return its answer, or `NixlFailed`."""
        number, answer = self._expect_answer()
        handles = [] if handle is None else [handle]
        try:
            send_message(self._sock, {"id": number, "do": what, **given}, handles)
        except TransferError as error:  # or it is full: so much is never asked for at once
            self.end(f"it takes no requests: {error}")
        return answer

    def _expect_answer(self) -> tuple[int, asyncio.Future[dict[str, Any]]]:
        number = next(self._numbers)
        answer = self._answers[number] = self._loop.create_future()
        answer.add_done_callback(_read_error)
        if self.ended is not None:
            self._fail_answers()
        return number, answer

    async def _await_answer(
        self, answer: asyncio.Future[dict[str, Any]], what: str, seconds: float
    ) -> dict[str, Any]:
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.shield(answer)
        except TimeoutError as error:
            self.end(f"it did not answer {what!r} within {seconds:g} s")
            raise NixlFailed(str(self.ended)) from error

    def _take_answer(self) -> None:
        try:
            told, _ = receive_message(self._sock)
        except Silent:
            return None
        except TransferError:
            return self.end("it ended by itself")
        answer = self._answers.pop(told.pop("id"), None)
        if answer is None or answer.done():
            return None
        if "error" in told:
            return answer.set_exception(NixlFailed(f"NIXL: {told['error']}"))
        return answer.set_result(told)

    def end(self, why: str) -> None:
        """Kill it: nothing writes the memory that it had mapped any more. Idempotent."""
        if self.ended is not None:
            return
        self.ended = f"the process with NIXL has ended: {why}"
        self._loop.remove_reader(self._sock)
        self._process.kill()
        self._process.wait()
        self._sock.close()
        self._fail_answers()

    def _fail_answers(self) -> None:
        answers, self._answers = self._answers, {}
        for answer in answers.values():
            if not answer.done():
                answer.set_exception(NixlEnded(str(self.ended)))


def _start_program(far: socket.socket, library: str) -> subprocess.Popen[bytes]:
    """Start the program of the process, with its end of the socket."""
    program = "rollout_common.transfer.nixl.agent_process"
    return subprocess.Popen(
        [sys.executable, "-P", "-m", program, str(far.fileno()), library],
        pass_fds=[far.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,  # NIXL logs there
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )


def _read_error(answer: asyncio.Future[dict[str, Any]]) -> None:
    """Read an answer that nobody waits for any more, so that asyncio doesn't log it."""
    with contextlib.suppress(asyncio.CancelledError):
        answer.exception()
