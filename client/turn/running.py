"""Runs a command inside a turn: passes signals on, and returns its exit status."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Self

from .locks import HeldTurn

EXIT_NOT_RUN, EXIT_NOT_FOUND = 126, 127

FORWARDED_SIGNALS = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2),
)
TERMINAL_SIGNALS = {signal.SIGINT, signal.SIGQUIT}
"""Not forwarded on a terminal, which sends them to the command itself."""


class SignalInterrupt(Exception):
    """The signal `number` ended the wait."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class SignalForwarder:
    """Receives the signals of this process inside a `with` block."""

    def __init__(self) -> None:
        self._received: list[signal.Signals] = []
        self._on_signal: Callable[[], object] = lambda: None

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        for each in FORWARDED_SIGNALS:
            loop.add_signal_handler(each, self._note_signal, each)
        return self

    def __exit__(self, *_: object) -> None:
        loop = asyncio.get_running_loop()
        for each in FORWARDED_SIGNALS:
            loop.remove_signal_handler(each)

    def _note_signal(self, number: signal.Signals) -> None:
        self._received.append(number)
        self._on_signal()

    async def run_cancellable(self, work: Coroutine[Any, Any, None]) -> None:
        """Await work that a signal cancels; a signal that comes too late waits for `forward_to`.

        Raises:
            SignalInterrupt: A signal cancelled it.
        """
        task = asyncio.ensure_future(work)
        self._on_signal = task.cancel
        try:
            await task
        except asyncio.CancelledError:
            if not self._received:
                raise
            raise SignalInterrupt(self._received[0]) from None

    def forward_to(self, child: asyncio.subprocess.Process) -> None:
        """Send the signals so far, and all later ones, to a process."""

        def forward() -> None:
            while self._received:
                number = self._received.pop(0)
                if not (number in TERMINAL_SIGNALS and os.isatty(0)):
                    with contextlib.suppress(ProcessLookupError):
                        child.send_signal(number)

        self._on_signal = forward
        forward()


async def run_command(
    command: Sequence[str], turn: HeldTurn, environment: Mapping[str, str], signals: SignalForwarder
) -> int:
    """Run a command that shares the turn; return its exit status as a shell would."""
    try:
        child = await asyncio.create_subprocess_exec(
            *command, pass_fds=turn.filenos, env={**os.environ, **environment}
        )
    except FileNotFoundError:
        return _print_not_run(f"{command[0]} was not found", EXIT_NOT_FOUND)
    except OSError as error:
        return _print_not_run(f"{command[0]} can't be run: {error.strerror}", EXIT_NOT_RUN)
    signals.forward_to(child)
    ended = await child.wait()
    return ended if ended >= 0 else 128 - ended


def _print_not_run(why: str, code: int) -> int:
    print(f"rollout-turn: {why}", file=sys.stderr)  # noqa: T201
    return code
