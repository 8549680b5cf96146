"""The step thread: runs steps, and commands between them.

The asyncio side never touches the core. It sends commands (functions without arguments), which run in
order at the next step boundary, also while steps are paused. An `EngineError` of a command goes to
its caller alone; any other error, of a command or a step, means that the state is unknown: the
thread ends, `on_crash` is called and every later command gets `EngineCrashed`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from rollout_worker.engine import EngineCrashed, EngineError, ProcessSpent

from .core import BatchCore

logger = logging.getLogger(__name__)

T = TypeVar("T")

CUDA_ERROR_PREFIX = "CUDA error:"
"""How torch begins CUDA's reports; their classes differ between its calls and versions."""

OUT_OF_MEMORY_WORDS = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""What the report of a full GPU has in it."""


class StepThread:
    """Owns a core from `start` on."""

    def __init__(self, core: BatchCore, on_crash: Callable[[str], None]) -> None:
        self._core = core
        self._spent: str | None = None  # CUDA's report that its context is lost
        self._on_crash = on_crash
        self._wake = threading.Condition()
        self._commands: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._stopping = False
        self._crash: str | None = None
        self._busy_since: float | None = None
        self._thread = threading.Thread(target=self._run_steps, name="hf-steps", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def run_command(self, command: Callable[[], T]) -> Future[T]:
        """Run `command` at the next step boundary."""
        future: Future[T] = Future()
        with self._wake:
            if self._crash is not None or self._stopping:
                future.set_exception(EngineCrashed(self._crash or "the engine was stopped"))
            else:
                self._commands.append((command, future))
                self._wake.notify()
        return future

    def stop(self, timeout: float) -> bool:
        """End the thread after its current step; return whether it ended within `timeout` seconds."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def find_problem(self, deadline: float) -> str | None:
        """Return what is wrong, None if the thread makes progress or idles; raise `ProcessSpent` if CUDA is lost."""
        if self._spent is not None:
            raise ProcessSpent(describe_spent(self._spent))
        if self._crash is not None:
            return self._crash
        if not self._thread.is_alive():
            return "the step thread is not running"
        since = self._busy_since
        if since is not None and (age := time.monotonic() - since) > deadline:
            return f"one step has been running for {age:.0f} s, its deadline is {deadline:.0f} s"
        return None

    def _run_steps(self) -> None:
        try:
            with torch.no_grad():
                while self._run_turn():
                    pass
        except BaseException as error:  # whatever it is, no caller may hang
            logger.exception("the step thread died")
            self._spent = find_lasting_fault(error)
            why = f"the step thread died: {type(error).__name__}: {error}"
            self._refuse_commands(why)
            self._on_crash(why)
        else:
            self._refuse_commands("the engine was stopped")

    def _run_turn(self) -> bool:
        with self._wake:
            self._wake.wait_for(lambda: self._commands or self._stopping or self._core.can_step())
            if self._stopping:
                return False
            count = len(self._commands)
        self._busy_since = time.monotonic()
        if count:
            self._core.flush_deltas()  # tokens made before a command are delivered before it
        for _ in range(count):  # those that come while these run wait for a step
            self._execute_command(*self._commands.popleft())
        if self._core.can_step():
            self._core.run_step()
        self._busy_since = None
        return True

    @staticmethod
    def _execute_command(command: Callable[[], Any], future: Future[Any]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(command())
        except EngineError as error:
            future.set_exception(error)
        except BaseException as error:
            crash = EngineCrashed(f"{type(error).__name__}: {error}")
            crash.__cause__ = error
            future.set_exception(crash)
            raise

    def _refuse_commands(self, why: str) -> None:
        with self._wake:
            self._crash = why
            left = list(self._commands)
            self._commands.clear()
        for _, future in left:
            if future.set_running_or_notify_cancel():
                future.set_exception(EngineCrashed(why))


def find_lasting_fault(error: BaseException | None) -> str | None:
    """Return CUDA's report, if the error or one of its causes is CUDA's own; else None.

    An illegal address or a device that fell off the bus ends CUDA's context of the process for good.
    A lack of memory does not.
    """
    while error is not None:
        of_cuda = isinstance(error, torch.AcceleratorError) or (
            isinstance(error, RuntimeError) and CUDA_ERROR_PREFIX in str(error)
        )
        if of_cuda and not any(words in str(error) for words in OUT_OF_MEMORY_WORDS):
            return str(error).partition("\n")[0]
        error = error.__cause__ or error.__context__
    return None


def describe_spent(why: str) -> str:
    """Return the sentence for a process that has had such an error."""
    return f"the GPU's context of this process is lost: {why}; only a new process can use the GPU"
