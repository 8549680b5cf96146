"""A command that runs inside a turn: signals are passed on, its end becomes an exit status."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Self

from .session import HeldTurn

EXIT_NOT_RUN, EXIT_NOT_FOUND = 126, 127

FORWARDED_SIGNALS = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2),
)
TERMINAL_SIGNALS = {signal.SIGINT, signal.SIGQUIT}
"""A terminal sends these to the command, too: it would get them twice."""


class SignalInterrupt(Exception):
    """A signal ended the wait.

    Attributes:
        number: Of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class SignalForwarder:
    """Takes the signals of this process while it is entered."""

    def __init__(self) -> None:
        self._came: list[signal.Signals] = []
        self._heed: Callable[[], object] = lambda: None

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
        self._came.append(number)
        self._heed()

    async def run_cancellable(self, work: Coroutine[Any, Any, None]) -> None:
        """Do some work, which a signal breaks off; one that comes too late waits for `pass_on`.

        Raises:
            Interrupted: It did.
        """
        task = asyncio.ensure_future(work)
        self._heed = task.cancel
        try:
            await task
        except asyncio.CancelledError:
            if not self._came:
                raise
            raise SignalInterrupt(self._came[0]) from None

    def forward_to(self, child: asyncio.subprocess.Process) -> None:
        """Send a process what came and what comes."""

        def heed() -> None:
            while self._came:
                number = self._came.pop(0)
                if not (number in TERMINAL_SIGNALS and os.isatty(0)):
                    with contextlib.suppress(ProcessLookupError):
                        child.send_signal(number)

        self._heed = heed
        heed()


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
